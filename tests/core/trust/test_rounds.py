"""Rounds of siblings: late ones are replaced, complete ones are decided."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import SECOND, Instant, Span
from gpool.core.trust import rounds
from gpool.core.trust.quorum import More, QuorumReached
from gpool.core.trust.rounds import RunState, SiblingRun

NOW = Instant(10**12)


def run(state: RunState, age_s: int, ran_s: int = 0, node: int = 1) -> SiblingRun:
    since = Instant(NOW - age_s * SECOND)
    return SiblingRun(TaskId(node), NodeId(node), state, since, Span(ran_s * SECOND))


def test_a_sibling_waits_a_minute_for_an_absent_node_and_ten_for_a_busy_one() -> None:
    waiting = run(RunState.WAITING, 61)
    assert rounds.late([waiting], {NodeId(1)}, NOW) == (waiting,)
    assert rounds.late([waiting], (), NOW) == ()
    assert rounds.late([run(RunState.WAITING, 601)], (), NOW)


def test_a_running_sibling_is_late_only_after_another_has_answered() -> None:
    slow = run(RunState.RUNNING, 100_000)
    assert rounds.late([slow], (), NOW) == ()
    assert rounds.late([slow, run(RunState.ANSWERED, 0, 24_000, 2)], (), NOW) == (slow,)
    assert rounds.late([slow, run(RunState.ANSWERED, 0, 26_000, 2)], (), NOW) == ()
    quick = run(RunState.ANSWERED, 0, 1, 2)
    assert rounds.late([run(RunState.RUNNING, 599), quick], (), NOW) == ()


@given(st.lists(st.sampled_from(list(RunState)), max_size=9), st.integers(0, 10**6))
def test_only_open_siblings_are_ever_replaced(states: list[RunState], age_s: int) -> None:
    runs = [run(state, age_s, 1, node) for node, state in enumerate(states)]
    found = rounds.late(runs, (), NOW)
    assert all(one.state in (RunState.WAITING, RunState.RUNNING) for one in found)


def test_a_spot_checked_task_needs_one_answer_unless_it_is_drawn() -> None:
    def never(one: int, other: int) -> bool:
        return one == other

    assert rounds.verdict(rounds.SPOT, 0, never, is_checked=False) == More(1)
    assert rounds.verdict(rounds.SPOT, 1, never, is_checked=False) == QuorumReached(0, (0,), ())
    assert rounds.verdict(rounds.SPOT, 1, never, is_checked=True) == More(1)
    assert rounds.verdict(rounds.SPOT, 2, never, is_checked=True) == More(3)
    assert rounds.verdict(2, 2, lambda _, __: True, is_checked=True) == QuorumReached(0, (0, 1), ())
