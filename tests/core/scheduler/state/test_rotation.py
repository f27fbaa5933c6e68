"""Who is looked at when very many wait: never more than so many in a pass, and always everybody within so many passes."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from gpool.core.scheduler.state.waiting import next_of, shared_out, some


def rounds(count: int, most: int) -> int:
    """In how many turns all have been looked at."""
    step = most - (most + 1) // 3 - most // 3
    return -(-count // step)


@given(st.integers(0, 60), st.integers(1, 20), st.integers(0, 1000))
def test_everybody_is_always_looked_at_within_so_many_turns(
    count: int, most: int, first: int
) -> None:
    those = dict.fromkeys(range(count))
    seen: Counter[int] = Counter()
    for turn in range(first, first + rounds(count, most)):
        found = some(those, most, turn)
        assert len(found) == count if count <= most else most // 3 < len(found) <= most
        seen.update(found)
    assert set(seen) == set(those)


def test_those_that_wait_longest_and_those_that_came_last_are_always_looked_at() -> None:
    for turn in range(50):
        found = some(dict.fromkeys(range(100)), 9, turn)
        assert found.keys() >= {0, 1, 2, 97, 98, 99}


SHAPES = st.dictionaries(
    st.integers(0, 30), st.integers(1, 12).map(lambda n: dict.fromkeys(range(n))), max_size=20
)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.integers(2, 40), st.integers(0, 1000))
def test_nobody_is_ever_passed_over_for_what_others_have_submitted(
    those: dict[int, dict[int, None]], most: int, first: int
) -> None:
    pairs = {(owner, each) for owner, theirs in those.items() for each in theirs}
    seen = set()
    for turn in range(first, first + 13 * rounds(len(those), most // 2)):
        found = list(shared_out(those, most, turn))
        assert len(found) == len(set(found)) <= most
        of_each = Counter(owner for owner, _ in found)
        if len(those) <= most // 2:
            share = most // max(1, len(those))
            assert all(of_each[each] >= min(len(those[each]), share // 2) for each in those)
        seen.update(found)
    assert seen == pairs


@given(SHAPES, st.integers(1, 5), st.integers(0, 1000))
def test_everybody_has_a_turn_and_in_time_each_of_theirs(
    those: dict[int, dict[int, None]], count: int, first: int
) -> None:
    one_round = -(-len(those) // count)
    seen: set[tuple[int, int]] = set()
    for turn in range(first, first + one_round):
        found = next_of(those, count, turn)
        assert len(found) == min(count, len(those))
        seen.update(found.items())
    assert {owner for owner, _ in seen} == set(those)
    for turn in range(first, first + 13 * one_round):
        seen.update(next_of(those, count, turn).items())
    assert seen == {(owner, each) for owner, theirs in those.items() for each in theirs}
