"""Whatever happens in whatever order, the store's picture is that of a model that only knows the rules."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from gpool.core.ids import BatchId, NodeId, TaskId
from gpool.core.model import TaskStatus
from gpool.server.store import operation
from gpool.server.store.operations.leases import leases
from gpool.server.store.operations.tasks import tasks
from gpool.server.store.protocol import Operation, Statement
from gpool.wire.frames import HandedBack, Released, Started
from tests.store.store_pool import COMMAND, Database, Pool, exited, opened, returned

RETRIES = 1
SOAKS = bool(os.environ.get("GPOOL_SOAK"))


@dataclass
class Model:
    """One task as the rules have it."""

    batch: BatchId
    status: TaskStatus = TaskStatus.QUEUED
    epoch: int = 0
    node: NodeId | None = None
    tries: int = 0
    lost_on: frozenset[NodeId] = frozenset()

    def end(self, status: TaskStatus) -> None:
        self.status, self.node = status, None

    def requeue(self) -> None:
        self.status, self.node = TaskStatus.QUEUED, None


def is_queued(known: Model) -> bool:
    return known.status is TaskStatus.QUEUED


def is_held(known: Model) -> bool:
    return known.node is not None


@operation
def empty() -> Operation[None]:
    yield Statement("DELETE FROM tasks")
    yield Statement("DELETE FROM attempts")
    yield Statement("DELETE FROM batches")
    yield Statement("DELETE FROM specs")
    yield Statement("DELETE FROM nodes")
    yield Statement("DELETE FROM users")
    yield Statement("DELETE FROM scheduler_term")
    yield Statement("DELETE FROM log_heads")
    yield Statement("DELETE FROM log_chunks")


class StoreAgainstModel(RuleBasedStateMachine):
    """Subclassed with the database it runs on."""

    database: Database

    def __init__(self) -> None:
        super().__init__()
        self.database.write(empty())
        self.pool = Pool(self.database)
        self.nodes = [self.pool.node(f"n{i}") for i in range(4)]
        self.model: dict[TaskId, Model] = {}
        self.ends: dict[BatchId, int] = {}

    def pick(self, number: int, likely: Callable[[Model], bool]) -> tuple[TaskId, Model] | None:
        """Mostly one of those the move is meant for; every fourth time any at all."""
        among = sorted(task for task, known in self.model.items() if likely(known))
        if number % 4 == 0 or not among:
            among = sorted(self.model)
        if not among:
            return None
        task = among[number // 4 % len(among)]
        return task, self.model[task]

    def ended(self, task: Model, status: TaskStatus) -> None:
        task.end(status)
        self.ends[task.batch] += 1

    @rule(count=st.integers(1, 3))
    def submit(self, count: int) -> None:
        done = self.pool.try_submit(count=count, spec=replace(COMMAND, retries=RETRIES))
        self.ends[done.batch] = 0
        for task in done.tasks:
            self.model[task.id] = Model(done.batch)

    @rule(
        numbers=st.lists(st.integers(0, 40), min_size=1, max_size=3),
        node=st.integers(0, 3),
        off=st.sampled_from([1, 1, 1, 0, 2]),
    )
    def grant(self, numbers: list[int], node: int, off: int) -> None:
        picked = dict(found for number in numbers if (found := self.pick(number, is_queued)))
        places = [
            self.pool.place(self.nodes[node], [task], task_model.epoch + off)
            for task, task_model in picked.items()
        ]
        applied = self.pool.write(leases.apply_plan(places, self.pool.term, self.pool.now()))
        granted = {lease.task for line in applied.lines for _, lease in line.leases}
        expected = set()
        for task, known in picked.items():
            if known.status is TaskStatus.QUEUED and off == 1:
                expected.add(task)
                known.status, known.node = TaskStatus.LEASED, self.nodes[node]
                known.epoch += 1
        assert granted == expected
        assert set(applied.refused) == set(picked) - expected

    @rule(
        number=st.integers(0, 40),
        node=st.integers(0, 3),
        right_node=st.sampled_from([True, True, True, False]),
        late=st.sampled_from([0, 0, 0, 1]),
        what=st.sampled_from(
            ["started", "started", "returned", "failed", "failed", "handed back", "released"]
        ),
    )
    def report(self, number: int, node: int, right_node: bool, late: int, what: str) -> None:
        picked = self.pick(number, is_held)
        if picked is None:
            return
        task, known = picked
        sender = known.node if right_node and known.node else self.nodes[node]
        epoch = known.epoch - late
        said = {
            "started": Started(task, epoch),
            "returned": returned(task, epoch),
            "failed": exited(task, epoch),
            "handed back": HandedBack(task, epoch),
            "released": Released(task, epoch),
        }[what]
        done = self.pool.record(sender, said)
        if known.node != sender or late:
            assert not done.ended
            assert not done.requeued
            assert not done.released
            assert not done.started
            return
        assert done.refused == ()
        if what == "started":
            if known.status is TaskStatus.LEASED:
                known.status = TaskStatus.RUNNING
        elif known.status is TaskStatus.CANCELLED:
            known.node = None
        elif what == "returned":
            self.ended(known, TaskStatus.SUCCEEDED)
        elif what == "failed":
            known.tries += 1
            if known.tries > RETRIES:
                self.ended(known, TaskStatus.FAILED)
            else:
                known.requeue()
        else:
            known.requeue()

    @rule(number=st.integers(0, 40))
    def cancel(self, number: int) -> None:
        picked = self.pick(number, is_held)
        if picked is None:
            return
        task, known = picked
        done = self.pool.cancel(task)
        if known.status.is_final:
            assert not done.ended
            return
        self.ends[known.batch] += 1
        known.status = TaskStatus.CANCELLED  # and holds on, if a node has it

    @rule(node=st.integers(0, 3))
    def lose(self, node: int) -> None:
        lost = self.nodes[node]
        self.pool.expire(lost)
        for known in self.model.values():
            if known.node != lost:
                continue
            if known.status is TaskStatus.RUNNING:
                known.lost_on |= {lost}
            if known.status is TaskStatus.CANCELLED:
                known.node = None
            elif len(known.lost_on) >= 3:
                self.ended(known, TaskStatus.FAILED)
            else:
                known.requeue()

    @invariant()
    def the_picture_is_the_models(self) -> None:
        seen = self.pool.read(leases.picture())
        assert {(q.task, q.epoch) for q in seen.queued} == {
            (task, known.epoch)
            for task, known in self.model.items()
            if known.status is TaskStatus.QUEUED
        }
        assert {(node, held.task, held.epoch, held.status) for node, held in seen.held} == {
            (known.node, task, known.epoch, known.status)
            for task, known in self.model.items()
            if known.node is not None
        }

    def teardown(self) -> None:
        for task, known in self.model.items():
            row = self.pool.view(task).row
            assert (row.status, row.epoch, row.tries) == (known.status, known.epoch, known.tries)
            assert row.losses == len(known.lost_on)
        for batch, ended in self.ends.items():
            results = self.pool.read(tasks.batch_results(batch, 0, 1000))
            assert [result.sequence for result in results] == list(range(1, ended + 1))
            assert self.pool.read(tasks.batch(batch, None)).done == ended


@contextmanager
def machine(url: str) -> Iterator[type[StoreAgainstModel]]:
    with opened(url) as database:
        yield type("Machine", (StoreAgainstModel,), {"database": database})


def test_the_picture_always_equals_the_models(url: str) -> None:
    with machine(url) as made:
        run_state_machine_as_test(
            made,
            settings=settings(
                max_examples=100 if SOAKS or url.startswith("sqlite") else 40,
                stateful_step_count=40,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
