"""Tasks that could not be started: how often they are tried, and what speaks against nodes."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.lifecycle import Move
from gpool.core.model import EndReason, Fault
from gpool.core.reliability import (
    ENOUGH,
    LONGEST_BACKOFF,
    MAX_BY_NODE,
    MAX_UNSTARTED,
    SHORTEST_BACKOFF,
    Evidence,
    Unstarted,
    archived_as,
    backoff_for_fault,
    given_up,
    unstarted_move,
)

FAULTS = st.sampled_from(Fault)


@given(st.lists(FAULTS, min_size=1, max_size=40), st.integers(0, 20))
def test_there_is_always_an_end_to_trying_and_never_before_its_time(
    faults: list[Fault], retries: int
) -> None:
    tries = Unstarted()
    for number, fault in enumerate(faults, 1):
        tries = tries.and_one(fault)
        assert tries.times == number
        move = unstarted_move(tries, retries)
        assert move in (Move.REQUEUED, Move.FAILED)
        if number < MAX_UNSTARTED + retries:
            assert move is Move.REQUEUED
        if number >= MAX_BY_NODE + retries:
            assert move is Move.FAILED
        if fault is Fault.UNCLEAR and tries.unclear >= MAX_UNSTARTED + retries:
            assert move is Move.FAILED
        if move is Move.FAILED:
            return


def test_the_story_tells_a_nodes_word_from_what_is_unclear() -> None:
    assert archived_as(Fault.UNCLEAR) is EndReason.SANDBOX_FAILED
    assert archived_as(Fault.NODE) is archived_as(Fault.PART) is EndReason.NODE_FAILED


def test_what_the_node_said_always_comes_first() -> None:
    assert given_up("why", Unstarted(1)) == "why"
    assert given_up("why", Unstarted(2, 1)).startswith("why (")
    assert "3 times" in given_up("why", Unstarted(2, 1))


@dataclass(frozen=True)
class Happening:
    """A task of a user could not be started on a node, began there, or ended without either."""

    what: str
    task: TaskId
    user: UserId
    node: NodeId
    fault: Fault


@st.composite
def happenings(draw: st.DrawFn, users: int = 4) -> list[Happening]:
    found = []
    for _ in range(draw(st.integers(0, 60))):
        number = draw(st.integers(0, 11))
        found.append(
            Happening(
                draw(st.sampled_from(["failed", "failed", "began", "ended"])),
                TaskId(number),
                UserId(number % users),  # a task is one user's
                NodeId(draw(st.integers(1, 4))),
                draw(FAULTS),
            )
        )
    return found


def blamed(evidence: Evidence, one: Happening) -> list[NodeId]:
    if one.what == "failed":
        is_its_own = evidence.failed(one.task, one.user, one.node, one.fault)
        return [one.node] if is_its_own else []
    if one.what == "began":
        return evidence.began(one.task, {one.node})
    evidence.ended([one.task])
    return []


@given(happenings())
def test_a_node_is_only_ever_blamed_by_its_own_word_or_by_several_users_whose_tasks_began_elsewhere(
    story: list[Happening],
) -> None:
    evidence = Evidence()
    failed: dict[TaskId, set[NodeId]] = {}
    against: dict[NodeId, set[UserId]] = {}
    for one in story:
        found = blamed(evidence, one)
        if one.what == "failed":
            assert bool(found) == (one.fault is Fault.NODE)
            if one.fault is Fault.UNCLEAR:
                failed.setdefault(one.task, set()).add(one.node)
            continue
        if one.what == "began":
            against.pop(one.node, None)
            for node in failed.get(one.task, set()) - {one.node}:
                against.setdefault(node, set()).add(one.user)
        failed.pop(one.task, None)
        for node in found:
            assert one.what == "began"
            assert node != one.node
            assert len(against.pop(node)) >= ENOUGH


@given(happenings(users=1))
def test_no_single_user_ever_gets_a_node_blamed(story: list[Happening]) -> None:
    evidence = Evidence()
    for one in story:
        if one.fault is not Fault.NODE:
            assert blamed(evidence, one) == []


@given(happenings())
def test_tasks_that_begin_nowhere_never_speak_against_a_node(story: list[Happening]) -> None:
    evidence = Evidence()
    for one in story:
        if one.what != "began" and one.fault is not Fault.NODE:
            assert blamed(evidence, one) == []
    assert not evidence.against


@given(happenings())
def test_nothing_is_kept_of_tasks_that_are_over_and_nodes_that_are_gone(
    story: list[Happening],
) -> None:
    evidence = Evidence()
    for one in story:
        blamed(evidence, one)
    evidence.ended([one.task for one in story])
    for node in {one.node for one in story}:
        evidence.forget(node)
    assert not evidence.is_any


def test_rests_for_a_fault_grow_up_to_the_longest() -> None:
    rests = [backoff_for_fault(times) for times in range(40)]
    assert rests[:2] == [0, SHORTEST_BACKOFF]
    assert rests == sorted(rests)
    assert rests[-1] == LONGEST_BACKOFF
