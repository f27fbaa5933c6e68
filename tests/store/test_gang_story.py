"""Whatever happens to gangs in whatever order, none is ever partly leased, each lease is released once, and all end."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from gpool.core.gangs import GangOrder, GangStanding, MemberEnd, call, verdict
from gpool.core.ids import NodeId, TaskId
from gpool.core.model import EndReason, Engine, OnLoss, TaskStatus
from gpool.server.store.operations.leases import grants, leases
from gpool.server.store.protocol import Operation, Statement, operation
from gpool.server.store.values import Recording
from gpool.wire.frames import Finished, HandedBack, Hold, Released, Started
from tests.store.gang_pool import Site, gang_spec, site_of
from tests.store.store_pool import Database, Pool, opened
from tests.store.test_picture import empty

SOAKS = bool(os.environ.get("GPOOL_SOAK"))
SIZE = 2
NODES = 4


@operation
def no_gangs() -> Operation[None]:
    yield from empty()
    yield Statement("DELETE FROM gangs")
    yield Statement("DELETE FROM members")
    yield Statement("DELETE FROM attempt_notes")


@dataclass
class Known:
    """One gang as the rules have it."""

    engine: Engine
    on_loss: OnLoss
    status: TaskStatus = TaskStatus.QUEUED
    epoch: int = 0
    nodes: list[NodeId] = field(default_factory=list)  # by rank, while it holds something
    started: set[int] = field(default_factory=set)
    ends: list[MemberEnd] = field(default_factory=list)
    making_room: bool = False
    released: int = 0

    @property
    def standing(self) -> GangStanding:
        return GangStanding(SIZE, self.engine, self.on_loss, tuple(self.ends), self.making_room)

    @property
    def holding(self) -> list[NodeId]:
        over = {end.rank for end in self.ends}
        return [node for rank, node in enumerate(self.nodes) if rank not in over]


class GangsAgainstModel(RuleBasedStateMachine):
    """Subclassed with the database it runs on."""

    database: Database

    def __init__(self) -> None:
        super().__init__()
        self.database.write(no_gangs())
        self.pool = Pool(self.database)
        self.site: Site = site_of(self.pool, NODES)
        self.model: dict[TaskId, Known] = {}

    def pick(self, number: int) -> tuple[TaskId, Known] | None:
        held = sorted(task for task, known in self.model.items() if known.holding)
        among = held if held and number % 4 else sorted(self.model)
        if not among:
            return None
        task = among[number // 4 % len(among)]
        return task, self.model[task]

    @rule(engine=st.sampled_from(Engine), on_loss=st.sampled_from(OnLoss))
    def submit(self, engine: Engine, on_loss: OnLoss) -> None:
        spec = gang_spec(SIZE, engine=engine, on_loss=on_loss)
        (task,) = self.pool.submit(spec=spec)
        self.model[task] = Known(engine, on_loss)

    @rule(
        first=st.integers(0, NODES - 1),
        further=st.integers(1, NODES - 1),
        off=st.sampled_from([1, 1, 1, 1, 0, 2]),
    )
    def plan(self, first: int, further: int, off: int) -> None:
        """For everything that waits; one made on an old state for what does not."""
        on = [self.site.nodes[first], self.site.nodes[(first + further) % NODES]]
        places = []
        for task, known in self.model.items():
            spec = gang_spec(SIZE, engine=known.engine, on_loss=known.on_loss)
            places.append(self.site.place(task, spec, known.epoch + off, on))
        applied = self.site.apply(*places)
        granted = {line.place.grants[0].task for line in applied.lines}
        expected = set()
        for task, known in self.model.items():
            if known.status is TaskStatus.QUEUED and off == 1:
                expected.add(task)
                known.status, known.nodes = TaskStatus.LEASED, on
                known.epoch += 1
                known.started, known.ends, known.making_room = set(), [], False
        assert granted == expected

    @rule(
        number=st.integers(0, 60),
        rank=st.integers(0, SIZE - 1),
        late=st.sampled_from([0, 0, 0, 0, 1]),
        what=st.sampled_from(
            ["started", "started", "exit 0", "exit 0", "exit 1", "released", "handed back", "lost"]
        ),
    )
    def report(self, number: int, rank: int, late: int, what: str) -> None:
        picked = self.pick(number)
        if picked is None:
            return
        task, known = picked
        sender = known.nodes[rank] if known.nodes else self.site.nodes[rank]
        epoch = known.epoch - late
        said = {
            "started": Started(task, epoch),
            "exit 0": Finished(task, epoch, EndReason.EXITED, 0),
            "exit 1": Finished(task, epoch, EndReason.EXITED, 1),
            "lost": Finished(task, epoch, EndReason.LOST),
            "released": Released(task, epoch),
            "handed back": HandedBack(task, epoch),
        }[what]
        done = self.pool.record(sender, said)
        if late or sender not in known.holding:
            assert done == Recording(refused=done.refused)
            return
        assert done.refused == ()
        if what == "started":
            known.started.add(rank)
            if rank == 0 and known.status is TaskStatus.LEASED:
                known.status = TaskStatus.RUNNING
            return
        reason, code = EndReason.EXITED, int(what[-1]) if what.startswith("exit") else None
        if what == "lost":
            reason = EndReason.LOST
        elif code is None:
            told = known.status is TaskStatus.CANCELLED or call(known.standing) is GangOrder.END
            begun = EndReason.PREEMPTED if rank in known.started else EndReason.HANDED_BACK
            reason = EndReason.CANCELLED if told else begun
        self.ends(task, known, MemberEnd(rank, len(known.ends) + 1, reason, code), done)

    @rule(node=st.integers(0, NODES - 1))
    def lose(self, node: int) -> None:
        lost = self.site.nodes[node]
        done = self.pool.expire(lost)
        for task, known in self.model.items():
            if lost in known.holding:
                rank = known.nodes.index(lost)
                end = MemberEnd(rank, len(known.ends) + 1, EndReason.LOST)
                self.ends(task, known, end, done)

    def ends(self, task: TaskId, known: Known, end: MemberEnd, done: Recording) -> None:
        before = call(known.standing)
        known.ends.append(end)
        told = call(known.standing)
        hold = Hold(task, known.epoch)
        called = {node for node, each in (*done.to_stop, *done.to_preempt) if each == hold}
        is_new = before is None and told is not None and not known.making_room
        if known.status is TaskStatus.CANCELLED or not is_new:
            assert not called
        else:
            assert called == set(known.holding)
        found = verdict(known.standing)
        assert (task in done.released) == (found is not None)
        if found is None:
            return
        known.released += 1
        known.nodes = []
        if known.status is TaskStatus.CANCELLED:
            return
        row = self.pool.view(task).row
        back = found.reason in {EndReason.PREEMPTED, EndReason.HANDED_BACK}
        back |= found.reason is EndReason.LOST and known.on_loss is OnLoss.REFORM
        if back and row.reason is not EndReason.LOSES_NODES:
            assert row.status is TaskStatus.QUEUED
        else:
            assert row.status.is_final
        known.status = row.status

    @rule(number=st.integers(0, 60))
    def cancel(self, number: int) -> None:
        picked = self.pick(number)
        if picked is None:
            return
        task, known = picked
        done = self.pool.cancel(task)
        if not known.status.is_final:
            assert [node for node, _ in done.to_stop] == known.holding
            known.status = TaskStatus.CANCELLED

    @rule(number=st.integers(0, 60))
    def preempt(self, number: int) -> None:
        picked = self.pick(number)
        if picked is None:
            return
        task, known = picked
        done = self.pool.write(grants.preempt([task], self.pool.now()))
        moving = known.status in (TaskStatus.LEASED, TaskStatus.RUNNING)
        may = moving and (known.making_room or call(known.standing) is None)
        assert [node for node, _ in done.to_preempt] == (known.holding if may else [])
        known.making_room |= may

    @invariant()
    def every_gang_is_whole_or_not_there(self) -> None:
        seen = self.pool.read(leases.picture())
        held = {
            (gang.lease.task, gang.lease.epoch, gang.lease.status, gang.nodes)
            for gang in seen.gangs
        }
        assert held == {
            (task, known.epoch, known.status, tuple(known.nodes))
            for task, known in self.model.items()
            if known.nodes
        }
        assert {(q.task, q.epoch) for q in seen.queued} == {
            (task, known.epoch)
            for task, known in self.model.items()
            if known.status is TaskStatus.QUEUED
        }
        for node in self.site.nodes:
            current = self.pool.read(leases.held(node))
            assert {lease.task for lease in current} == {
                task for task, known in self.model.items() if node in known.holding
            }

    def teardown(self) -> None:
        for node in self.site.nodes:
            self.pool.expire(node)
        assert self.pool.read(leases.picture()).gangs == ()


def test_no_gang_is_ever_partly_leased_or_released_twice(url: str) -> None:
    with opened(url) as database:
        run_state_machine_as_test(
            type("Machine", (GangsAgainstModel,), {"database": database}),
            settings=settings(
                max_examples=50 if SOAKS or url.startswith("sqlite") else 20,
                stateful_step_count=40,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
