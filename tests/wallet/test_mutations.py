"""10,000 changed sign-ins, none taken. Two families: texts and signatures changed after signing, and texts that the
right key really signed but that are not what was asked (for another site, another time, or no sign-in message at all).

Each kind of change names the weaker verifier that falls for it; the test fails if that one refuses too, because then
the change proves nothing.
"""

from __future__ import annotations

import dataclasses
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from coincurve import PublicKey

from gpool.core.errors import Invalid
from gpool.core.model import Instant
from gpool.wallet import signin, signing
from gpool.wallet.crypto import ORDER, keccak256
from gpool.wallet.errors import BadSignature, BadSignIn
from gpool.wallet.moments import Moment
from gpool.wallet.signin import SignIn
from gpool.wallet.signing import Signature, WalletKey
from tests.wallet import login

MINUTE = 60_000_000
NOW = Moment("2026-03-01T12:00:00Z").at
ASKED: dict[str, Any] = {
    "domain": "pool.example:8443",
    "uri": "https://pool.example:8443/v1/auth/wallet",
    "chain_id": 1,
    "nonce": "k3Jd82hsLq0Z",
}
LOOKALIKES = {"a": "а", "e": "е", "o": "о", "p": "р", "1": "١", ".": "․", ":": "：", " ": "\u00a0", "0": "０"}  # fmt: skip  # noqa: RUF001
LOOKING_LIKE = {other: letter for letter, other in LOOKALIKES.items()}


@dataclass(frozen=True, slots=True)
class Signed:
    text: str
    signature: str
    key: WalletKey

    def again(self, text: str) -> Signed:
        """The right key signs the changed text."""
        return Signed(text, str(self.key.sign(text.encode("utf-8", "surrogatepass"))), self.key)


Verifier = Callable[[Signed], bool]
Change = Callable[[Signed, random.Random], Signed]


def sign_in(dice: random.Random) -> Signed:
    """A valid one: any key, any of the optional fields."""
    key = WalletKey(keccak256(dice.randbytes(8)))

    def at(seconds: int) -> Moment:
        return Moment.of(Instant(NOW + dice.randrange(seconds * 1000) * 1000))

    def maybe(value: Any) -> Any:
        return value if dice.getrandbits(1) else None

    message = SignIn(
        **ASKED,
        address=key.address,
        issued_at=Moment.of(Instant(NOW - dice.randrange(60) * 1_000_000)),
        scheme=maybe("https"),
        statement="Sign in to the pool at once: 0 fee, no more.",
        expires_at=Moment.of(Instant(at(300).at + MINUTE)),
        not_before=maybe(Moment.of(Instant(NOW - MINUTE))),
        request_id="login" + str(dice.randrange(10**6)),
        resources=("https://pool.example/terms", "ipfs://bafy/" + dice.randbytes(4).hex()),
    )
    text = signin.format(message)
    return Signed(text, str(key.sign(text.encode())), key)


# ---- verifiers: ours, and what is left of it when one defence is taken away


def ours(case: Signed) -> bool:
    try:
        return isinstance(login.verify(case.text, case.signature, **ASKED, now=NOW), SignIn)
    except (BadSignIn, BadSignature):
        return False


def without_signature(case: Signed) -> bool:
    """Reads and checks the message, and believes it."""
    return signin.check(signin.parse(case.text), **ASKED, now=NOW) is None


def without_check(case: Signed) -> bool:
    """Whose message it is, but not for whom or when."""
    message = signin.parse(case.text)
    return signing.verify(case.text.encode(), Signature.parse(case.signature), message.address)


def with_any_spelling(case: Signed) -> bool:
    """Takes the signature in whatever hex it comes, as often as not with rubbish around it."""
    digits = re.sub(r"[^0-9a-f]", "", case.signature.lower().replace("0x", ""))[:130]
    return without_rules(dataclasses.replace(case, signature="0x" + digits))


def without_rules(case: Signed) -> bool:
    """The bare library: any s, and v by whether it is odd."""
    raw = bytes.fromhex(case.signature[2:])
    parity = raw[64] - 27 if raw[64] >= 27 else raw[64]
    digest = signing.personal_hash(case.text.encode())
    key = PublicKey.from_signature_and_message(raw[:64] + bytes([parity & 1]), digest, hasher=None)
    found = signing.of_public_key(key.format(compressed=False)[1:])
    return found == case.key.address and without_signature(case)


def tidying(case: Signed) -> bool:
    """Makes the text what it was surely meant to be, and then verifies that."""
    text = "".join(LOOKING_LIKE.get(letter, letter) for letter in case.text)
    text = "".join(each for each in text if unicodedata.category(each) != "Cf")
    text = unicodedata.normalize("NFKC", text).replace("\r\n", "\n").replace("\r", "\n")
    lines = [re.sub(r"\s+", " ", line).strip() for line in text.strip().split("\n")]
    return ours(dataclasses.replace(case, text="\n".join(lines)))


