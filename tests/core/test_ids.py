"""Ids: text and number always say the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.core import ids
from gpool.core.errors import Invalid

kinds = st.sampled_from(sorted(ids.PREFIXES))
numbers = st.integers(0, (1 << 63) - 1)


@given(kinds, numbers)
def test_an_id_always_reads_back(kind: str, number: int) -> None:
    assert ids.decode(kind, ids.encode(kind, number)) == number


@given(kinds, numbers, numbers)
def test_text_always_sorts_as_the_numbers_do(kind: str, one: int, other: int) -> None:
    assert (ids.encode(kind, one) < ids.encode(kind, other)) == (one < other)


@given(kinds, st.text(max_size=20))
def test_no_text_ever_raises_anything_but_invalid(kind: str, text: str) -> None:
    try:
        number = ids.decode(kind, text)
    except Invalid:
        return
    assert ids.encode(kind, number) == text


@pytest.mark.parametrize(
    "text",
    ["", "t-", "7", "b-0000000000007", "t-000000000000i", "t-zzzzzzzzzzzzz", "t-00000000000007"],
)
def test_what_is_no_task_id_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="is not a task id"):
        ids.decode("task", text)


def test_prefixes_are_never_shared() -> None:
    assert len(set(ids.PREFIXES.values())) == len(ids.PREFIXES)
