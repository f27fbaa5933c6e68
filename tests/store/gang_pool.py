"""Gangs in a store, and short words for what tests do to them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import EndReason, Requirements, TaskSpec
from gpool.core.scheduler.state.events import GangPart, LeaseGrant, Placement
from gpool.core.scheduler.state.waiting import shape_of
from gpool.server.store.operations import nodes
from gpool.server.store.operations.leases import leases
from gpool.server.store.values import AppliedPlan, Recording
from gpool.wire.frames import Finished, Hold, ReportItem, Started
from tests.store.store_pool import COMMAND, CPU, Pool


def gang_spec(count: int = 2, **options: Any) -> TaskSpec:
    return replace(COMMAND, requirements=Requirements(nodes=count), **options)


@dataclass
class Site:
    """Nodes that reach each other, and gangs on them; rank n is on node n."""

    pool: Pool
    nodes: list[NodeId]

    def place(
        self, task: TaskId, spec: TaskSpec, epoch: int = 1, on: list[NodeId] | None = None
    ) -> Placement:
        where = self.nodes if on is None else on
        count = spec.requirements.nodes
        members = tuple(
            GangPart(node, replace(CPU, number=number)) for number, node in enumerate(where[:count])
        )
        first, *others = members
        grants = (LeaseGrant(task, epoch),)
        shape = shape_of(spec, self.pool.ann)
        return Placement(first.node, first.allocation, shape, grants, tuple(others))

    def apply(self, *places: Placement, **options: Any) -> AppliedPlan:
        done = leases.apply_plan(places, self.pool.term, self.pool.now(), **options)
        return self.pool.write(done)

    def gang(self, spec: TaskSpec | None = None) -> TaskId:
        """Leased under epoch 1."""
        spec = gang_spec() if spec is None else spec
        (task,) = self.pool.submit(spec=spec)
        self.lease(task, spec)
        return task

    def lease(self, task: TaskId, spec: TaskSpec, epoch: int = 1) -> None:
        applied = self.apply(self.place(task, spec, epoch), gang_secrets={task: b"sealed"})
        assert applied.refused == ()
        assert len(applied.lines) == 1

    def running(self, spec: TaskSpec | None = None) -> TaskId:
        task = self.gang(spec)
        for rank in range(self.pool.view(task).spec.requirements.nodes):
            self.say(rank, Started(task, 1))
        return task

    def say(self, rank: int, *items: ReportItem) -> Recording:
        return self.pool.record(self.nodes[rank], *items)

    def ends(self, rank: int, task: TaskId, code: int = 0, epoch: int = 1) -> Recording:
        return self.say(rank, Finished(task, epoch, EndReason.EXITED, code, duration_us=1000))

    def held(self, rank: int) -> tuple[Hold, ...]:
        found = self.pool.read(leases.held(self.nodes[rank]))
        return tuple(Hold(lease.task, lease.epoch) for lease in found)


def site_of(pool: Pool, count: int = 3, gpus: int = 0) -> Site:
    made = []
    for number in range(count):
        node = pool.node(f"n{number}", gpus)
        row = pool.read(nodes.node(node))
        assert row is not None
        told = {"site": "lab", "address": f"10.0.0.{number + 1}", "gang_port": 47000}
        offer = replace(row.node.offer, **told)
        pool.write(nodes.greet(node, offer, [next(pool.numbers) for _ in range(gpus)], pool.now()))
        made.append(node)
    return Site(pool, made)
