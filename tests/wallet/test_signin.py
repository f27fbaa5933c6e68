"""The sign-in message: one text for each message, every refusal with its line, every check with a control."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpool.core.model import Instant
from gpool.wallet import moments as uris
from gpool.wallet import signin, signing
from gpool.wallet.errors import BadMoment, BadSignIn
from gpool.wallet.moments import Moment
from gpool.wallet.signin import SignIn, SignInReason

MINUTE = 60_000_000
NOW = Moment("2026-03-01T12:00:00Z").at
ASKED: dict[str, Any] = {
    "domain": "pool.example:8443",
    "uri": "https://pool.example:8443/v1/auth/wallet",
    "chain_id": 1,
    "nonce": "k3Jd82hsLq0Z",
}
PLAIN = SignIn(
    **ASKED,
    address=signing.parse("0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed"),
    issued_at=Moment.of(Instant(NOW - 10_000_000)),
)
FULL = dataclasses.replace(
    PLAIN,
    scheme="https",
    statement="Sign in to the pool (it's yours): no fee!",
    expires_at=Moment.of(Instant(NOW + 5 * MINUTE)),
    not_before=Moment.of(Instant(NOW - MINUTE)),
    request_id="login-7",
    resources=("ipfs://bafy/x", "https://pool.example/terms?v=2#all"),
)
FULL_TEXT = """\
https://pool.example:8443 wants you to sign in with your Ethereum account:
0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed

Sign in to the pool (it's yours): no fee!

URI: https://pool.example:8443/v1/auth/wallet
Version: 1
Chain ID: 1
Nonce: k3Jd82hsLq0Z
Issued At: 2026-03-01T11:59:50.000Z
Expiration Time: 2026-03-01T12:05:00.000Z
Not Before: 2026-03-01T11:59:00.000Z
Request ID: login-7
Resources:
- ipfs://bafy/x
- https://pool.example/terms?v=2#all"""

STATEMENT = "abcXYZ019-._~:/?#[]@!$&'()*+,;= "
PCHARS = "abcXYZ019-._~!$&'()*+,;=:@"
instants = st.integers(Moment("0001-01-02T00:00:00Z").at, Moment("9999-12-30T00:00:00Z").at)
moments = st.one_of(
    instants.map(lambda at: Moment.of(Instant(at))),
    st.builds(
        lambda at, offset: Moment(Moment.of(Instant(at)).text.lower().replace("z", offset)),
        instants,
        st.sampled_from(["+02:00", "-11:30", "-00:00", "z"]),
    ),
)
uri_texts = st.sampled_from(
    ["https://a.example/", "urn:isbn:0451450523", "did:key:z6Mk?x=%20", "file:///etc", "a:", "a:/b"]
)
messages = st.builds(
    SignIn,
    domain=st.sampled_from(["pool.example", "u:p@10.0.0.1:80", "[::1]:8443", "a%2Db", "host:"]),
    address=st.binary(min_size=20, max_size=20).map(signing.from_bytes),
    uri=uri_texts,
    chain_id=st.integers(0, 2**256 - 1),
    nonce=st.text("abcXYZ019", min_size=8, max_size=40),
    issued_at=moments,
    scheme=st.none() | st.sampled_from(["https", "web+x", "A.b-1"]),
    statement=st.none() | st.text(STATEMENT, min_size=1, max_size=60),
    expires_at=st.none() | moments,
    not_before=st.none() | moments,
    request_id=st.none() | st.text(PCHARS, max_size=20),
    resources=st.none() | st.lists(uri_texts, max_size=4).map(tuple),
)


@given(messages)
def test_a_message_always_reads_back_as_itself(message: SignIn) -> None:
    assert signin.parse(signin.format(message)) == message


@given(messages, st.data())
def test_a_text_that_parses_is_always_written_back_letter_by_letter(
    message: SignIn, data: st.DataObject
) -> None:
    """Of one message and its near neighbours, so that most are wrong somewhere and some are not."""
    text = signin.format(message)
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.integers(0, 2))
        text = text[:at] + data.draw(st.text("\n -aZ0:/", max_size=2)) + text[at + cut :]
    try:
        read = signin.parse(text)
    except BadSignIn:
        return
    assert signin.format(read) == text


