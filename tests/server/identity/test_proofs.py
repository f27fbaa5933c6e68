"""A node's proofs: the right answer once, here, now; never a replay, a stale one, another's, or one for something else."""

from __future__ import annotations

import random
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.errors import Invalid
from gpool.core.ids import encode
from gpool.core.model import SECOND, Instant
from gpool.server.identity.access_tokens import Claims, TokenType, thumbprint
from gpool.server.identity.node_proofs import (
    _WEAK,
    CHALLENGE_LIFE,
    REQUEST_LIFE,
    KeyProof,
    NotProven,
    Proofs,
    UsedNonces,
    is_sound,
)
from gpool.transfer.node_proofs import (
    ChallengeStatement,
    NodeKey,
    Purpose,
    RequestStatement,
    new_nonce,
    parse_request_proof,
)

NOW = Instant(1_800_000_000 * SECOND)
HOST, SECRET = "pool.example:8642", b"s" * 32
KEY, OTHER_KEY = NodeKey(b"1" * 32), NodeKey(b"2" * 32)
NODE, OTHER_NODE = encode("node", 1), encode("node", 2)


def later(span: int) -> Instant:
    return Instant(NOW + span)


def statement(
    proofs: Proofs, *, entropy: bytes = b"e" * 16, now: Instant = NOW
) -> ChallengeStatement:
    nonce = proofs.challenge(Purpose.CHANNEL, NODE, entropy, now)
    return ChallengeStatement(Purpose.CHANNEL, HOST, NODE, KEY.public, nonce)


def test_the_right_answer_is_taken_once() -> None:
    proofs = Proofs(SECRET, HOST)
    said = statement(proofs)
    signature = KEY.sign(said)
    assert proofs.answered(said, signature, NOW) == KeyProof(thumbprint(KEY.public))
    assert proofs.answered(said, signature, NOW) is NotProven.USED


def test_an_answer_is_good_until_the_challenge_expires() -> None:
    for late, outcome in [
        (CHALLENGE_LIFE - 1, KeyProof),
        (CHALLENGE_LIFE, NotProven),
        (CHALLENGE_LIFE * 100, NotProven),
    ]:
        proofs = Proofs(SECRET, HOST)
        said = statement(proofs)
        assert isinstance(proofs.answered(said, KEY.sign(said), later(late)), outcome)


@pytest.mark.parametrize(
    ("heard", "why"),
    [
        ({"node": OTHER_NODE}, NotProven.FOREIGN),
        ({"purpose": Purpose.TOKEN}, NotProven.FOREIGN),
        ({"server": "other.example:8642"}, NotProven.FOREIGN),
        ({"public": OTHER_KEY.public}, NotProven.SIGNATURE),
        ({"nonce": "A" * 54}, NotProven.FOREIGN),
        ({"nonce": "A" * 53}, NotProven.FORM),
        ({"nonce": ""}, NotProven.FORM),
        ({"public": b"short"}, NotProven.KEY),
    ],
)
def test_an_answer_to_another_question_is_refused(heard: dict[str, object], why: NotProven) -> None:
    proofs = Proofs(SECRET, HOST)
    said = statement(proofs)
    signature = KEY.sign(said)
    other = replace(said, **heard)  # type: ignore[arg-type]
    assert proofs.answered(other, signature, NOW) is why
    assert proofs.answered(said, signature, NOW) == KeyProof(thumbprint(KEY.public))  # the control


def test_a_relayed_challenge_of_another_server_is_of_no_use_there() -> None:
    """The node signs the name it knows, so what it tells a false server does not open the real one."""
    real = Proofs(SECRET, HOST)
    nonce = real.challenge(Purpose.CHANNEL, NODE, b"e" * 16, NOW)
    told_the_false_one = KEY.sign(
        ChallengeStatement(Purpose.CHANNEL, "false.example:8642", NODE, KEY.public, nonce)
    )
    said = ChallengeStatement(Purpose.CHANNEL, HOST, NODE, KEY.public, nonce)
    assert real.answered(said, told_the_false_one, NOW) is NotProven.SIGNATURE


