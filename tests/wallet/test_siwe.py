"""We agree with siwe, or the difference is named here. Its answers are recorded in `vectors/siwe.json` (by
`vectors/record_siwe.py`), because its dependencies clash with ours; where it is installed it is also asked directly.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpool.core.model import Instant
from gpool.wallet import signin, signing
from gpool.wallet.crypto import ORDER
from gpool.wallet.errors import BadSignIn
from gpool.wallet.moments import Moment
from gpool.wallet.signin import SignIn, SignInReason
from gpool.wallet.signing import Signature, WalletKey

STRICTER = {
    "leading zeros": "two texts would mean one chain",
    "empty host": "a domain that names nobody",
}
"""What siwe takes and we refuse, by what our error says."""

LOOSER = {
    "small letters in a time": "RFC 3339 allows them; Python's parser does not",
    "numbers and dots that are no IPv4 address": "a registered name by RFC 3986; siwe's parser stops at the fourth",
}
"""What siwe refuses and the standard allows, as the recorded cases name it."""


def refusal(text: str) -> str | None:
    try:
        signin.parse(text)
    except BadSignIn as exc:
        return exc.detail
    return None


def test_the_recorded_answers_of_siwe_are_ours(own: Callable[[str], Any]) -> None:
    cases = own("siwe")["cases"]
    assert len(cases) >= 150
    assert 40 <= sum(case["taken"] for case in cases) <= len(cases) - 40
    for case in cases:
        ours = refusal(case["text"])
        if case["kind"] in STRICTER:
            assert case["taken"], case
            assert ours is not None, case
        elif case["kind"] in LOOSER:
            assert not case["taken"], case
            assert ours is None, case
        else:
            assert (ours is None) == case["taken"], (case, ours)


def test_the_recorded_signatures_that_siwe_verified_verify(own: Callable[[str], Any]) -> None:
    signed = [case for case in own("siwe")["cases"] if case.get("verified") is not None]
    assert {case["verified"] for case in signed} == {True, False}
    for case in signed:
        message = signin.parse(case["text"])
        signature = Signature.parse(case["signature"])
        taken = signing.verify(case["text"].encode(), signature, message.address)
        assert taken == case["verified"], case


with warnings.catch_warnings():  # theirs, about each other
    warnings.simplefilter("ignore")
    siwe: Any = pytest.importorskip("siwe") if importlib.util.find_spec("siwe") else None
live = pytest.mark.skipif(
    siwe is None, reason="siwe is not here; its recorded answers are held above"
)

keys = st.integers(1, ORDER - 1).map(lambda number: WalletKey(number.to_bytes(32, "big")))
instants = st.integers(Moment("1971-01-01T00:00:00Z").at, Moment("9000-01-01T00:00:00Z").at)
moments = instants.map(lambda at: Moment.of(Instant(at // 1000 * 1000)))
uri_texts = st.sampled_from(
    ["https://a.example/", "https://h:8443/x?y=1#z", "ipfs://bafy/x", "urn:isbn:0451450523"]
)
messages = st.builds(
    SignIn,
    domain=st.sampled_from(["pool.example", "localhost:8080", "user@pool.example", "[::1]:8443"]),
    address=st.binary(min_size=20, max_size=20).map(signing.from_bytes),
    uri=uri_texts,
    chain_id=st.integers(1, 2**62),
    nonce=st.text("abcXYZ019", min_size=8, max_size=20),
    issued_at=moments,
    scheme=st.none() | st.sampled_from(["https", "web3"]),
    statement=st.none() | st.text("abcXYZ019-._~:/?#[]@!$&'()*+,;= ", min_size=1, max_size=60),
    expires_at=st.none() | moments,
    not_before=st.none() | moments,
    request_id=st.none() | st.text("abcXYZ019-._~!$&'()*+,;=:@", min_size=1, max_size=20),
    resources=st.none() | st.lists(uri_texts, min_size=1, max_size=3).map(tuple),
)


def siwe_reads(text: str) -> Any:
    """The other implementation's message, or None where it refuses."""
    try:
        return siwe.SiweMessage.from_message(text)
    except ValueError:
        return None


@live
@settings(max_examples=60)
@given(messages)
def test_siwe_reads_every_message_as_we_do(message: SignIn) -> None:
    text = signin.format(message)
    theirs = siwe_reads(text)
    assert theirs is not None, text
    assert theirs.prepare_message() == text
    assert (theirs.scheme, theirs.domain, theirs.address) == (
        message.scheme,
        message.domain,
        message.address,
    )
    assert (theirs.uri, theirs.chain_id, theirs.nonce) == (
        message.uri,
        message.chain_id,
        message.nonce,
    )
    assert (theirs.statement, theirs.request_id) == (message.statement, message.request_id)
    assert theirs.issued_at == str(message.issued_at)
    assert (theirs.expiration_time, theirs.not_before) == (
        message.expires_at and str(message.expires_at),
        message.not_before and str(message.not_before),
    )
    assert tuple(theirs.resources or ()) == (message.resources or ())


@live
@settings(max_examples=150)
@given(messages, st.data())
def test_siwe_reads_whatever_we_read_of_damaged_messages(
    message: SignIn, data: st.DataObject
) -> None:
    """Both ways: what one takes the other takes, but for what `STRICTER` names."""
    text = signin.format(message)
    at = data.draw(st.integers(0, len(text) - 1))
    text = text[:at] + data.draw(st.text("\n -aF0:/\té%", max_size=2)) + text[at + 1 :]
    try:
        ours: SignIn | None = signin.parse(text)
    except BadSignIn as exc:
        ours, stricter = None, "leading zeros" in exc.detail
    theirs = siwe_reads(text)
    if ours is None and not stricter:
        assert theirs is None, text
    if theirs is None and ours is not None:
        # pydantic's idea of a URL and Python's of a time, on top of the grammar
        assert siwe.parsed.ABNFParsedMessage(text), text


@live
@settings(max_examples=40)
@given(keys, messages)
def test_siwe_verifies_what_we_sign(key: WalletKey, message: SignIn) -> None:
    text = signin.format(message).replace(message.address, key.address)
    when = Instant((message.not_before or message.issued_at).at + 1000)
    theirs = siwe.SiweMessage.from_message(text)
    try:
        theirs.verify(
            str(key.sign(text.encode())),
            domain=message.domain,
            timestamp=siwe.siwe.datetime_from_iso8601_string(str(Moment.of(when))),
        )
    except siwe.ExpiredMessage:
        problem = signin.check_times(message, now=when)
        assert problem is not None
        assert problem.reason is SignInReason.EXPIRED
    else:
        assert signin.check_times(message, now=when) is None
