"""Signatures: one for each key and message. Each refusal has a control: the bare library would have said yes."""

from __future__ import annotations

import pytest
from coincurve import PublicKey
from hypothesis import given
from hypothesis import strategies as st

from gpool.wallet import signing
from gpool.wallet.crypto import ORDER
from gpool.wallet.errors import BadKey, BadSignature
from gpool.wallet.signing import Signature, WalletKey

# From the documentation of web3.js, `eth.accounts.sign("Some data", …)`.
KEY = WalletKey.parse("0x4c0883a69102937d6231471b5dbb6204fe5129617082792ae468d01a3f362318")
ADDRESS = "0x2c7536E3605D9C16a7a3D7b1898e529396a65c23"
SIGNED = (
    "0xb91467e570a6466aa9e9876cbcd013baba02900b8979d43fe208a4a4f339f5fd"
    "6007e74cd82e037b800186422fc2da167c747ef045e5d18a5f5d4300f8e1a0291c"
)
DIGEST = "1da44b586eb0729ff70a73c326926f6ed5a25f5b056e7f47fbc6e58d86871655"

keys = st.integers(1, ORDER - 1).map(lambda number: WalletKey(number.to_bytes(32, "big")))


def bare_recover(raw: bytes, message: bytes) -> str:
    """What a program without our rules does: hand the bytes to the library."""
    parity = raw[64] - 27 if raw[64] >= 27 else raw[64]
    key = PublicKey.from_signature_and_message(
        raw[:64] + bytes([parity]), signing.personal_hash(message), hasher=None
    )
    return signing.of_public_key(key.format(compressed=False)[1:])


def mirrored(signature: Signature) -> bytes:
    """The other signature of the same key and message: n - s, with the parity flipped."""
    high = (ORDER - signature.s).to_bytes(32, "big")
    return signature.r.to_bytes(32, "big") + high + bytes([28 - signature.parity])


def test_a_known_key_signs_as_web3_does() -> None:
    assert signing.personal_hash(b"Some data").hex() == DIGEST
    assert KEY.address == ADDRESS
    assert str(KEY.sign(b"Some data")) == SIGNED
    assert signing.recover(b"Some data", Signature.parse(SIGNED)) == ADDRESS


@given(keys, st.binary(max_size=300))
def test_what_a_key_signs_is_always_recovered_to_its_address(
    key: WalletKey, message: bytes
) -> None:
    signature = key.sign(message)
    assert signing.recover(message, signature) == key.address
    assert signing.verify(message, Signature.parse(str(signature)), key.address)
    assert not signing.verify(message + b" ", signature, key.address)


@given(keys, st.binary(max_size=64))
def test_the_mirrored_signature_is_never_taken(key: WalletKey, message: bytes) -> None:
    twin = mirrored(key.sign(message))
    assert bare_recover(twin, message) == key.address
    with pytest.raises(BadSignature, match="upper half"):
        Signature.from_bytes(twin)


@pytest.mark.parametrize("v", range(256))
def test_v_counts_from_0_or_from_27_and_nothing_else(v: int) -> None:
    raw = bytes.fromhex(SIGNED[2:])[:64] + bytes([v])
    if v in (1, 28):
        assert signing.recover(b"Some data", Signature.from_bytes(raw)) == ADDRESS
    elif v in (0, 27):
        assert signing.recover(b"Some data", Signature.from_bytes(raw)) != ADDRESS
    else:
        with pytest.raises(BadSignature, match=f"v of the signature is {v}"):
            Signature.from_bytes(raw)
        lenient = bytes(
            [27 + (v - 27) % 2]
        )  # a reader that only looks whether v is odd takes half of them
        assert (bare_recover(raw[:64] + lenient, b"Some data") == ADDRESS) == (v % 2 == 0)


@pytest.mark.parametrize("value", [0, ORDER, ORDER + 1, 2**256 - 1])
def test_r_and_s_are_scalars_of_the_curve(value: int) -> None:
    good = Signature.parse(SIGNED)
    for r, s in ((value, good.s), (good.r, value)):
        with pytest.raises(BadSignature, match="zero or not below"):
            Signature(r, s, good.parity)
        raw = r.to_bytes(32, "big") + s.to_bytes(32, "big") + b"\x1b"
        with pytest.raises(BadSignature):
            Signature.from_bytes(raw)


def test_s_may_be_half_the_order_and_no_more() -> None:
    half = ORDER // 2
    assert Signature(1, half, 0).s == half
    with pytest.raises(BadSignature):
        Signature(1, half + 1, 0)


def test_an_r_that_is_no_point_is_refused() -> None:
    with pytest.raises(BadSignature, match="no key"):
        Signature(5, 1, 0).recover(bytes(32))  # x = 5 is not on the curve
    assert not signing.verify(b"", Signature(5, 1, 0), KEY.address)


@pytest.mark.parametrize(
    ("text", "lenient"),
    [
        (SIGNED[2:], bytes.fromhex(SIGNED[2:])),
        (SIGNED.upper(), bytes.fromhex(SIGNED[2:].upper())),
        ("0x" + SIGNED[2:].upper(), bytes.fromhex(SIGNED[2:].upper())),
        (SIGNED + "\n", bytes.fromhex(SIGNED[2:] + "\n")),
        (SIGNED[:66] + " " + SIGNED[66:], bytes.fromhex(SIGNED[2:66] + " " + SIGNED[66:])),
        (SIGNED + "00", bytes.fromhex(SIGNED[2:])),
    ],
)
def test_a_signature_has_one_spelling(text: str, lenient: bytes) -> None:
    with pytest.raises(BadSignature):
        Signature.parse(text)
    assert bare_recover(lenient, b"Some data") == ADDRESS


@pytest.mark.parametrize("text", ["", "0x", SIGNED[:-2], SIGNED[:-1], SIGNED[:-1] + "g", "\ud800"])
def test_what_is_no_signature_is_refused(text: str) -> None:
    with pytest.raises(BadSignature):
        Signature.parse(text)


@pytest.mark.parametrize("length", [0, 64, 66, 130])
def test_only_65_bytes_are_a_signature(length: int) -> None:
    with pytest.raises(BadSignature, match="65 bytes"):
        Signature.from_bytes(bytes(length))


def test_only_32_bytes_are_a_digest() -> None:
    with pytest.raises(BadSignature, match="32 bytes"):
        Signature.parse(SIGNED).recover(b"short")


@pytest.mark.parametrize("number", [0, ORDER, 2**256 - 1])
def test_a_key_is_a_scalar_of_the_curve(number: int) -> None:
    with pytest.raises(BadKey):
        WalletKey(number.to_bytes(32, "big"))


@pytest.mark.parametrize("text", ["", "0x", "12" * 31, "12" * 33, "zz" * 32, " " + "12" * 32])
def test_a_key_that_does_not_parse_is_never_repeated(text: str) -> None:
    with pytest.raises(BadKey) as caught:
        WalletKey.parse(text)
    assert len(text) < 4 or text not in str(caught.value)


def test_a_key_never_shows_its_secret() -> None:
    for shown in (repr(KEY), str(KEY), f"{KEY}"):
        assert KEY.secret.hex() not in shown
        assert repr(KEY.secret) not in shown