def test_a_wrong_answer_does_not_use_up_the_challenge() -> None:
    """Otherwise a stranger who overhears a nonce could keep a node out."""
    proofs = Proofs(SECRET, HOST)
    said = statement(proofs)
    assert proofs.answered(said, OTHER_KEY.sign(said), NOW) is NotProven.SIGNATURE
    assert isinstance(proofs.answered(said, KEY.sign(said), NOW), KeyProof)


def test_of_ten_thousand_bad_proofs_none_is_taken() -> None:
    dice = random.Random(7)
    proofs = Proofs(SECRET, HOST)
    elsewhere = Proofs(b"t" * 32, HOST)
    used = statement(proofs)
    spent = KEY.sign(used)
    assert isinstance(proofs.answered(used, spent, NOW), KeyProof)
    taken: dict[str, int] = {}
    for turn in range(10_000):
        said = statement(proofs, entropy=dice.randbytes(16))
        match kind := ("replayed", "stale", "stolen", "foreign", "bent", "crossed")[turn % 6]:
            case "replayed":
                answer = proofs.answered(used, spent, later(dice.randrange(CHALLENGE_LIFE * 2)))
            case "stale":
                answer = proofs.answered(
                    said, KEY.sign(said), later(CHALLENGE_LIFE + dice.randrange(10**9))
                )
            case "stolen":  # everything but the key
                answer = proofs.answered(said, OTHER_KEY.sign(said), NOW)
            case "foreign":
                said = statement(elsewhere, entropy=dice.randbytes(16))
                answer = proofs.answered(said, KEY.sign(said), NOW)
            case "bent":
                letters = list(KEY.sign(said))
                at = dice.randrange(len(letters))
                letters[at] = "A" if letters[at] != "A" else "B"
                answer = proofs.answered(said, "".join(letters), NOW)
            case _:  # signed for another purpose
                crossed = KEY.sign(replace(said, purpose=Purpose.TOKEN))
                answer = proofs.answered(said, crossed, NOW)
        taken[kind] = taken.get(kind, 0) + isinstance(answer, KeyProof)
    assert taken == dict.fromkeys(taken, 0)
    assert len(taken) == 6


def test_a_server_that_forgets_takes_the_same_replay() -> None:
    """The control for the memory."""
    forgetful = Proofs(SECRET, HOST, UsedNonces(most=1))
    said = statement(forgetful)
    signature = KEY.sign(said)
    assert isinstance(forgetful.answered(said, signature, NOW), KeyProof)
    assert isinstance(Proofs(SECRET, HOST).answered(said, signature, NOW), KeyProof)


def test_what_is_remembered_is_forgotten_once_it_has_expired_and_a_full_memory_says_so() -> None:
    memory = UsedNonces(most=2)
    assert memory.take(("a", "1"), later(10), NOW) is None
    assert memory.take(("a", "2"), later(20), NOW) is None
    assert memory.take(("a", "3"), later(30), NOW) is NotProven.FULL
    assert memory.take(("a", "2"), later(20), later(10)) is NotProven.USED
    assert memory.take(("a", "3"), later(30), later(10)) is None
    assert len(memory) == 2


@given(st.text(max_size=120), st.text(max_size=120))
def test_any_text_has_an_answer(nonce: str, signature: str) -> None:
    proofs = Proofs(SECRET, HOST)
    said = ChallengeStatement(Purpose.CHANNEL, HOST, NODE, KEY.public, nonce)
    assert isinstance(proofs.answered(said, signature, NOW), NotProven)


def test_a_weak_key_under_which_anybody_signs_proves_nothing() -> None:
    proofs = Proofs(SECRET, HOST)
    for public in _WEAK:
        assert not is_sound(public)
        forged = forge_under(public)
        said = replace(statement(proofs), public=public)
        assert proofs.answered(said, "A" * 86, NOW) is NotProven.KEY
        assert forged, public.hex()
    assert is_sound(KEY.public)


def forge_under(weak: bytes) -> bool:
    """The control: without any private key, a signature that the library takes for some message."""
    for number in range(200):
        for start in _WEAK:
            try:
                public = Ed25519PublicKey.from_public_bytes(weak)
                public.verify(start + bytes(32), b"%d" % number)
            except InvalidSignature:
                continue
            return True
    return False