@settings(max_examples=400)
@given(st.text() | st.text("\n\r -:/aZ09é") | st.binary().map(lambda raw: raw.decode("latin-1")))
def test_whatever_the_text_parsing_never_fails_otherwise(text: str) -> None:
    with pytest.raises(BadSignIn):
        signin.parse(text)


@settings(max_examples=400)
@given(st.lists(st.sampled_from(FULL_TEXT.split("\n")) | st.text(max_size=30), max_size=20))
def test_whatever_the_lines_parsing_never_fails_otherwise(lines: list[str]) -> None:
    text = "\n".join(lines)
    try:
        line = 0 if signin.parse(text) else -1
    except BadSignIn as exc:
        line = exc.line
    assert 0 <= line <= text.count("\n") + 1


def test_a_message_is_written_as_the_standard_lays_it_out() -> None:
    assert signin.format(FULL) == FULL_TEXT
    assert signin.parse(FULL_TEXT) == FULL


def test_absent_and_empty_are_different_texts() -> None:
    empty = dataclasses.replace(PLAIN, request_id="", resources=())
    assert signin.format(empty) == signin.format(PLAIN) + "\nRequest ID: \nResources:"
    assert signin.parse(signin.format(empty)) == empty != PLAIN


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("https://pool.example:8443 w", "h_s://pool.example:8443 w", 1, "not a URI scheme"),
        ("https://pool.example:8443 w", "https:// w", 1, "not a domain"),
        ("https://pool.example:8443 w", " w", 1, "not a domain"),
        ("pool.example:8443 wants", "pool.example/x wants", 1, "not a domain"),
        ("pool.example:8443 wants", "a://b wants", 1, "not a domain"),
        ("pool.example:8443 wants", "[::1 wants", 1, "not a domain"),
        ("Ethereum account:", "ethereum account:", 1, "does not end with"),
        ("5aAeb", "5AAeb", 2, "wrong checksum"),
        ("5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed", "00", 2, "not an address"),
        ("BeAed\n\n", "BeAed\nx\n", 3, "empty line after the address"),
        ("no fee!\n\n", "no fee!\nmore\n\n", 5, "empty line before the URI"),
        ("no fee!", "no “fee”", 4, "U+201C"),
        ("no fee!", "no fee%", 4, "holds '%'"),
        ("no fee!", 'no "fee"', 4, "holds '\"'"),
        ("URI: https", "URI:https", 6, "'URI: ' must stand here"),
        ("URI: https:", "URI: ", 6, "not a URI"),
        ("URI: https://pool", "URI: https:// pool", 6, "not a URI"),
        ("Version: 1", "Version: 2", 7, "only 1 is known"),
        ("Version: 1", "Version: 1 ", 7, "only 1 is known"),
        ("Chain ID: 1", "Chain ID: 01", 8, "leading zeros"),
        ("Chain ID: 1", "Chain ID: -1", 8, "not a chain id"),
        ("Chain ID: 1", "Chain ID: ", 8, "not a chain id"),
        ("Chain ID: 1", "Chain ID: " + "9" * 5000, 8, "not a chain id"),
        ("Chain ID: 1", "Chain ID: " + "9" * 78, 8, "256 bits"),
        ("k3Jd82hsLq0Z", "k3Jd82h", 9, "8 or more"),
        ("k3Jd82hsLq0Z", "k3Jd82h-Lq0Z", 9, "8 or more"),
        ("11:59:50.000Z", "11:59:50.000", 10, "not an RFC 3339 time"),
        ("Issued At: 2026-03-01T", "Issued At: 2026-03-01 ", 10, "not an RFC 3339 time"),
        ("Expiration Time: 2026-03-01", "Expiration Time: 2026-02-29", 11, "not a valid time"),
        ("Not Before: ", "Not before: ", 12, "follows the end"),
        ("login-7", "login 7", 13, "path characters"),
        ("login-7", "login/7", 13, "path characters"),
        ("Resources:\n", "Resources: \n", 14, "after 'Resources:'"),
        ("- ipfs", "-ipfs", 15, "follows the end"),
        ("terms?v=2#all", "terms?v=2#a#b", 16, "not a URI"),
        ("terms?v=2#all", "terms\nRequest ID: x", 17, "out of order or twice"),
        ("terms?v=2#all", "terms\n", 17, "follows the end"),
        ("\nNonce", "\r\nNonce", 8, "a carriage return at column 12"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_pointed_at(old: str, new: str, line: int, says: str) -> None:
    assert old in FULL_TEXT
    with pytest.raises(BadSignIn, match=f"line {line}: .*{re.escape(says)}") as caught:
        signin.parse(FULL_TEXT.replace(old, new, 1))
    assert caught.value.line == line


def test_a_message_that_stops_early_says_what_is_missing() -> None:
    lines = FULL_TEXT.split("\n")
    for count in range(1, 10):
        with pytest.raises(BadSignIn, match="the message ends where the"):
            signin.parse("\n".join(lines[:count]))
    assert signin.parse("\n".join(lines[:10])).expires_at is None


def test_a_message_past_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(BadSignIn, match="8192"):
        signin.parse(FULL_TEXT + "x" * 8192)
    with pytest.raises(BadSignIn, match="8192"):
        dataclasses.replace(PLAIN, statement="x" * 8192)


@pytest.mark.parametrize(
    "wrong",
    [
        {"domain": ""},
        {"domain": "a b"},
        {"domain": "pool.example\n"},
        {"address": PLAIN.address.lower()},
        {"uri": "pool.example"},
        {"chain_id": -1},
        {"chain_id": 2**256},
        {"nonce": "1234567"},
        {"nonce": "12345678\n"},
        {"scheme": ""},
        {"statement": ""},
        {"statement": "two\nlines"},
        {"request_id": "a\nResources:"},
        {"resources": ("https://a", "no uri")},
    ],
)
def test_a_wrong_message_cannot_even_be_built(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadSignIn) as caught:
        dataclasses.replace(PLAIN, **wrong)
    assert caught.value.field.split(".")[0] == next(iter(wrong))
    assert caught.value.line == 0


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"domain": "pool.example"}, SignInReason.WRONG_DOMAIN),
        ({"domain": "POOL.example:8443"}, SignInReason.WRONG_DOMAIN),
        ({"domain": "x@pool.example:8443"}, SignInReason.WRONG_DOMAIN),
        ({"domain": "evil.example"}, SignInReason.WRONG_DOMAIN),
        ({"scheme": "http"}, SignInReason.WRONG_SCHEME),
        ({"uri": "https://pool.example:8443/v1/auth/wallet/"}, SignInReason.WRONG_URI),
        ({"chain_id": 5}, SignInReason.WRONG_CHAIN),
        ({"nonce": "k3Jd82hsLq0z"}, SignInReason.WRONG_NONCE),
        ({"expires_at": Moment.of(NOW)}, SignInReason.EXPIRED),
        ({"expires_at": Moment("2026-03-01T13:59:59+02:00")}, SignInReason.EXPIRED),
        ({"not_before": Moment.of(Instant(NOW + 1))}, SignInReason.NOT_YET_VALID),
        ({"issued_at": Moment.of(Instant(NOW + 5 * MINUTE + 1))}, SignInReason.ISSUED_AHEAD),
    ],
)
def test_a_message_for_something_else_is_refused(
    changed: dict[str, Any], reason: SignInReason
) -> None:
    problem = signin.check(dataclasses.replace(FULL, **changed), **ASKED, now=NOW)
    assert problem is not None
    assert problem.reason is reason
    assert signin.check(FULL, **ASKED, now=NOW) is None  # the control: unchanged it is taken


