"""Grants are written only on queued tasks, by the scheduler in office, on nodes that take work."""

from __future__ import annotations

import asyncio

import pytest

from gpool.core.ids import SpecId
from gpool.core.model import Allocation, Availability, Slice, TaskKind, TaskSpec, TaskStatus
from gpool.server.store.operations import nodes
from gpool.server.store.operations.leases import leases
from gpool.server.store.operations.tasks import artifacts
from gpool.wire.frames import Finished, HandedBack, Hold, Lease, Started
from tests.store.store_pool import CPU, Database, Pool, replicas, returned

FUNCTION = TaskSpec(TaskKind.FUNCTION, "f", function_sha256="a" * 64)


def test_a_grant_gives_the_lease_with_its_payload_in_the_order_of_the_line(pool: Pool) -> None:
    node = pool.node("box")
    pool.write(artifacts.add_artifact("a" * 64, 3, pool.ann, None, None, pool.now()))
    first, second = pool.submit(2, spec=FUNCTION, payload=b"args\x00")
    applied = pool.grant(node, [second, first])
    ((spec, lease), (_, other)) = applied.lines[0].leases
    assert lease == Lease(second, 1, b"args\x00", "")
    assert other.task == first
    assert pool.read(leases.spec(spec)) == (pool.ann, FUNCTION)
    row = pool.view(first).row
    assert (row.status, row.epoch, row.node, row.holding) == (TaskStatus.LEASED, 1, node, True)
    assert row.allocation == CPU


def test_an_allocation_with_slices_is_read_back_equal(pool: Pool) -> None:
    node = pool.node("box", gpus=1)
    (task,) = pool.submit()
    allocation = Allocation(3, 500, 1 << 20, (Slice(0, 1 << 30, 250), Slice(1, 1 << 31, 1000)))
    place = pool.place(node, [task], allocation=allocation)
    pool.write(leases.apply_plan([place], pool.term, pool.now()))
    assert pool.view(task).row.allocation == allocation
    (held,) = pool.read(leases.held(node))
    assert held.allocation == allocation


def test_a_task_that_is_not_queued_is_refused_and_named(pool: Pool) -> None:
    node, other = pool.node("box"), pool.node("other")
    one, two = pool.submit(2)
    pool.grant(node, [one])
    applied = pool.grant(other, [one, two])
    assert applied.refused == (one,)
    assert [lease.task for _, lease in applied.lines[0].leases] == [two]
    assert pool.view(one).row.node == node


@pytest.mark.parametrize("epoch", [0, 2, 5])
def test_a_grant_under_another_epoch_is_refused(pool: Pool, epoch: int) -> None:
    node = pool.node("box")
    (task,) = pool.submit()
    assert pool.grant(node, [task], epoch=epoch).refused == (task,)
    assert pool.view(task).row.status is TaskStatus.QUEUED


def test_a_task_granted_twice_in_one_plan_is_leased_once(pool: Pool) -> None:
    node, other = pool.node("box"), pool.node("other")
    (task,) = pool.submit()
    places = [pool.place(node, [task]), pool.place(other, [task])]
    applied = pool.write(leases.apply_plan(places, pool.term, pool.now()))
    assert applied.refused == (task,)
    assert len(applied.lines) == 1
    assert pool.view(task).row.node == applied.lines[0].place.node


def test_a_deposed_scheduler_writes_nothing(pool: Pool) -> None:
    node = pool.node("box")
    (task,) = pool.submit()
    assert pool.write(leases.take_term(pool.now())) == pool.term + 1
    applied = pool.grant(node, [task])
    assert (applied.deposed, applied.lines, applied.refused) == (True, (), ())
    assert pool.view(task).row.status is TaskStatus.QUEUED


def test_a_node_that_is_gone_or_paused_gets_nothing_and_its_tasks_stay_queued(pool: Pool) -> None:
    gone, paused, open_ = pool.node("gone"), pool.node("paused"), pool.node("open")
    one, two, three = pool.submit(3)
    pool.write(nodes.remove_node(gone, pool.ann))
    pool.write(nodes.set_availability(paused, None, Availability.PAUSED, pool.now()))
    places = [pool.place(gone, [one]), pool.place(paused, [two]), pool.place(open_, [three])]
    applied = pool.write(leases.apply_plan(places, pool.term, pool.now()))
    assert [line.place.node for line in applied.lines] == [open_]
    assert applied.refused == ()
    assert pool.view(one).row.status is pool.view(two).row.status is TaskStatus.QUEUED


