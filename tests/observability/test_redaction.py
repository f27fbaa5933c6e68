"""No secret passes the redactor, by its name, its form or its value; ordinary words do."""

from __future__ import annotations

import base64
import json
import logging
import secrets

import pytest

from gpool.observability.logs import LogSource, get_logger, log_handler
from gpool.observability.redaction import MOST_KNOWN, REDACTED, Redactor
from gpool.server.identity import authorization
from gpool.server.identity.authorization import fresh

VALUE = secrets.token_urlsafe(24)
HEX = secrets.token_hex(32)
JWT = ".".join(
    base64.urlsafe_b64encode(part).rstrip(b"=").decode()
    for part in (b'{"alg":"EdDSA"}', b'{"sub":"u-0000000000001"}', secrets.token_bytes(64))
)
BASIC = base64.b64encode(f"alice:{VALUE}".encode()).decode()
PEM = f"-----BEGIN PRIVATE KEY-----\n{HEX[:32]}\n{HEX[32:]}\n-----END PRIVATE KEY-----"

PLANTED = {
    "an API key": (fresh(authorization.USER_PREFIX),) * 2,
    "an invite": (fresh(authorization.INVITE_PREFIX),) * 2,
    "a join link": (f"gpool join gpool://pool.example:8642/join/{VALUE}/p1#sha256=00", VALUE),
    "an access token": (JWT, JWT),
    "a header": (f"Authorization: Bearer {VALUE}", VALUE),
    "a header in a dictionary": (f"{{'authorization': 'Bearer {VALUE}'}}", VALUE),
    "a raw header": (f"[(b'authorization', b'Bearer {VALUE}')]", VALUE),
    "basic authentication": (f"authorization: Basic {BASIC}", BASIC),
    "a cookie": (f"Set-Cookie: session={VALUE}; Path=/", VALUE),
    "a database": (f"postgresql://gpool:{VALUE}@db.example/gpool", VALUE),
    "a variable": (f"AWS_SECRET_ACCESS_KEY={VALUE} HOME=/root", VALUE),
    "a variable in JSON": (json.dumps({"HF_TOKEN": VALUE}), VALUE),
    "a password with spaces": ('{"password": "correct horse battery"}', "correct horse battery"),
    "a keyword argument": (f"connect(user='a', password='{VALUE}')", VALUE),
    "a wallet's key": (f"key 0x{HEX}", HEX),
    "a private key": (f"cannot read {PEM}", HEX[:32]),
    "an address with a code": (f"GET /v1/oidc/x/callback?code={VALUE}&state=abc", VALUE),
    "a presigned address": (f"https://s3/x?X-Amz-Signature={HEX}&X-Amz-Date=1", HEX),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_secret_is_removed_by_its_form(what: str) -> None:
    text, secret = PLANTED[what]
    assert secret in text
    assert secret not in Redactor().text(text)


@pytest.mark.parametrize(
    "text",
    [
        "node blocked",
        "listening with TLS on 127.0.0.1 port 8642",
        "this key or token is unknown, expired or revoked; check it, or sign in again",
        f"artifact {HEX} of task t-0000000000007 is missing",
        "https://pool.example:8642/v1/tasks/t-0000000000007?wait=5",
        "the node key file /var/lib/gpool/node.key does not exist",
    ],
)
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert Redactor().text(text) == text


def test_a_known_value_is_removed_wherever_it_occurs() -> None:
    redactor = Redactor(["hunter/2 is mine", "it's\n mine"])
    assert "hunter" not in redactor.text("GET /x?y=hunter%2F2%20is%20mine failed")
    assert "hunter" not in redactor.text("stderr: hunter/2 is mine")
    assert "mine" not in redactor.text(repr({"x": "it's\n mine"}))
    assert "hunter" in Redactor().text("stderr: hunter/2 is mine")  # control


def test_short_values_are_not_known_and_the_oldest_are_dropped() -> None:
    redactor = Redactor(["yes", "first-secret"])
    assert redactor.text("yes") == "yes"
    assert redactor.text("first-secret") == REDACTED
    redactor.add(f"secret-{number:06}" for number in range(MOST_KNOWN))
    assert redactor.text("first-secret") == "first-secret"
    assert redactor.text("secret-000000") == REDACTED


@pytest.mark.parametrize("form", ["json", "text"])
def test_no_field_message_or_traceback_of_a_line_holds_a_secret(
    form: str, caplog: pytest.LogCaptureFixture
) -> None:
    log, message = get_logger("gpool.test"), f"failed with gpk_{VALUE}"
    with caplog.at_level(logging.DEBUG):
        try:
            raise ValueError(f"no answer to Bearer {VALUE}")
        except ValueError:
            log.exception(message, hf_token=VALUE, env={"X": VALUE}, tasks=[7])
        log.info(
            "refused", why=f"password={VALUE}", details={"inner": {"api_key": VALUE}}, n=[VALUE]
        )
        logging.getLogger("uvicorn.error").warning(
            "headers %s", {"Authorization": f"Basic {VALUE}"}
        )
    handler = log_handler(form, LogSource("gpool-test", "1"), Redactor())  # type: ignore[arg-type]
    lines = [handler.format(record) for record in caplog.records]
    assert len(lines) == 3
    assert [VALUE in line for line in lines] == [
        False,
        True,
        False,
    ]  # `n` is neither named nor formed
    known = log_handler(form, LogSource("gpool-test", "1"), Redactor([VALUE]))  # type: ignore[arg-type]
    assert not any(VALUE in known.format(record) for record in caplog.records)
    assert all(VALUE in f"{vars(record)}{record.exc_info}" for record in caplog.records)  # control


@pytest.mark.parametrize(
    "piece", ["a.", "token", "x=", "http://a:", "-----BEGIN PRIVATE KEY-----", "eyJaaaaaa.", " "]
)
def test_long_hostile_text_is_redacted_in_linear_time(piece: str) -> None:
    """Quadratic patterns would take minutes."""
    text = piece * (256 * 1024 // len(piece))
    assert len(Redactor().text(text)) <= 2 * len(text)
