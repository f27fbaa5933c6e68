"""Canonical JSON: one spelling per value, and no other spelling is read."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.wallet import canonical_json
from gpool.wallet.errors import BadDocument
from gpool.wallet.receipt_keys import ReceiptGpu
from tests.wallet.sample_receipts import work

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
integers = st.integers(-canonical_json.LARGEST_INTEGER, canonical_json.LARGEST_INTEGER)
documents = st.recursive(
    texts | integers,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


def test_keys_sort_by_utf16_units_as_in_the_example_of_the_rfc() -> None:
    """RFC 8785, section 3.2.3."""
    given_ = json.loads(
        r'{"\u20ac":"Euro Sign","\r":"Carriage Return","\ufb33":"Hebrew Letter Dalet With Dagesh","1":"One",'
        r'"\ud83d\ude00":"Emoji: Grinning Face","\u0080":"Control","\u00f6":"Latin Small Letter O With Diaeresis"}'
    )
    order = list(json.loads(canonical_json.encode(given_)))
    assert order == ["\r", "1", "\x80", "ö", "€", "😀", "\ufb33"]


def test_text_is_escaped_as_in_the_example_of_the_rfc() -> None:
    """RFC 8785, section 3.2.2: the member `string`."""
    text = json.loads(r'"\u20ac$\u000F\u000aA\u0027\u0042\u0022\u005c\\\"\/"')
    assert canonical_json.encode(text).decode() == r'''"€$\u000f\nA'B\"\\\\\"/"'''


@given(documents)
def test_every_value_is_read_back_from_its_spelling(document: Any) -> None:
    data = canonical_json.encode(document)
    assert canonical_json.decode(data) == document
    assert canonical_json.encode(canonical_json.decode(data)) == data


@given(documents)
def test_no_other_spelling_is_read(document: Any) -> None:
    data = canonical_json.encode(document)
    others = [json.dumps(document, indent=1), json.dumps(document), f"{data.decode()}\n"]
    for other in others:
        if other.encode() != data:
            with pytest.raises(BadDocument):
                canonical_json.decode(other.encode())


@pytest.mark.parametrize(
    "data",
    [
        b"1.0",
        b"1e3",
        b"-0",
        b"01",
        b"9007199254740992",
        b"1" * 5000,
        b"NaN",
        b"Infinity",
        b"true",
        b"null",
        b'{"a":1,"a":2}',
        b'{"b":1,"a":2}',
        b'"\\u0041"',
        b'"\\/"',
        b'"\\ud800"',
        b'"\xff"',
        b'\xef\xbb\xbf"a"',
        b"",
        b"[" * 100 + b"]" * 100,
        b"[" * 100_000,
    ],
)
def test_what_implementations_read_differently_is_refused(data: bytes) -> None:
    with pytest.raises(BadDocument):
        canonical_json.decode(data)


@pytest.mark.parametrize(
    "value", [1.5, True, None, b"raw", {1: "a"}, 1 << 53, "\ud800", {"\ud800": 1}]
)
def test_a_value_without_a_spelling_is_refused(value: object) -> None:
    with pytest.raises(BadDocument):
        canonical_json.encode(value)


names = st.text("abc_z", min_size=1, max_size=5)


@given(st.dictionaries(names, documents | st.dictionaries(names, texts | integers)))
def test_fields_with_ascii_names_have_the_same_spelling_by_either_encoder(
    fields: dict[str, Any],
) -> None:
    def is_plain(value: object) -> bool:
        if isinstance(value, dict):
            return all(key.isascii() and is_plain(each) for key, each in value.items())
        return not isinstance(value, list) or all(map(is_plain, value))

    if is_plain(fields):
        assert canonical_json.encode_fields(fields) == canonical_json.encode(fields)


@given(texts, integers)
def test_a_work_is_signed_in_canonical_form(model: str, attempt: int) -> None:
    done = work(gpus=(ReceiptGpu("gpu-1", model, "exclusive"),), attempt=attempt)
    head, _, body = done.message().partition(b"\0")
    assert (head, body) == (
        b"gpool receipt work 1",
        canonical_json.encode(msgspec.to_builtins(done)),
    )
