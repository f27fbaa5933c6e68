"""What is wrong with a document, in sentences that name the field, what is allowed, and what was given."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pytest
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, SecretStr, ValidationError

from gpool.server.api.problems import invalid
from gpool.wire.documents import TaskRequest
from gpool.wire.identity import (
    NamedSecretRequest,
    OidcFinish,
    PasswordChange,
    PasswordSignIn,
    RefreshRequest,
    SignOutRequest,
    TeamJoin,
    UserRequest,
    WalletLink,
    WalletSignIn,
    WalletUnlink,
)
from gpool.wire.nodes import NodeRequest


class InnerDocument(BaseModel):
    size: Annotated[int, Field(ge=0)]


class Asked(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(max_length=5)] = "a"
    retries: Annotated[int, Field(ge=0, le=20)] = 0
    timeout_s: Annotated[float, Field(gt=0, le=30 * 86400)] = 1.0
    quick: bool = False
    tier: Literal["none", "vm"] = "none"
    by: AwareDatetime | None = None
    labels: Annotated[list[str], Field(max_length=2)] = []
    inner: InnerDocument | None = None
    calls: list[str | InnerDocument] = []
    secrets: dict[str, SecretStr] = {}
    env: dict[str, str] = {}
    python: Annotated[str, Field(pattern=r"^3\.\d+$")] = "3.12"


def said(text: str) -> str:
    with pytest.raises(ValidationError) as caught:
        Asked.model_validate_json(text)
    return invalid(caught.value.errors()).detail


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"retries": "many"}', "'retries' must be a whole number, not \"many\""),
        ('{"retries": 1.5}', "'retries' must be a whole number, not 1.5"),
        ('{"retries": 21}', "'retries' must be 20 or less, not 21"),
        ('{"retries": -1}', "'retries' must be 0 or more, not -1"),
        ('{"retries": null}', "'retries' must be a whole number, not null"),
        ('{"timeout_s": 1e9}', "'timeout_s' must be 2592000 or less, not 1000000000"),
        ('{"timeout_s": 0}', "'timeout_s' must be more than 0, not 0"),
        ('{"timeout_s": "2h"}', "'timeout_s' must be a number, not \"2h\""),
        ('{"quick": "maybe"}', "'quick' must be true or false, not \"maybe\""),
        ('{"name": 3}', "'name' must be text, not 3"),
        ('{"name": "toolong"}', "'name' must have at most 5 letters, not \"toolong\""),
        ('{"tier": "steel"}', "'tier' must be 'none' or 'vm', not \"steel\""),
        (
            '{"by": "2026-01-01T00:00:00"}',
            "'by' must be a time with its zone, like 2026-12-31T18:00:00Z, not \"2026-01-01T00:00:00\"",
        ),
        (
            '{"by": "soon"}',
            "'by' must be a time with its zone, like 2026-12-31T18:00:00Z, not \"soon\"",
        ),
        ('{"labels": "ssd"}', "'labels' must be a list, not \"ssd\""),
        ('{"labels": ["a", "b", "c"]}', "'labels' must have at most 2 members, not 3"),
        ('{"inner": 3}', "'inner' must be an object, not 3"),
        ('{"inner": {}}', "'inner.size' is required"),
        ('{"colour": "red"}', "'colour' is not a field of this document; check its spelling"),
        ('{"python": "2.7"}', "'python' must have the form ^3\\.\\d+$, not \"2.7\""),
        ('{"calls": [3]}', "'calls.0' must be text (and 1 more)"),
        ("[]", "the body must be an object"),
        ("{,}", "the body is not JSON: key must be a string at line 1 column 2"),
    ],
)
def test_a_document_is_refused_in_a_plain_sentence(text: str, sentence: str) -> None:
    assert said(text) == sentence


def test_what_was_given_is_shortened() -> None:
    told = said(json.dumps({"retries": "x" * 5000}))
    assert len(told) < 160
    assert told.endswith('…"')
    assert len(said('{"retries": %s}' % ("9" * 5000))) < 160  # more digits than Python writes


@pytest.mark.parametrize("field", ["secrets", "env"])
def test_the_value_of_a_variable_is_never_shown(field: str) -> None:
    told = said(json.dumps({field: {"TOKEN": 31337}}))
    assert told == f"'{field}.TOKEN' must be text"


SECRET = "gp-hunter2-hunter2"
LONG = SECRET * 1500  # past what any of them may have


@pytest.mark.parametrize(
    ("model", "document"),
    [
        (UserRequest, {"name": "ada", "password": LONG}),
        (UserRequest, {"name": "ada", "password": "a", "invite": LONG}),
        (PasswordSignIn, {"name": "ada", "password": [SECRET]}),
        (WalletSignIn, {"message": "a", "signature": LONG}),
        (WalletSignIn, {"message": "a", "signature": "a", "invite": LONG}),
        (WalletLink, {"message": "a", "signature": "a", "proof": SECRET}),
        (WalletLink, {"message": "a", "signature": "a", "proof": {"signature": LONG}}),
        (WalletUnlink, {"message": "a", "signature": "a", "password": LONG}),
        (OidcFinish, {"state": LONG, "code": "a"}),
        (OidcFinish, {"state": "a", "code": LONG}),
        (OidcFinish, {"state": "a", "code": "a", "invite": LONG}),
        (RefreshRequest, {"refresh_token": LONG}),
        (SignOutRequest, {"refresh_token": LONG}),
        (PasswordChange, {"old": LONG, "new": LONG}),
        (TeamJoin, {"token": LONG}),
        (TeamJoin, SECRET),
        (NodeRequest, {"name": "n", "token": [SECRET]}),
        (NodeRequest, {"name": "n", "proof": SECRET}),
        (TaskRequest, {"secrets": SECRET}),
        (TaskRequest, {"secrets": {"A": [SECRET]}}),
        (TaskRequest, {"secret": {"A": SECRET}}),
        (NamedSecretRequest, {"value": [SECRET]}),
        (NamedSecretRequest, {"value": {"A": SECRET}}),
        (NamedSecretRequest, {"value": SECRET * 4000}),
        (NamedSecretRequest, SECRET),
        (TaskRequest, {"env": f"A={SECRET}"}),
        (TaskRequest, {"env": [f"A={SECRET}"]}),
        (TaskRequest, {"calls": SECRET}),
        (TaskRequest, {"calls": [{"payload_sha256": SECRET}]}),
    ],
)
def test_no_secret_of_any_document_is_repeated(model: type[BaseModel], document: object) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate_json(json.dumps(document))
    assert SECRET not in repr(vars(invalid(caught.value.errors())))


def test_what_we_have_no_words_for_is_said_in_those_of_the_library() -> None:
    finding: dict[str, Any] = {"type": "odd", "loc": ("a",), "msg": "Is odd", "input": 1}
    assert invalid([finding]).detail == "'a' is not valid: is odd, not 1"