def by_labels(case: Signed) -> bool:
    """Finds each field wherever it stands, the last one winning, over a signature of the text as it came."""
    text = unicodedata.normalize("NFKC", case.text)
    found = dict(re.findall(r"^\s*(URI|Chain ID|Nonce): (.*?)\s*$", text, re.MULTILINE))
    domain = re.match(r"\s*(?:\w+://)?(\S+)", text)
    account = re.search(r"^\s*(0x[0-9a-f]{40})\s*$", text, re.MULTILINE | re.IGNORECASE)
    if domain is None or account is None:
        return False
    said = (domain[1], found.get("URI"), found.get("Chain ID"), found.get("Nonce"))
    signer = signing.recover(case.text.encode(), Signature.parse(case.signature))
    return said == tuple(map(str, ASKED.values())) and signer.lower() == account[1].lower()


# ---- changes after signing


def message_bit(case: Signed, dice: random.Random) -> Signed:
    raw = bytearray(case.text.encode())
    raw[dice.randrange(len(raw))] ^= 1 << dice.randrange(8)
    return dataclasses.replace(case, text=raw.decode("utf-8", "surrogateescape"))


def message_letter(case: Signed, dice: random.Random) -> Signed:
    at = dice.randrange(len(case.text))
    new = dice.choice("aZ09 -:/.\n") * dice.randrange(2)
    return dataclasses.replace(case, text=case.text[:at] + new + case.text[at + 1 :])


def other_statement(case: Signed, dice: random.Random) -> Signed:
    return dataclasses.replace(
        case, text=case.text.replace("0 fee", f"{dice.randrange(1, 99)} fee")
    )


def other_account(case: Signed, dice: random.Random) -> Signed:
    """Somebody else's address over one's own signature."""
    victim = WalletKey(keccak256(dice.randbytes(8))).address
    return dataclasses.replace(case, text=case.text.replace(case.key.address, victim))


def later_expiry(case: Signed, dice: random.Random) -> Signed:
    year = str(dice.randrange(2027, 9999))
    return dataclasses.replace(
        case, text=re.sub(r"(?<=Expiration Time: )[0-9]{4}", year, case.text)
    )


def carriage_returns(case: Signed, dice: random.Random) -> Signed:
    lines = case.text.split("\n")
    at = dice.randrange(len(lines) - 1)
    every = "\r\n".join(lines)
    one = (
        "\n".join(lines[:at])
        + ("\n" if at else "")
        + lines[at]
        + "\r\n"
        + "\n".join(lines[at + 1 :])
    )
    return dataclasses.replace(case, text=every if dice.getrandbits(1) else one)


def whitespace(case: Signed, dice: random.Random) -> Signed:
    """Anywhere but in the statement, where spaces are the author's own."""
    lines = case.text.split("\n")
    at = dice.choice([at for at in range(len(lines)) if at != 3])
    blank = dice.choice([" ", "\t", "\u00a0", "\u2003", "  "])
    lines[at] = dice.choice([blank + lines[at], lines[at] + blank])
    if dice.randrange(4) == 0:
        lines = (
            ["", *case.text.split("\n")] if dice.getrandbits(1) else [*case.text.split("\n"), ""]
        )
    return dataclasses.replace(case, text="\n".join(lines))


def lookalike(case: Signed, dice: random.Random) -> Signed:
    places = [at for at, letter in enumerate(case.text) if letter in LOOKALIKES]
    at = dice.choice(places)
    return dataclasses.replace(
        case, text=case.text[:at] + LOOKALIKES[case.text[at]] + case.text[at + 1 :]
    )


def invisible(case: Signed, dice: random.Random) -> Signed:
    at = dice.randrange(len(case.text) + 1)
    mark = dice.choice(["\u200b", "\u200d", "\u2060", "\ufeff", "\u202e", "\u00ad"])
    return dataclasses.replace(case, text=case.text[:at] + mark + case.text[at:])


def swapped_resources(case: Signed, dice: random.Random) -> Signed:
    *lines, one, other = case.text.split("\n")
    return dataclasses.replace(case, text="\n".join([*lines, other, one]))


def extra_resource(case: Signed, dice: random.Random) -> Signed:
    return dataclasses.replace(case, text=case.text + f"\n- https://pool.example/{dice.random()}")


def signature_bit(case: Signed, dice: random.Random) -> Signed:
    raw = bytearray.fromhex(case.signature[2:])
    raw[dice.randrange(65)] ^= 1 << dice.randrange(8)
    return dataclasses.replace(case, signature="0x" + raw.hex())