@pytest.mark.parametrize(
    "changed",
    [
        {"scheme": None},
        {"scheme": "HTTPS"},
        {"expires_at": Moment.of(Instant(NOW + 1))},
        {"expires_at": None},
        {"not_before": Moment.of(NOW)},
        {"issued_at": Moment.of(Instant(NOW + 5 * MINUTE))},
        {"statement": None},
        {"resources": None},
    ],
)
def test_what_was_asked_for_is_taken_up_to_the_edge(changed: dict[str, Any]) -> None:
    assert signin.check(dataclasses.replace(FULL, **changed), **ASKED, now=NOW) is None


@pytest.mark.parametrize(
    ("text", "micros"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("1970-01-01T00:00:00.5Z", 500_000),
        ("1970-01-01t00:00:00.1234567z", 123_456),
        ("1970-01-01T01:30:00+01:30", 0),
        ("1969-12-31T23:00:00-01:00", 0),
        ("1970-01-01T00:00:00-00:00", 0),
        ("0001-01-01T00:00:00+23:59", -62_135_683_140_000_000),
        ("9999-12-31T23:59:59.999999-23:59", 253_402_387_139_999_999),
    ],
)
def test_a_moment_means_its_instant(text: str, micros: int) -> None:
    assert Moment(text).at == micros
    assert str(Moment(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "", "2026-03-01", "2026-03-01T12:00Z", "2026-03-01T12:00:00", "2026-03-01T12:00:00.Z",
        "2026-03-01T12:00:00,5Z", "2026-03-01T24:00:00Z", "2026-03-01T12:60:00Z", "2026-13-01T12:00:00Z",
        "2026-02-29T12:00:00Z", "0000-01-01T00:00:00Z", "2026-03-01T12:00:00+24:00", "2026-03-01T12:00:00+0100",
        "2016-12-31T23:59:60Z", "26-03-01T12:00:00Z", "٢٠٢٦-03-01T12:00:00Z", "2026-03-01T12:00:00Z\n",
        "Wed Oct 05 2011 16:48:00 GMT+0200 (CEST)",
    ],
)  # fmt: skip
def test_what_is_no_moment_is_refused(text: str) -> None:
    with pytest.raises(BadMoment):
        Moment(text)


