"""Rows that other replicas changed, against the scheduling state: the difference makes both agree, in any order of rows."""

from __future__ import annotations

from itertools import permutations

from gpool.core.ids import BatchId, NodeId, SpecId, TaskId, UserId
from gpool.core.model import Allocation, Instant, Shape, TaskStatus
from gpool.core.scheduler.state.events import GangPart, TasksLeased, TasksReleased
from gpool.core.scheduler.state.state import State
from gpool.server.replicas.following import Difference, difference
from gpool.server.scheduling.backoff import RejectedPlans
from gpool.server.store.operations.replicas import ChangedRows, ChangedTask
from gpool.server.store.rows import allocation_text
from gpool.server.store.values import HeldGang, HeldLease
from tests.core.scheduler.state.builders import a_node, a_shape, a_state, enqueue, hold

SHAPE = a_shape()
FIRST, SECOND = Allocation(0, 1000, 0), Allocation(1, 1000, 0)
HERE = NodeId(1)


def a_row(
    task: int, status: TaskStatus, allocation: Allocation | None = None, node: int | None = 1
) -> ChangedTask:
    """`allocation`: held; None: the task holds nothing."""
    at = Instant(1)
    return ChangedTask(
        id=TaskId(task),
        epoch=1,
        batch_id=BatchId(1),
        spec_id=SpecId(1),
        user_id=UserId(1),
        team_id=None,
        status=status.value,
        queued_at=at,
        node_id=None if node is None else NodeId(node),
        holding=int(allocation is not None or node is None),
        allocation_number=None if allocation is None else allocation.number,
        allocation=None if allocation is None else allocation_text(allocation),
        started_at=None,
        finished_at=at if status.is_final else None,
        preempting=0,
        payload=None,
        payload_sha256="",
    )


def found(state: State, *rows: ChangedTask, gangs: tuple[HeldGang, ...] = ()) -> Difference:
    changed = ChangedRows(tasks=rows, attempts={}, specs={}, gangs=gangs, nodes=())

    def shape_of(_: TaskId, __: SpecId) -> Shape:
        return SHAPE

    return difference(state, changed, shape_of, RejectedPlans())


def followed(state: State, difference: Difference) -> State:
    if difference.released:
        state.fold(TasksReleased(tuple(difference.released), Instant(1)))
    for leased in difference.leased:
        state.fold(leased)
    return state


def test_a_lease_of_a_slot_that_the_same_read_frees_is_found_in_any_order() -> None:
    rows = [
        a_row(7, TaskStatus.SUCCEEDED),
        a_row(3, TaskStatus.LEASED, Allocation(0, 500, 0)),
        a_row(9, TaskStatus.LEASED, SECOND),
    ]
    for order in permutations(rows):
        state = a_state(a_node())
        enqueue(state, SHAPE, [3, 9])
        hold(state, SHAPE, HERE, FIRST, 7)
        after = followed(state, found(state, *order))
        assert sorted(after.held) == [3, 9]
        assert not after.queues.tickets


def test_a_lease_of_a_slot_that_is_still_taken_is_left_out_and_named() -> None:
    state = a_state(a_node())
    enqueue(state, SHAPE, [3])
    hold(state, SHAPE, HERE, FIRST, 7)
    first = found(state, a_row(3, TaskStatus.LEASED, Allocation(0, 2000, 0)))
    assert first.leased == []
    assert first.left_out == [3]
    rows = (a_row(7, TaskStatus.FAILED), a_row(3, TaskStatus.LEASED, Allocation(0, 2000, 0)))
    after = followed(state, found(state, *rows))
    assert sorted(after.held) == [3]


def test_a_lease_with_the_same_number_and_other_resources_replaces_the_old_one() -> None:
    state = a_state(a_node())
    hold(state, SHAPE, HERE, FIRST, 3)
    larger = Allocation(0, 2000, 0)
    after = followed(state, found(state, a_row(3, TaskStatus.RUNNING, larger)))
    assert after.held[TaskId(3)].allocation == larger
    again = found(after, a_row(3, TaskStatus.RUNNING, larger))
    assert not again.released
    assert again.leased == []


def test_a_gang_that_formed_again_elsewhere_replaces_its_old_members() -> None:
    state = a_state(a_node(1), a_node(2), a_node(3))
    members = (GangPart(NodeId(2), FIRST),)
    state.fold(TasksLeased(HERE, FIRST, SHAPE, (TaskId(3),), members))
    lease = HeldLease(TaskId(3), 2, UserId(1), TaskStatus.LEASED, SpecId(1), SECOND, b"", "")
    gang = HeldGang(HERE, lease, (GangPart(NodeId(3), FIRST),))
    row = a_row(3, TaskStatus.LEASED, node=None)
    after = followed(state, found(state, row, gangs=(gang,)))
    [member] = after.held[TaskId(3)].members
    assert (after.held[TaskId(3)].allocation, member.node) == (SECOND, NodeId(3))
    again = found(after, row, gangs=(gang,))
    assert not again.released
    assert again.leased == []
