"""Reports are fenced by (task, epoch, node), accepted once, and repeated without harm."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpool.core.ids import NodeId
from gpool.core.model import EndReason, TaskStatus
from gpool.server.store.operations.leases import leases
from gpool.server.store.operations.tasks import tasks
from gpool.server.store.values import Recording
from gpool.wire.frames import Finished, HandedBack, Hold, LogChunk, Released, ReportItem, Started
from tests.store.store_pool import COMMAND, Pool, exited, returned

TRIED_TWICE = replace(COMMAND, retries=1)
EVERY_REPORT = [
    Started(0, 1),
    Finished(0, 1, EndReason.RETURNED),
    Finished(0, 1, EndReason.RAISED),
    Released(0, 1),
    HandedBack(0, 1),
    LogChunk(0, 1, 0, 1, b"x"),
]


def about(report: ReportItem, task: int, epoch: int = 1) -> ReportItem:
    return type(report)(
        task, epoch, *(getattr(report, name) for name in report.__struct_fields__[2:])
    )


def test_a_start_and_an_end_are_recorded(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.running(node)
    assert pool.view(task).row.status is TaskStatus.RUNNING
    done = pool.record(node, returned(task, value=b"\x80value"))
    (ended,) = done.ended
    assert (ended.task, ended.user, ended.status) == (task, pool.ann, TaskStatus.SUCCEEDED)
    assert ended.duration == 1000
    assert (done.released, done.refused, done.started) == ((task,), (), ())
    view = pool.view(task)
    assert (view.value, view.row.reason, view.row.holding) == (
        b"\x80value",
        EndReason.RETURNED,
        False,
    )
    assert view.row.leased_at < view.row.started_at < view.row.finished_at


def test_an_end_implies_the_start_that_was_not_reported(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.leased(node)
    pool.record(node, returned(task))
    row = pool.view(task).row
    assert row.status is TaskStatus.SUCCEEDED
    assert row.started_at == row.finished_at - 1000
    liar = pool.leased(node)
    pool.record(node, Finished(liar, 1, EndReason.RETURNED, duration_us=10**15))
    row = pool.view(liar).row
    assert row.started_at == row.leased_at


def test_what_never_started_is_not_said_to_have(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.leased(node)
    pool.record(node, Finished(task, 1, EndReason.BAD_INPUT, error_text="no such artifact"))
    row = pool.view(task).row
    assert (row.status, row.started_at) == (TaskStatus.FAILED, None)
    assert (row.reason, row.error_text) == (EndReason.BAD_INPUT, "no such artifact")


@pytest.mark.parametrize("report", EVERY_REPORT, ids=lambda r: type(r).__name__)
def test_a_report_from_an_old_lease_is_refused(pool: Pool, report: ReportItem) -> None:
    node, other = pool.node("box"), pool.node("other")
    task = pool.running(node)
    pool.expire(node)
    stale = about(report, task)
    assert pool.record(node, stale).refused == (Hold(task, 1),)
    pool.grant(other, [task], epoch=2)
    before = pool.view(task)
    assert pool.record(node, stale) == Recording(refused=(Hold(task, 1),))
    assert pool.view(task) == before


@pytest.mark.parametrize("report", EVERY_REPORT, ids=lambda r: type(r).__name__)
def test_a_report_about_another_nodes_lease_is_refused(pool: Pool, report: ReportItem) -> None:
    node, other = pool.node("box"), pool.node("other")
    task = pool.leased(node)
    before = pool.view(task)
    assert pool.record(other, about(report, task)).refused == (Hold(task, 1),)
    assert pool.record(node, about(report, task, 2)).refused == (Hold(task, 2),)
    assert pool.record(node, about(report, 77)).refused == (Hold(77, 1),)
    assert pool.view(task) == before


@pytest.mark.parametrize("report", EVERY_REPORT, ids=lambda r: type(r).__name__)
def test_a_repeated_report_is_accepted_and_changes_nothing(pool: Pool, report: ReportItem) -> None:
    node = pool.node("box")
    task = pool.leased(node)
    said = about(report, task)
    assert pool.record(node, said).refused == ()
    before = pool.read(tasks.story(task, None))
    done = pool.record(node, said, said)
    assert (done.refused, done.ended, done.requeued, done.released) == ((), (), (), ())
    assert pool.read(tasks.story(task, None)) == before


def test_an_end_is_accepted_once_even_in_one_frame(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.leased(node)
    done = pool.record(
        node, Started(task, 1), returned(task, value=b"1"), returned(task, value=b"2")
    )
    assert (len(done.ended), done.refused, done.started) == (1, (), ())
    assert pool.view(task).value == b"1"
    assert pool.record(node, exited(task)).ended == ()
    assert pool.view(task).row.status is TaskStatus.SUCCEEDED


def test_a_refused_report_does_not_keep_the_others_out(pool: Pool) -> None:
    node, other = pool.node("box"), pool.node("other")
    good, bad = pool.leased(node), pool.leased(other)
    done = pool.record(node, returned(bad), returned(good))
    assert done.refused == (Hold(bad, 1),)
    assert [e.task for e in done.ended] == [good]


def test_a_failure_is_tried_again_as_often_as_the_spec_says(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.leased(node, spec=TRIED_TWICE)
    done = pool.record(node, exited(task, 1, text="first"))
    (requeued,) = done.requeued
    assert (requeued.task, requeued.epoch, requeued.reason) == (task, 1, EndReason.EXITED)
    assert done.released == (task,)
    row = pool.view(task).row
    assert (row.status, row.tries, row.node, row.allocation) == (TaskStatus.QUEUED, 1, None, None)
    assert row.queued_at == requeued.queued_at
    pool.grant(node, [task], epoch=2)
    done = pool.record(node, exited(task, 2, text="second"))
    assert (done.requeued, [e.status for e in done.ended]) == ((), [TaskStatus.FAILED])
    view = pool.view(task)
    assert (view.row.tries, view.row.error_text, view.row.exit_code) == (2, "second", 1)
    (attempt,) = pool.read(tasks.story(task, None)).attempts
    assert (attempt.detail, attempt.reason) == ("first", EndReason.EXITED)


def test_a_lease_handed_back_counts_as_no_try(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.leased(node)
    (requeued,) = pool.record(node, HandedBack(task, 1)).requeued
    assert requeued.reason is EndReason.HANDED_BACK
    row = pool.view(task).row
    assert (row.status, row.tries, row.losses, row.epoch) == (TaskStatus.QUEUED, 0, 0, 1)


def test_a_lease_the_agent_lets_go_unasked_is_queued_again(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.running(node)
    assert [r.reason for r in pool.record(node, Released(task, 1)).requeued] == [
        EndReason.PREEMPTED
    ]
    assert pool.view(task).row.status is TaskStatus.QUEUED


def test_a_lost_node_requeues_everything_it_held(pool: Pool) -> None:
    node, other = pool.node("box"), pool.node("other")
    running, leased, cancelled, safe = (
        pool.running(node),
        pool.leased(node),
        pool.running(node),
        pool.leased(other),
    )
    pool.cancel(cancelled)
    done = pool.expire(node)
    assert {r.task for r in done.requeued} == {running, leased}
    assert {r.reason for r in done.requeued} == {EndReason.LOST}
    assert set(done.released) == {running, leased, cancelled}
    assert pool.view(running).row.losses == 1
    assert pool.view(leased).row.losses == 0
    assert pool.view(cancelled).row.status is TaskStatus.CANCELLED
    assert not pool.view(cancelled).row.holding
    assert pool.view(safe).row.holding
    assert pool.record(node, returned(cancelled)).refused == (Hold(cancelled, 1),)
    assert pool.expire(node).released == ()


def lose(pool: Pool, task: int, name: str, epoch: int, *, start: bool = True) -> TaskStatus:
    node = pool.node(f"{name}-{epoch}")
    pool.grant(node, [task], epoch=epoch)
    if start:
        pool.record(node, Started(task, epoch))
    pool.expire(node)
    return pool.view(task).row.status


def test_a_task_that_loses_three_different_nodes_fails(pool: Pool) -> None:
    (task,) = pool.submit()
    assert lose(pool, task, "a", 1) is TaskStatus.QUEUED
    assert lose(pool, task, "b", 2) is TaskStatus.QUEUED
    assert lose(pool, task, "c", 3) is TaskStatus.FAILED
    row = pool.view(task).row
    assert (row.reason, row.losses, row.tries) == (EndReason.LOSES_NODES, 3, 0)
    assert pool.record(row.node, returned(task, 3)).refused == (Hold(task, 3),)


def test_losses_before_the_start_count_for_nothing(pool: Pool) -> None:
    (task,) = pool.submit()
    for epoch in range(1, 6):
        assert lose(pool, task, "n", epoch, start=False) is TaskStatus.QUEUED
    assert pool.view(task).row.losses == 0


def test_the_same_node_lost_again_is_one_loss(pool: Pool) -> None:
    node = pool.node("box")
    (task,) = pool.submit()
    for epoch in range(1, 6):
        pool.grant(node, [task], epoch=epoch)
        pool.record(node, Started(task, epoch))
        pool.expire(node)
    row = pool.view(task).row
    assert (row.status, row.losses) == (TaskStatus.QUEUED, 1)


def test_an_agent_that_lost_its_attempt_says_so_and_it_counts_as_a_loss(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.running(node)
    done = pool.record(node, Finished(task, 1, EndReason.LOST))
    assert [r.reason for r in done.requeued] == [EndReason.LOST]
    assert pool.view(task).row.losses == 1


def test_many_ends_at_once_are_all_recorded_in_order(pool: Pool) -> None:
    node = pool.node("box")
    done = pool.try_submit(count=500)
    made = [task.id for task in done.tasks]
    pool.grant(node, made)
    recorded = pool.record(node, *(returned(task) for task in reversed(made)))
    assert [e.task for e in recorded.ended] == made[::-1]
    results = pool.read(tasks.batch_results(done.batch, 0, 1000))
    assert [r.task for r in results] == made[::-1]
    assert [r.sequence for r in results] == list(range(1, 501))


@pytest.mark.parametrize("number", [-1, 1 << 63, (1 << 64) - 1])
def test_a_report_with_an_impossible_number_is_refused_alone(pool: Pool, number: int) -> None:
    node = pool.node("box")
    task = pool.leased(node)
    done = pool.record(node, Started(number, 1), Started(1, number), returned(task))
    assert set(done.refused) == {Hold(number, 1), Hold(1, number)}
    assert [e.task for e in done.ended] == [task]


def test_an_exit_code_beyond_all_bounds_is_held_to_them(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.leased(node)
    pool.record(node, exited(task, code=1 << 63))
    assert pool.view(task).row.exit_code == (1 << 31) - 1


def test_what_many_nodes_report_together_is_recorded_as_if_each_came_alone(pool: Pool) -> None:
    nodes = [pool.node(f"box{number}") for number in range(6)]
    leased = [pool.leased(node) for node in nodes]
    pool.cancel(leased[4])
    frames: list[tuple[NodeId, list[ReportItem]]] = [
        (nodes[0], [returned(leased[0], value=b"one")]),
        (nodes[1], [Started(leased[1], 1)]),
        (nodes[2], [exited(leased[2], code=3)]),
        (nodes[3], [returned(leased[3], epoch=7)]),
        (nodes[4], [returned(leased[4])]),
        (nodes[5], [returned(leased[0])]),  # another's
    ]
    done = pool.write(leases.record(frames, pool.now()))
    assert [ended.task for ended in done.ended] == [leased[0], leased[2]]
    assert done.started == (leased[1],)
    assert set(done.released) == {leased[0], leased[2], leased[4]}
    assert set(done.refused) == {(nodes[3], Hold(leased[3], 7)), (nodes[5], Hold(leased[0], 1))}
    statuses = [pool.view(task).row.status.value for task in leased]
    assert statuses == ["succeeded", "running", "failed", "leased", "cancelled", "leased"]
    assert pool.view(leased[0]).value == b"one"


@pytest.mark.parametrize("reason", [EndReason.PREEMPTED, EndReason.HANDED_BACK, EndReason.LOST])
def test_an_end_that_requeues_is_never_taken_for_a_success(pool: Pool, reason: EndReason) -> None:
    """Whatever code a node says it ended with: the scheduler must hear that the task waits again."""
    node = pool.node("box")
    task = pool.leased(node)
    frames = [(node, [Finished(task, 1, reason, 0)])]
    done = pool.write(leases.record(frames, pool.now()))
    assert pool.view(task).row.status is TaskStatus.QUEUED
    assert [(each.task, each.reason) for each in done.requeued] == [(task, reason)]
    (attempt,) = pool.read(tasks.story(task, pool.ann)).attempts
    assert attempt.node == node


def test_frames_that_say_the_same_thing_twice_count_it_once(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.leased(node)
    end = returned(task)
    done = pool.write(leases.record([(node, [end]), (node, [end])], pool.now()))
    assert (len(done.ended), done.refused) == (1, ())
    twice = pool.write(leases.record([(node, [end, end])], pool.now()))
    assert (twice.ended, twice.refused) == ((), ())


def test_ends_of_one_batch_on_many_nodes_keep_its_sequences_dense(pool: Pool) -> None:
    nodes = [pool.node(f"box{number}") for number in range(3)]
    tasks_ = pool.submit(3)
    for node, task in zip(nodes, tasks_, strict=True):
        pool.grant(node, [task])
    frames = [(node, [returned(task)]) for node, task in zip(nodes, tasks_, strict=True)]
    done = pool.write(leases.record(frames, pool.now()))
    assert sorted(pool.view(ended.task).sequence for ended in done.ended) == [1, 2, 3]