@pytest.mark.parametrize("at", [10**18, -(10**18)])
def test_an_instant_outside_the_calendar_cannot_be_written(at: int) -> None:
    with pytest.raises(BadMoment):
        Moment.of(Instant(at))


@pytest.mark.parametrize(
    "text",
    [
        "https://example.com", "http://u:p@h:80/a/b;c?d=/?#e/?", "mailto:a@b.c", "tel:+1-816-555-1212",
        "urn:x:y", "ldap://[2001:db8::7]/c=GB?objectClass?one", "file:///etc/hosts", "a:", "a:b", "a:/", "a:/b//c",
        "a://", "x-y.z+1:%41", "http://[v1.a:b]/", "http://[::ffff:1.2.3.4]:/", "http://h:99999",
    ],
)  # fmt: skip
def test_uris_of_rfc_3986_are_uris(text: str) -> None:
    assert uris.is_uri(text)


@pytest.mark.parametrize(
    "text",
    [
        "", "//h/p", "/p", "p", ":p", "1a:b", "a b:c", "a:b c", "a:%4", "a:%zz", "a:b#c#d", "a:[b]", "a:\\b", "a:é",
        "http://h:port", "http://[::1", "http://::1]", "http://[::1]x", "http://[1.2.3.4]", "http://[::1%25eth0]",
        "http://[:::]", "http://a@b@c", "http://h^", "http://[::01.2.3.4]", "https://a\n", "http://[v.a]",
    ],
)  # fmt: skip
def test_what_is_no_uri_is_none(text: str) -> None:
    assert not uris.is_uri(text)