def test_an_empty_plan_is_applied(pool: Pool) -> None:
    applied = pool.write(leases.apply_plan([], pool.term, pool.now()))
    assert (applied.lines, applied.refused, applied.deposed) == ((), (), False)


def test_concurrent_claimers_never_lease_a_task_twice(pool: Pool, database: Database) -> None:
    claimers = [pool.node(f"n{i}") for i in range(4)]
    wanted = pool.submit(100)

    async def race() -> list[int]:
        async with replicas(database.url, len(claimers)) as stores:
            writes = [
                store.write(
                    leases.apply_plan(
                        [pool.place(node, wanted[start : start + 50])], pool.term, pool.now()
                    )
                )
                for start in (0, 25, 50)
                for store, node in zip(stores, claimers, strict=True)
            ]
            applied = await asyncio.gather(*writes)
        return [lease.task for plan in applied for line in plan.lines for _, lease in line.leases]

    granted = database.run(race())
    assert sorted(granted) == wanted
    assert sum(len(pool.read(leases.held(node))) for node in claimers) == 100


def test_held_shows_everything_a_node_holds_until_it_lets_go(pool: Pool) -> None:
    node = pool.node("box")
    one, two, three = (pool.leased(node) for _ in range(3))
    pool.record(node, Started(one, 1))
    pool.cancel(two)
    pool.record(node, returned(three))
    assert [(h.task, h.status) for h in pool.read(leases.held(node))] == [
        (one, TaskStatus.RUNNING),
        (two, TaskStatus.CANCELLED),
    ]


def test_holds_that_are_not_current_are_named(pool: Pool) -> None:
    node, other = pool.node("box"), pool.node("other")
    mine, ended, theirs = pool.leased(node), pool.leased(node), pool.leased(other)
    pool.record(node, returned(ended))
    holds = [Hold(mine, 1), Hold(mine, 2), Hold(ended, 1), Hold(theirs, 1), Hold(99, 1)]
    assert pool.beats((node, holds)) == [tuple(holds[1:])]


def test_beats_of_many_nodes_are_answered_each_for_itself(pool: Pool) -> None:
    node, other, idle = pool.node("box"), pool.node("other"), pool.node("idle")
    mine, theirs = Hold(pool.leased(node), 1), Hold(pool.leased(other), 1)
    told = pool.beats((node, [mine, theirs]), (other, [mine, theirs]), (idle, []), (idle, [mine]))
    assert told == [(theirs,), (mine,), (), (mine,)]
    told = pool.beats((node, [mine]), (node, [mine, theirs]))
    assert told == [(), (theirs,)]


def test_a_beat_is_as_late_as_the_latest_of_its_node(pool: Pool) -> None:
    node, other = pool.node("box"), pool.node("other")
    early, late, latest = pool.now(), pool.now(), pool.now()
    pool.write(leases.record_heartbeats([(node, (), late), (other, (), latest), (node, (), early)]))
    seen = [pool.read(nodes.node(each)) for each in (node, other)]
    assert [row.last_beat_at for row in seen if row is not None] == [late, latest]


def test_a_requeued_task_is_granted_again_under_the_next_epoch(pool: Pool) -> None:
    node, other = pool.node("box"), pool.node("other")
    task = pool.leased(node)
    pool.record(node, HandedBack(task, 1))
    assert pool.grant(other, [task], epoch=1).refused == (task,)
    assert pool.grant(other, [task], epoch=2).refused == ()
    assert pool.record(node, Finished(task, 1, "returned")).refused == ()  # it had that one
    assert pool.view(task).row.status is TaskStatus.LEASED


def test_the_picture_holds_what_is_open_and_nothing_else(pool: Pool) -> None:
    node = pool.node("box", gpus=1)
    queued, leased, done = pool.submit(3)
    pool.grant(node, [leased, done])
    pool.record(node, returned(done))
    seen = pool.read(leases.picture())
    assert [(q.task, q.epoch, q.user) for q in seen.queued] == [(queued, 0, pool.ann)]
    assert [(n, h.task) for n, h in seen.held] == [(node, leased)]
    assert [user for _, user, _ in seen.specs] == [pool.ann]
    assert [row.node.id for row in seen.nodes] == [node]


def test_an_unknown_spec_is_not_found(pool: Pool) -> None:
    assert pool.read(leases.spec(SpecId(1))) is None
