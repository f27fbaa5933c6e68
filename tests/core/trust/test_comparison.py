"""Comparison of answers by canonical digest, by tolerance and by a comparator's verdicts."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.errors import Invalid
from gpool.core.trust.comparison import (
    MAX_DEPTH,
    Tolerance,
    by_comparator,
    by_digest,
    by_tolerance,
    canonical_digest,
)

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
ANSWERS = st.recursive(
    LEAVES, lambda part: st.lists(part) | st.dictionaries(st.text(), part), max_leaves=20
)


def nested(depth: int) -> object:
    answer: object = 1
    for _ in range(depth):
        answer = [answer]
    return answer


@given(ANSWERS)
def test_an_answer_equals_itself_in_digest_and_within_every_tolerance(answer: object) -> None:
    assert canonical_digest(answer) == canonical_digest(answer)
    assert Tolerance().agree(answer, answer)
    assert Tolerance(0.1, 1.0).agree(answer, answer)


@given(st.dictionaries(st.text(), st.integers()))
def test_the_order_of_a_dict_does_not_count(answer: dict[str, int]) -> None:
    assert canonical_digest(answer) == canonical_digest(dict(reversed(answer.items())))


@given(st.lists(st.text()), st.lists(st.text()))
def test_different_lists_of_text_have_different_digests(one: list[str], other: list[str]) -> None:
    assert (canonical_digest(one) == canonical_digest(other)) == (one == other)


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, 1.0), (1, True), (0, None), ("1", 1), ("a", b"a"), ([1, [2]], [[1], 2]), ([], {})],
)
def test_answers_of_different_form_have_different_digests(one: object, other: object) -> None:
    assert canonical_digest(one) != canonical_digest(other)


def test_every_nan_has_one_form_and_so_has_zero() -> None:
    other_nan = struct.unpack(">d", bytes.fromhex("fff8000000000001"))[0]
    assert canonical_digest([math.nan]) == canonical_digest([other_nan])
    assert canonical_digest(-0.0) == canonical_digest(0.0)
    assert canonical_digest((1, 2)) == canonical_digest([1, 2])


def test_large_integers_have_a_canonical_form() -> None:
    assert canonical_digest(10**6000) == canonical_digest(10**6000)
    assert canonical_digest(10**6000) != canonical_digest(10**6000 + 1)
    assert canonical_digest(-5) != canonical_digest(5)


def test_what_has_no_canonical_form_is_refused() -> None:
    assert canonical_digest(nested(MAX_DEPTH - 1))
    for answer in (object(), {1: 2}, {1, 2}, nested(MAX_DEPTH), nested(5000)):
        with pytest.raises(Invalid):
            canonical_digest(answer)
    with pytest.raises(Invalid):
        Tolerance().agree(nested(MAX_DEPTH), nested(MAX_DEPTH))


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (1.0, 1.0009, True),
        (1.0, 1.0021, False),
        (1, 1.0, True),
        (10**400, 10**400, True),
        (10**400, 1.0, False),
        (math.inf, math.inf, True),
        (math.inf, -math.inf, False),
        (math.inf, 1e308, False),
        (math.nan, math.nan, True),
        (math.nan, 1.0, False),
        (True, 1, False),
        ("1.0", 1.0, False),
        ([1.0, {"a": 2.0}], (1.0005, {"a": 2.001}), True),
        ([1.0, 2.0], [1.0], False),
        ({"a": 1.0}, {"b": 1.0}, False),
        ({"a": 1.0}, [1.0], False),
    ],
)
def test_numbers_agree_within_a_tolerance(one: object, other: object, is_same: bool) -> None:
    tolerance = Tolerance(relative=0.001)
    assert tolerance.agree(one, other) is is_same
    assert tolerance.agree(other, one) is is_same


def test_an_absolute_tolerance_covers_numbers_near_zero() -> None:
    assert not Tolerance(relative=0.001).agree(0.0, 1e-9)
    assert Tolerance(absolute=1e-8).agree(0.0, 1e-9)


@pytest.mark.parametrize(
    ("relative", "absolute"), [(-0.1, 0), (1.0, 0), (0, -1), (0, math.inf), (math.nan, 0)]
)
def test_a_tolerance_that_accepts_everything_is_refused(relative: float, absolute: float) -> None:
    with pytest.raises(Invalid):
        Tolerance(relative, absolute)


def test_answers_are_compared_by_their_numbers() -> None:
    assert by_digest([b"a", b"b", b"a"])(0, 2)
    assert not by_digest([b"a", b"b", b"a"])(0, 1)
    assert by_tolerance([1.0, 1.05], Tolerance(0.1))(0, 1)
    same = by_comparator({(0, 2)})
    assert same(2, 0)
    assert same(1, 1)
    assert not same(0, 1)
