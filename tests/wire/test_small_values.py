"""Small plain containers travel as JSON; every other value keeps its own form, so types and bits stay the same."""

from __future__ import annotations

import enum
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.agent.runner import encoding
from gpool.wire import values
from tests.wire.test_values import refusal, there_and_back


class Level(enum.IntEnum):
    LOW = 1


class Word(str):
    __slots__ = ()


class Words(list[str]):
    pass


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=6),
    max_leaves=30,
)
containers = (
    st.lists(plain, max_size=9)
    | st.lists(plain, max_size=9).map(tuple)
    | st.dictionaries(st.text(st.characters()), plain, max_size=9)
)


@given(containers)
def test_plain_containers_arrive_with_their_types_and_bits(value: Any) -> None:
    found = there_and_back(value)
    assert type(found) is type(value)
    assert repr(found) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        {"loss": 0.25, "epoch": 3, "name": "é\U0001f600", "ok": True, "none": None},
        {"a": [1, {"b": []}], "": {}},
        [1, 2.5, "a", None, -0.0, 5e-324, 1.7976931348623157e308, 1e22, 2**63 - 1, -(2**63)],
        (1, "two", [3]),
        [{"id": n, "x": n / 3} for n in range(20)],
    ],
)
def test_a_small_plain_container_is_sent_as_json(value: Any) -> None:
    sent = encoding.encode(value, pickle.dumps)
    assert sent[1:2] == (b"k" if type(value) is tuple else b"j")
    assert repr(there_and_back(value)) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        {1: "a"},
        {"a": (1,)},
        [math.inf],
        [2**63],
        ["\ud800"],
        {"\udfff": 1},
        [Level.LOW],
        {"a": b"bytes"},
        ["[" * 101],
        ["x" * 5000],
        ["é" * 2500],
        [[] for _ in range(101)],
        [0.5] * 17,
        [{1, 2}],
        {None: 1},
        {True: 1},
    ],
    ids=repr,
)
def test_what_json_would_change_or_not_bound_keeps_its_own_form(value: Any) -> None:
    assert encoding.encode(value, pickle.dumps)[1:2] not in (b"j", b"k")
    assert repr(there_and_back(value)) == repr(value)


@pytest.mark.parametrize("value", [[Word("a")], {Word("a"): 1}, {"a": Words(["b"])}], ids=repr)
def test_a_subclass_of_a_plain_type_does_not_become_plain(value: Any) -> None:
    assert "Word" in refusal(value)


def test_a_cycle_through_dicts_is_pickled() -> None:
    loop: dict[str, Any] = {}
    loop["loop"] = [loop]
    assert "or in itself" in refusal(loop)


@pytest.mark.parametrize("tag", [b"j", b"k"])
def test_json_past_its_limits_is_refused_before_it_is_parsed(tag: bytes) -> None:
    deepest = b"[" * values.MAX_DEPTH + b"]" * values.MAX_DEPTH
    assert values.decode(values.DATA + tag + deepest)
    for body, said in (
        (b"[" + deepest + b"]", "more than 100 brackets"),
        (b"[" + b" " * values.MAX_JSON_BYTES + b"]", "4,098 bytes of JSON; 4,096 are allowed"),
        (b"5", "where a container must be"),
        (b"[1", "JSON that is wrong"),
        (b"", "JSON that is wrong"),
    ):
        with pytest.raises(values.BadValue, match=said):
            values.decode(values.DATA + tag + body)
    with pytest.raises(values.BadValue, match="unknown tag"):
        values.decode(values.DATA + b"l\x01\0\0\0" + tag + b"[1]")


def test_encoder_and_decoder_agree_on_the_size_of_json() -> None:
    assert encoding.MAX_JSON_BYTES == values.MAX_JSON_BYTES
    assert encoding.to_json is not None  # the C part of json is there
