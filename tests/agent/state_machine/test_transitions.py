"""A lease on the agent moves only as the table says, and remembers how it came to its state."""

from __future__ import annotations

import pytest

from gpool.agent.state_machine.instructions import CommandEnded, CommandStarted
from gpool.agent.state_machine.lease_queues import AgentLease, GrantTerms, LeaseQueue
from gpool.agent.state_machine.transitions import (
    FINAL,
    LIVE,
    MEANINGS,
    STORY_LENGTH,
    TABLE,
    IllegalTransition,
    LeaseMove,
    LeaseState,
)
from gpool.core.model import EndReason
from tests.agent.state_machine.state_case import SECOND, Case, allocation, command


def a_lease() -> AgentLease:
    return AgentLease(7, 2, GrantTerms(allocation(), 1, False, command()), LeaseQueue(0), b"", "")


def test_every_state_has_a_meaning_and_is_reached_or_is_the_first() -> None:
    assert set(MEANINGS) == set(LeaseState)
    assert set(TABLE.values()) | {LeaseState.QUEUED} == set(LeaseState)


def test_every_move_is_in_the_table() -> None:
    assert {move for _, move in TABLE} == set(LeaseMove)


def test_no_move_leaves_a_final_state() -> None:
    assert not {source for source, _ in TABLE} & FINAL


def test_every_state_that_is_not_final_has_a_way_to_a_final_one() -> None:
    for start in set(LeaseState) - FINAL:
        reached, found = {start}, {start}
        while reached:
            reached = {TABLE[key] for key in TABLE if key[0] in reached} - found
            found |= reached
        assert found & FINAL, start


def test_nothing_interferes_with_a_lease_and_leaves_it_live() -> None:
    own = {LeaseMove.SENT, LeaseMove.STARTED, LeaseMove.REQUEUED}
    assert all(move in own for (_, move), target in TABLE.items() if target in LIVE)


def test_an_illegal_move_raises_with_the_lease_s_story() -> None:
    lease = a_lease()
    lease.move(10, LeaseMove.STARTED)
    lease.move(20, LeaseMove.PREEMPTED, "its owner took the GPU back")
    with pytest.raises(IllegalTransition) as raised:
        lease.move(30, LeaseMove.STARTED)
    text = str(raised.value)
    assert "lease 7:2 (preempting) cannot be started at 30" in text
    assert "10: queued -started-> running" in text
    assert "20: running -preempted-> preempting (its owner took the GPU back)" in text
    assert lease.state is LeaseState.PREEMPTING


def test_a_story_keeps_the_latest_transitions_only() -> None:
    lease = a_lease()
    for at in range(0, 2 * STORY_LENGTH, 2):
        lease.move(at, LeaseMove.SENT)
        lease.move(at + 1, LeaseMove.REQUEUED)
    story = lease.story()
    assert len(story) == STORY_LENGTH
    assert story[-1].at == 2 * STORY_LENGTH - 1


def test_the_state_machine_tells_the_story_of_a_held_lease() -> None:
    case = Case()
    case.welcome()
    case.grant(command(timeout=2 * SECOND), 1)
    case.feed(CommandStarted(1, 1))
    case.pass_time(3 * SECOND)
    assert [(step.move, step.target) for step in case.state.story(1)] == [
        (LeaseMove.STARTED, LeaseState.RUNNING),
        (LeaseMove.TIMED_OUT, LeaseState.TIMING_OUT),
    ]
    assert "time-out of 2 s" in case.state.story(1)[-1].reason
    case.feed(CommandEnded(1, 1, EndReason.TIMED_OUT, 137, "", SECOND))
    assert case.state.story(1) == []
