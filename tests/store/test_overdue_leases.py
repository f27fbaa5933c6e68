"""Leases by age, and their end by the server, on both databases."""

from __future__ import annotations

from gpool.core.ids import NodeId
from gpool.core.model import EndReason, TaskStatus
from gpool.server.store.operations.leases import grants, leases
from gpool.server.store.operations.leases.overdue import OverdueLease, end_overdue, old_leases
from gpool.server.store.operations.tasks import tasks
from gpool.wire.frames import Hold, Released
from tests.store.gang_pool import site_of
from tests.store.store_pool import Pool


def overdue(node: NodeId, task: int, reason: EndReason) -> OverdueLease:
    return OverdueLease(node, task, 1, reason, "its node did not end it")  # type: ignore[arg-type]


def test_ages_name_start_cancellation_and_preemption(pool: Pool) -> None:
    node = pool.node("box")
    waiting, running = pool.leased(node), pool.running(node)
    cancelled, preempted = pool.running(node), pool.running(node)
    pool.write(tasks.cancel([cancelled], None, pool.now()))
    pool.write(grants.preempt([preempted], pool.now()))
    found = {each.id: each for each in pool.read(old_leases(pool.now()))}
    assert found.keys() == {waiting, running, cancelled, preempted}
    assert found[waiting].started_at is None
    assert found[running].started_at is not None
    assert {task for task, each in found.items() if each.cancelled_at} == {cancelled}
    assert {task for task, each in found.items() if each.preempted_at} == {preempted}
    assert pool.read(old_leases(min(each.leased_at for each in found.values()))) == ()


def test_members_of_gangs_have_no_allocation_of_their_own(pool: Pool) -> None:
    site = site_of(pool)
    task = site.running()
    found = pool.read(old_leases(pool.now()))
    assert [(each.id, each.node_id, each.allocation_number) for each in found] == [
        (task, site.nodes[0], None),
        (task, site.nodes[1], None),
    ]
    pool.write(tasks.cancel([task], None, pool.now()))
    assert pool.read(old_leases(pool.now())) == ()


def test_the_server_ends_leases_under_its_own_term_only(pool: Pool) -> None:
    node = pool.node("box")
    late, lost, cancelled = (pool.running(node) for _ in range(3))
    pool.write(tasks.cancel([cancelled], None, pool.now()))
    ends = [
        overdue(node, late, EndReason.TIMED_OUT),
        overdue(node, lost, EndReason.LOST),
        overdue(node, cancelled, EndReason.LOST),
    ]
    term = pool.write(leases.take_term(pool.now()))
    assert pool.write(end_overdue(ends, term - 1, pool.now())).released == ()
    done = pool.write(end_overdue(ends, term, pool.now()))
    assert set(done.released) == {late, lost, cancelled}
    assert (pool.view(late).row.status, pool.view(late).record.reason) == (
        TaskStatus.FAILED,
        "timed_out",
    )
    assert pool.view(lost).row.status is TaskStatus.QUEUED
    assert pool.view(cancelled).row.status is TaskStatus.CANCELLED
    assert pool.read(leases.held(node)) == ()
    again = pool.write(end_overdue(ends, term, pool.now()))
    assert (again.ended, again.requeued, again.released) == ((), (), ())
    refused = pool.record(node, Released(lost, 1)).refused
    assert refused == (Hold(lost, 1),)