def signature_letter_bit(case: Signed, dice: random.Random) -> Signed:
    raw = bytearray(case.signature.encode())
    raw[dice.randrange(len(raw))] ^= 1 << dice.randrange(8)
    return dataclasses.replace(case, signature=raw.decode("latin-1"))


def signature_spelling(case: Signed, dice: random.Random) -> Signed:
    text = case.signature
    return dataclasses.replace(
        case,
        signature=dice.choice(
            [text[2:], "0X" + text[2:], text.upper(), text + "\n", " " + text, text + "00", "0x" + text,
             text[:66] + " " + text[66:], text[:20] + "_" + text[20:], text[:2] + text[2:].upper()]
        ),
    )  # fmt: skip


def signature_of_another(case: Signed, dice: random.Random) -> Signed:
    return dataclasses.replace(case, signature=sign_in(dice).signature)


def signature_parts(case: Signed, dice: random.Random) -> Signed:
    """Scalars out of range, swapped, cut, in the compact form of EIP-2098, or all zero."""
    raw = bytes.fromhex(case.signature[2:])
    r, s, v = raw[:32], raw[32:64], raw[64:]
    order = ORDER.to_bytes(32, "big")
    compact = bytes([s[0] | (v[0] - 27) << 7]) + s[1:]
    shape = dice.choice(
        [s + r + v, bytes(32) + s + v, r + bytes(32) + v, order + s + v, r + order + v, r + s, bytes(65),
         r + compact, v + r + s, r + s + v + v, b"", b"\xff" * 65, r + r + v, s + s + v]
    )  # fmt: skip
    return dataclasses.replace(case, signature="0x" + shape.hex())


def mirrored(case: Signed, dice: random.Random) -> Signed:
    """The malleable twin: n - s with v flipped, counted from 27 or from 0."""
    good = Signature.parse(case.signature)
    v = bytes([dice.choice([0, 27]) + 1 - good.parity])
    raw = good.r.to_bytes(32, "big") + (ORDER - good.s).to_bytes(32, "big") + v
    return dataclasses.replace(case, signature="0x" + raw.hex())


def other_v(case: Signed, dice: random.Random) -> Signed:
    """Every v but the two that are this signature's own (27 + parity, and the parity itself)."""
    parity = Signature.parse(case.signature).parity
    v = dice.choice([v for v in range(256) if v not in (parity, 27 + parity)])
    return dataclasses.replace(case, signature=case.signature[:-2] + bytes([v]).hex())


# ---- changes that the right key signs


def replaced(field: str, *values: Any) -> Change:
    """The same message with another value, rightly signed: what a phishing site would pass on."""

    def change(case: Signed, dice: random.Random) -> Signed:
        message = dataclasses.replace(signin.parse(case.text), **{field: dice.choice(values)})
        return case.again(signin.format(message))

    change.__name__ = f"signed_for_another_{field}"
    return change


def signed_form(change: Change) -> Change:
    """A change of the text's form that is signed as well, so only the strict grammar stands in its way."""

    def form(case: Signed, dice: random.Random) -> Signed:
        return case.again(change(case, dice).text)

    form.__name__ = f"signed_{change.__name__}"
    return form


def swapped_lines(case: Signed, dice: random.Random) -> Signed:
    lines = case.text.split("\n")
    first = lines.index(next(line for line in lines if line.startswith("URI: ")))
    last = lines.index("Resources:")
    one, other = dice.sample(range(first, last), 2)
    lines[one], lines[other] = lines[other], lines[one]
    return dataclasses.replace(case, text="\n".join(lines))


def doubled_line(case: Signed, dice: random.Random) -> Signed:
    """A field twice: the evil value first, ours last."""
    label = dice.choice(["URI: ", "Chain ID: ", "Nonce: ", "Issued At: "])
    return dataclasses.replace(
        case, text=case.text.replace(f"\n{label}", f"\n{label}evil0000\n{label}")
    )


def extra_line(case: Signed, dice: random.Random) -> Signed:
    lines = case.text.split("\n")
    lines.insert(dice.randrange(5, len(lines) - 2), dice.choice(["", "More: 1", "x", " "]))
    return dataclasses.replace(case, text="\n".join(lines))


def missing_line(case: Signed, dice: random.Random) -> Signed:
    label = dice.choice(["Version", "Issued At"])
    return dataclasses.replace(case, text=re.sub(rf"\n{label}: .*", "", case.text))


def other_version(case: Signed, dice: random.Random) -> Signed:
    version = dice.choice(["2", "0", "01", "1.0", "", "1 ", "one"])
    return dataclasses.replace(case, text=case.text.replace("Version: 1", f"Version: {version}"))


def account_case(case: Signed, dice: random.Random) -> Signed:
    right = case.key.address
    at = dice.choice([at for at in range(2, 42) if right[at].isalpha()])
    wrong = right[:at] + right[at].swapcase() + right[at + 1 :]
    text = dice.choice([wrong, "0x" + right[2:].lower(), "0x" + right[2:].upper()])
    return dataclasses.replace(case, text=case.text.replace(right, text))