# ---- one request at a time

TOKEN = "header.payload.signature"
CLAIMS = Claims(TokenType.NODE, NODE, "jti", 0, 1, key=thumbprint(KEY.public))


def asked(**changes: object) -> RequestStatement:
    base = RequestStatement(HOST, "PUT", "/v1/artifacts/abc", TOKEN, NOW // SECOND, "n" * 22)
    return replace(base, **changes)  # type: ignore[arg-type]


def test_a_request_signed_by_the_tokens_key_is_taken_once() -> None:
    proofs = Proofs(SECRET, HOST)
    header = KEY.request_proof(asked())
    assert isinstance(proofs.request(asked(), header, KEY.public, CLAIMS, NOW), KeyProof)
    assert proofs.request(asked(), header, KEY.public, CLAIMS, NOW) is NotProven.USED
    again = KEY.request_proof(asked(nonce=new_nonce()))
    assert isinstance(proofs.request(asked(), again, KEY.public, CLAIMS, NOW), KeyProof)


@pytest.mark.parametrize(
    "change",
    [
        {"method": "GET"},
        {"path": "/v1/artifacts/abd"},
        {"path": "/v1/artifacts/abc?x"},
        {"token": TOKEN + "x"},
        {"lease": "t-0000000000001:2"},
        {"server": "other.example:8642"},
    ],
)
def test_a_proof_for_another_request_is_refused(change: dict[str, object]) -> None:
    header = KEY.request_proof(asked(**change))
    found = Proofs(SECRET, HOST).request(asked(), header, KEY.public, CLAIMS, NOW)
    assert found is NotProven.SIGNATURE


def test_a_stolen_token_without_its_key_is_useless() -> None:
    proofs = Proofs(SECRET, HOST)
    thiefs = OTHER_KEY.request_proof(asked())
    assert proofs.request(asked(), thiefs, OTHER_KEY.public, CLAIMS, NOW) is NotProven.KEY
    assert proofs.request(asked(), thiefs, KEY.public, CLAIMS, NOW) is NotProven.SIGNATURE
    unbound = replace(CLAIMS, key=None)
    own = KEY.request_proof(asked())
    assert proofs.request(asked(), own, KEY.public, unbound, NOW) is NotProven.KEY


@pytest.mark.parametrize("off", [-REQUEST_LIFE - SECOND, REQUEST_LIFE + SECOND])
def test_a_request_proof_from_another_time_is_refused(off: int) -> None:
    header = KEY.request_proof(asked())
    found = Proofs(SECRET, HOST).request(asked(), header, KEY.public, CLAIMS, later(off))
    assert found is NotProven.STALE


def test_a_request_proof_is_remembered_for_as_long_as_its_time_would_be_taken() -> None:
    proofs = Proofs(SECRET, HOST)
    header = KEY.request_proof(asked())
    assert isinstance(
        proofs.request(asked(), header, KEY.public, CLAIMS, later(-REQUEST_LIFE)), KeyProof
    )
    for off in range(-REQUEST_LIFE, REQUEST_LIFE + 5 * SECOND, SECOND // 2):
        assert isinstance(
            proofs.request(asked(), header, KEY.public, CLAIMS, later(off)), NotProven
        )


@pytest.mark.parametrize("header", ["", "1.2.3", "x" * 200, "٣." + "n" * 22 + "." + "A" * 86])
def test_what_is_no_proof_is_refused(header: str) -> None:
    assert parse_request_proof(header) is None
    found = Proofs(SECRET, HOST).request(asked(), header, KEY.public, CLAIMS, NOW)
    assert found is NotProven.FORM


# ---- the node's key file


def test_a_nodes_key_is_made_once_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "agent" / "node.key"
    first = NodeKey.from_file(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert NodeKey.from_file(path).public == first.public
    path.chmod(0o644)
    with pytest.raises(Invalid, match="chmod 600"):
        NodeKey.from_file(path)
    path.chmod(0o600)
    path.write_text("nonsense")
    with pytest.raises(Invalid, match="contains no node key"):
        NodeKey.from_file(path)
