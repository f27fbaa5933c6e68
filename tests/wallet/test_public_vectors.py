"""The public EIP-4361 vectors. A vector's `time` is the instant at which its message is verified; without one it is
verified at a fixed instant of our own, after the vectors were made and before they expire in 2100.

One positive vector is verified two years before it was issued (`time` 2020, issued 2022): the standard knows only
expiry and not-before. So the vectors are held to `check_times`; that `check` also refuses what was issued far ahead is ours.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest

from gpool.core.errors import Invalid
from gpool.wallet import signin, signing
from gpool.wallet.errors import BadMoment, BadSignature, BadSignIn
from gpool.wallet.moments import Moment
from gpool.wallet.signin import SignIn, SignInProblem, SignInReason
from gpool.wallet.signing import Address, Signature
from tests.wallet import login

Vectors = Callable[[str], dict[str, Any]]
USUAL_TIME = "2026-11-15T00:00:00Z"


def built(fields: dict[str, Any]) -> SignIn:
    """A message of a vector's fields; our class has no version, so another one than 1 is refused in the text."""
    for name in ("domain", "address", "uri", "chainId", "nonce", "issuedAt", "version"):
        if name not in fields:
            raise BadSignIn(f"there is no {name}", field=name)
    resources = fields.get("resources")
    optional = {name: fields.get(name) for name in ("expirationTime", "notBefore")}
    message = SignIn(
        scheme=fields.get("scheme"),
        domain=fields["domain"],
        address=Address(fields["address"]),
        statement=fields.get("statement"),
        uri=fields["uri"],
        chain_id=int(fields["chainId"]),
        nonce=fields["nonce"],
        issued_at=Moment(fields["issuedAt"]),
        expires_at=Moment(text) if (text := optional["expirationTime"]) else None,
        not_before=Moment(text) if (text := optional["notBefore"]) else None,
        request_id=fields.get("requestId"),
        resources=tuple(resources) if resources is not None else None,
    )
    text = signin.format(message).replace("\nVersion: 1\n", f"\nVersion: {fields['version']}\n")
    return signin.parse(text)


def outcome(fields: dict[str, Any]) -> str:
    """What becomes of a verification vector: `signed`, or why not."""
    try:
        message = built(fields)
        signature = Signature.parse(fields["signature"])
    except (BadSignIn, BadMoment, BadSignature) as exc:
        return type(exc).__name__
    problem = signin.check_times(message, now=Moment(fields.get("time", USUAL_TIME)).at)
    if problem is not None:
        return problem.reason
    text = signin.format(message).encode()
    return "signed" if signing.verify(text, signature, message.address) else "wrong_signer"


def test_every_message_that_must_parse_does_and_is_written_back(public: Vectors) -> None:
    for name, vector in public("parsing_positive").items():
        message = signin.parse(vector["message"])
        assert message == built(vector["fields"]), name
        assert signin.format(message) == vector["message"], name


def test_every_message_that_must_not_parse_is_refused_with_its_line(public: Vectors) -> None:
    for name, text in public("parsing_negative").items():
        with pytest.raises(BadSignIn) as caught:
            signin.parse(text)
        assert re.match(r"line [0-9]+: ", caught.value.detail), name


def test_every_set_of_fields_that_is_no_message_is_refused(public: Vectors) -> None:
    for name, fields in public("parsing_negative_objects").items():
        with pytest.raises(Invalid):
            built(fields)
        assert name


def test_every_signature_that_must_verify_does(public: Vectors) -> None:
    outcomes = {name: outcome(fields) for name, fields in public("verification_positive").items()}
    assert set(outcomes.values()) == {"signed"}, outcomes


def test_every_signature_that_must_not_verify_is_refused_for_its_own_reason(
    public: Vectors,
) -> None:
    outcomes = {name: outcome(fields) for name, fields in public("verification_negative").items()}
    expected = {
        "expired message": "expired",
        "custom time": "expired",
        "not yet valid": "not_yet_valid",
        "malformed signature": "BadSignature",
        "invalid notBefore": "BadMoment",
    }
    assert {name: outcomes[name] for name in expected} == expected
    assert "signed" not in outcomes.values(), outcomes


def test_the_time_of_a_vector_decides_and_nothing_else(public: Vectors) -> None:
    """The control: the refused ones verify once the time is right, so it was the time that refused them."""
    refused = public("verification_negative")
    assert outcome(refused["expired message"] | {"time": "2020-01-05T00:00:00Z"}) == "signed"
    assert outcome(refused["custom time"] | {"time": USUAL_TIME}) == "signed"
    assert outcome(refused["not yet valid"] | {"time": "2100-01-07T14:31:43.952Z"}) == "signed"


def test_a_whole_sign_in_of_the_vectors_is_taken_and_one_from_the_future_is_not(
    public: Vectors,
) -> None:
    vectors = public("verification_positive")

    def verified(fields: dict[str, Any], time: str) -> SignIn | SignInProblem:
        return login.verify(
            signin.format(built(fields)),
            fields["signature"],
            domain="login.xyz",
            uri="https://login.xyz",
            chain_id=1,
            nonce=fields["nonce"],
            now=Moment(time).at,
        )

    assert isinstance(verified(vectors["example message"], USUAL_TIME), SignIn)
    early = verified(vectors["expired message"], vectors["expired message"]["time"])
    assert isinstance(early, SignInProblem)
    assert early.reason is SignInReason.ISSUED_AHEAD


def test_a_contract_wallets_sign_in_is_left_to_its_contract(public: Vectors) -> None:
    for name, vector in public("eip1271").items():
        message = signin.parse(vector["message"])
        raw = signing.parse_signature(vector["signature"])
        digest = signing.personal_hash(vector["message"].encode())
        assert signing.call_data(digest, raw).startswith(signing.MAGIC + digest), name
        with contextlib.suppress(BadSignature):  # a contract's bytes need not be of the curve
            signature = Signature.from_bytes(raw)
            assert not signing.verify(vector["message"].encode(), signature, message.address), name