def bad_calendar(case: Signed, dice: random.Random) -> Signed:
    text = dice.choice(["2100-02-31T00:00:00Z", "never", "", "2100-01-01", "2100-01-01T25:00:00Z"])
    return dataclasses.replace(case, text=re.sub(r"(?<=Expiration Time: ).*", text, case.text))


def moment(seconds: int) -> Moment:
    return Moment.of(Instant(NOW + seconds * 1_000_000))


KINDS: list[tuple[Change, Verifier]] = [
    (message_bit, without_signature),
    (message_letter, without_signature),
    (other_statement, without_signature),
    (other_account, without_signature),
    (later_expiry, without_signature),
    (swapped_resources, without_signature),
    (extra_resource, without_signature),
    (carriage_returns, tidying),
    (whitespace, tidying),
    (lookalike, tidying),
    (invisible, tidying),
    (signature_bit, without_signature),
    (signature_letter_bit, with_any_spelling),
    (signature_spelling, with_any_spelling),
    (signature_of_another, without_signature),
    (signature_parts, without_signature),
    (mirrored, without_rules),
    (other_v, without_rules),
    (
        replaced(
            "domain", "evil.example", "pool.example", "pool.example:844", "x@pool.example:8443", "pool.example.evil.example:8443",
            "pool.example.evil.example:8443", "POOL.EXAMPLE:8443", "www.pool.example:8443", "pool.example.:8443",
        ),
        without_check,
    ),
    (replaced("uri", "https://evil.example/v1/auth/wallet", ASKED["uri"] + "/", ASKED["uri"] + "#x", ASKED["uri"] + "?x", "http" + ASKED["uri"][5:]), without_check),
    (replaced("chain_id", 0, 2, 5, 10, 11, 137, 2**255 + 1), without_check),
    (replaced("nonce", "k3Jd82hsLq0z", "k3Jd82hsLq0", "k3Jd82hsLq0ZZ", "00000000", "K3JD82HSLQ0Z"), without_check),
    (replaced("scheme", "http", "ftp", "httpss"), without_check),
    (replaced("expires_at", moment(0), moment(-1), moment(-60 * 60 * 24 * 365), Moment("2026-03-01T13:00:00+02:00")), without_check),
    (replaced("not_before", moment(1), moment(60 * 60 * 24 * 365), Moment("2026-03-01T11:00:00-02:00")), without_check),
    (replaced("issued_at", moment(301), moment(60 * 60), Moment("9999-12-31T23:59:59Z")), without_check),
    (signed_form(carriage_returns), by_labels),
    (signed_form(whitespace), by_labels),
    (signed_form(lookalike), by_labels),
    (signed_form(invisible), by_labels),
    (signed_form(swapped_lines), by_labels),
    (signed_form(doubled_line), by_labels),
    (signed_form(extra_line), by_labels),
    (signed_form(missing_line), by_labels),
    (signed_form(other_version), by_labels),
    (signed_form(account_case), by_labels),
    (signed_form(bad_calendar), by_labels),
]  # fmt: skip


def falls_for(verifier: Verifier, case: Signed) -> bool:
    try:
        return verifier(case)
    except (Invalid, ValueError, IndexError):
        return False


def test_none_of_10_000_changed_sign_ins_is_taken() -> None:
    dice = random.Random(4361)
    tried: Counter[str] = Counter()
    taken: list[tuple[str, Signed]] = []
    fooled: Counter[str] = Counter()
    rounds = 10_000 // len(KINDS) + 1
    for _ in range(rounds):
        good = sign_in(dice)
        assert ours(good)
        for change, weaker in KINDS:
            case = change(good, dice)
            while (case.text, case.signature) == (good.text, good.signature):
                case = change(good, dice)
            name = change.__name__
            tried[name] += 1
            if ours(case):
                taken.append((name, case))
            fooled[name] += falls_for(weaker, case)
    assert tried.total() >= 10_000
    assert taken == []
    assert {name for name in tried if not fooled[name]} == set()


@pytest.mark.parametrize("text", ["", "\0", "\ud800", "0x", "é", "\n" * 9000])
def test_whatever_comes_only_our_errors_are_raised(text: str) -> None:
    good = sign_in(random.Random(1))
    with pytest.raises(BadSignIn):
        login.verify(text, good.signature, **ASKED, now=NOW)
    with pytest.raises(BadSignature):
        login.verify(good.text, text, **ASKED, now=NOW)


def test_v_may_count_from_0_as_hardware_wallets_do() -> None:
    good = sign_in(random.Random(2))
    parity = Signature.parse(good.signature).parity
    assert ours(dataclasses.replace(good, signature=good.signature[:-2] + f"{parity:02x}"))
