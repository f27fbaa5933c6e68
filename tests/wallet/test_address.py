"""Addresses have one spelling."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.wallet import signing
from gpool.wallet.crypto import keccak256
from gpool.wallet.errors import BadAddress

# The examples of EIP-55: all capitals, all lower case, mixed.
SPELLED = [
    "0x52908400098527886E0F7030069857D2E4169EE7",
    "0x8617E340B3D01FA5F11F306F4090FD50E238070D",
    "0xde709f2102306220921060314715629080e2fb77",
    "0x27b1fdb04752bbc536007a920d24acb045561c26",
    "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed",
    "0xfB6916095ca1df60bB79Ce92cE3Ea74c37c5d359",
    "0xdbF03B407c01E7cD3CBea99509d93f8DDDC8C6FB",
    "0xD1220A0cf47c7B9Be7A2E6BA89F429762e7b9aDb",
]


def test_keccak_is_the_original_and_not_sha3() -> None:
    empty = "c5d2460186f7233c927e7db2dcc703c0e500b653ca82273b7bfad8045d85a470"
    assert keccak256(b"").hex() == empty


@pytest.mark.parametrize("text", SPELLED)
def test_the_examples_of_the_standard_are_read_and_written(text: str) -> None:
    assert signing.parse(text) == text
    assert signing.from_bytes(signing.to_bytes(signing.parse(text))) == text


@given(st.binary(min_size=20, max_size=20))
def test_what_is_written_is_always_read_back(raw: bytes) -> None:
    assert signing.to_bytes(signing.parse(signing.from_bytes(raw))) == raw


@given(st.binary(min_size=20, max_size=20), st.integers(2, 41))
def test_no_letter_can_change_its_case(raw: bytes, at: int) -> None:
    right = signing.from_bytes(raw)
    changed = right[:at] + right[at].swapcase() + right[at + 1 :]
    if changed == right:
        return
    with pytest.raises(BadAddress, match="EIP-55"):
        signing.parse(changed)
    assert bytes.fromhex(changed[2:]) == raw  # a reader without the checksum takes it


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0x",
        SPELLED[4][2:],
        "0X" + SPELLED[4][2:],
        SPELLED[4] + "0",
        SPELLED[4][:-1],
        SPELLED[4] + "\n",
        " " + SPELLED[4],
        SPELLED[4][:-1] + "g",
        SPELLED[4][:-1] + "\uff11",
        "0x" + "٣" * 40,
        "\ud800",
    ],
)
def test_other_spellings_are_refused(text: str) -> None:
    with pytest.raises(BadAddress):
        signing.parse(text)


def test_a_lower_case_address_is_refused_with_the_right_spelling() -> None:
    with pytest.raises(BadAddress, match=SPELLED[4]):
        signing.parse(SPELLED[4].lower())


def test_bytes_of_another_length_are_no_address() -> None:
    with pytest.raises(BadAddress):
        signing.from_bytes(bytes(19))
    with pytest.raises(BadAddress):
        signing.of_public_key(bytes(65))
