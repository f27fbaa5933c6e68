"""A task that could not be started waits again, a bounded number of times, and the picture knows where it was tried."""

from __future__ import annotations

import pytest

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import EndReason, Fault, TaskStatus
from gpool.core.reliability import MAX_BY_NODE, MAX_UNSTARTED
from gpool.server.store.operations.leases import leases
from gpool.server.store.values import Recording
from gpool.wire.frames import Finished, Released, Started
from tests.store.gang_pool import Site, gang_spec, site_of
from tests.store.store_pool import Pool

WHY = "no such sandbox"


@pytest.fixture
def site(pool: Pool) -> Site:
    return site_of(pool)


def fail(pool: Pool, node: NodeId, task: TaskId, fault: Fault | None = None) -> Recording:
    """It is given to the node, which cannot start it."""
    epoch = pool.view(task).row.epoch + 1
    pool.grant(node, [task], epoch=epoch)
    said = Finished(task, epoch, EndReason.SANDBOX_FAILED, 125, error_text=WHY, fault=fault)
    return pool.record(node, said)


def test_it_waits_again_and_nothing_is_counted_against_it(pool: Pool) -> None:
    node = pool.node("box")
    (task,) = pool.submit()
    (again,) = fail(pool, node, task, Fault.UNCLEAR).requeued
    assert (again.reason, again.fault) == (EndReason.SANDBOX_FAILED, Fault.UNCLEAR)
    assert (again.node, again.ran) == (node, 0)
    row = pool.view(task).row
    assert (row.status, row.tries, row.losses) == (TaskStatus.QUEUED, 0, 0)


@pytest.mark.parametrize(
    ("fault", "most"),
    [
        (None, MAX_UNSTARTED),
        (Fault.UNCLEAR, MAX_UNSTARTED),
        (Fault.NODE, MAX_BY_NODE),
        (Fault.PART, MAX_BY_NODE),
    ],
)
def test_after_so_many_tries_it_fails_with_what_was_said(
    pool: Pool, fault: Fault | None, most: int
) -> None:
    node = pool.node("box")
    (task,) = pool.submit()
    for _ in range(most - 1):
        assert fail(pool, node, task, fault).requeued
    assert fail(pool, node, task, fault).ended
    row = pool.view(task).row
    assert (row.status, row.reason) == (TaskStatus.FAILED, EndReason.SANDBOX_FAILED)
    assert row.error_text is not None
    assert row.error_text.startswith(WHY)
    assert f"{most} times" in row.error_text
    assert row.started_at is None


def test_what_nodes_admit_hardly_counts_against_a_task(pool: Pool) -> None:
    node = pool.node("box")
    (task,) = pool.submit()
    for fault in (Fault.NODE, Fault.UNCLEAR, Fault.PART, Fault.UNCLEAR):
        assert fail(pool, node, task, fault).requeued
    assert fail(pool, node, task, Fault.UNCLEAR).ended


def test_one_that_was_said_to_run_and_was_not_is_believed_of_its_agent(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.running(node)
    said = Finished(task, 1, EndReason.SANDBOX_FAILED, 125, fault=Fault.UNCLEAR)
    (again,) = pool.record(node, said).requeued
    assert again.ran == 0


@pytest.mark.parametrize("together", [True, False])
def test_a_sandbox_that_fails_while_it_runs_is_the_end(pool: Pool, together: bool) -> None:
    node = pool.node("box")
    task = pool.leased(node)
    end = Finished(task, 1, EndReason.SANDBOX_FAILED, 125)
    if together:
        done = pool.record(node, Started(task, 1), end)
    else:
        pool.record(node, Started(task, 1))
        done = pool.record(node, end)
    assert done.ended
    assert pool.view(task).row.status is TaskStatus.FAILED


def test_one_that_is_cancelled_meanwhile_stays_so(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.leased(node)
    pool.cancel(task)
    said = Finished(task, 1, EndReason.SANDBOX_FAILED, 125, fault=Fault.NODE)
    done = pool.record(node, said)
    assert (done.requeued, done.released) == ((), (task,))
    assert pool.view(task).row.status is TaskStatus.CANCELLED


def test_a_fault_with_any_other_end_says_nothing(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.leased(node)
    pool.record(node, Finished(task, 1, EndReason.EXITED, 7, fault=Fault.NODE))
    row = pool.view(task).row
    assert (row.status, row.exit_code) == (TaskStatus.FAILED, 7)


def test_the_picture_tells_where_open_tasks_could_not_be_started(pool: Pool) -> None:
    one, two = pool.node("one"), pool.node("two")
    first, second, third = pool.submit(3)
    fail(pool, one, first, Fault.UNCLEAR)
    fail(pool, two, first, Fault.NODE)
    fail(pool, two, first, Fault.NODE)
    fail(pool, one, second, Fault.UNCLEAR)
    pool.cancel(second)
    pool.grant(one, [third])
    pool.record(one, Finished(third, 1, EndReason.LOST))
    assert pool.read(leases.picture()).unstarted == ((first, one), (first, two))


def test_a_gang_waits_again_when_one_could_not_be_started(site: Site) -> None:
    for fault, reason in (
        (None, EndReason.SANDBOX_FAILED),
        (Fault.UNCLEAR, EndReason.SANDBOX_FAILED),
        (Fault.NODE, EndReason.NODE_FAILED),
    ):
        task = site.gang(gang_spec())
        end = Finished(task, 1, EndReason.SANDBOX_FAILED, 125, error_text=WHY, fault=fault)
        done = site.say(1, end)
        assert done.to_stop
        (again,) = site.say(0, Released(task, 1)).requeued
        assert (again.reason, again.node) == (reason, site.nodes[1])
        assert again.fault is not None
        assert again.fault is not Fault.NODE
        row = site.pool.view(task).row
        assert (row.status, row.tries) == (TaskStatus.QUEUED, 0)
        site.pool.cancel(task)
