"""A store with a user and nodes in it, and short words for what tests do to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

from gpool.core.errors import GpoolError, InternalFault
from gpool.core.ids import BatchId, NodeId, SpecId, TaskId, UserId
from gpool.core.model import (
    Allocation,
    EndReason,
    Gpu,
    Instant,
    Offer,
    Permission,
    Slice,
    TaskKind,
    TaskSpec,
)
from gpool.core.permissions import TeamId
from gpool.core.scheduler.state.events import LeaseGrant, Placement
from gpool.core.scheduler.state.waiting import shape_of
from gpool.server.store import open_store, operation
from gpool.server.store.identity_values import Team
from gpool.server.store.operations import nodes
from gpool.server.store.operations.identity import accounts, teams, users
from gpool.server.store.operations.leases import leases
from gpool.server.store.operations.tasks import submissions, tasks
from gpool.server.store.operations.tasks.submissions import (
    MissingArtifacts,
    NewTask,
    Submission,
    SubmittedTasks,
)
from gpool.server.store.protocol import Operation, Store
from gpool.server.store.sealing import KeyHolder
from gpool.server.store.values import AppliedPlan, Recording, TaskView, User
from gpool.wire.frames import Finished, Hold, ReportItem, Started

T = TypeVar("T")
COMMAND = TaskSpec(TaskKind.COMMAND, "true", command=("true",))
CPU = Allocation(0, 1000, 1 << 30)
LENDS_AND_RUNS = frozenset({Permission.CONSUMER, Permission.PROVIDER})


@operation
def submit_one(submission: Submission) -> Operation[SubmittedTasks | MissingArtifacts]:
    """Submit it; a refusal is raised."""
    [outcome] = yield from submissions.submit([submission])
    if isinstance(outcome, GpoolError):
        raise outcome
    return outcome


class Database:
    """A fresh database of one kind: an address, and a store opened on it inside a loop of the test's own."""

    def __init__(self, url: str, keys: KeyHolder | None = None) -> None:
        self.url = url
        self.keys = keys
        self.loop = asyncio.new_event_loop()
        self.store: Store = self.run(open_store(url, keys=keys))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)

    def write(self, operation: Operation[T]) -> T:
        return self.run(self.store.write(operation))

    def read(self, operation: Operation[T]) -> T:
        return self.run(self.store.read(operation))

    def reopen(self) -> None:
        self.run(self.store.close())
        self.store = self.run(open_store(self.url, keys=self.keys))

    def close(self) -> None:
        self.run(self.store.close())
        self.run(self.loop.shutdown_default_executor())
        self.loop.close()


@asynccontextmanager
async def replicas(
    url: str, count: int, keys: KeyHolder | None = None
) -> AsyncIterator[list[Store]]:
    """Several stores on one database, closed whatever happens."""
    async with AsyncExitStack() as closing:
        made = []
        for _ in range(count):
            made.append(await open_store(url, keys=keys))
            closing.push_async_callback(made[-1].close)
        yield made


def race(database: Database, operations: Sequence[Operation[Any]], stores: int = 4) -> list[Any]:
    """All at once, dealt out to several replicas; a refusal stands in its operation's place."""

    async def run() -> list[Any]:
        async with replicas(database.url, stores, database.keys) as made:
            answers = await asyncio.gather(
                *(made[i % stores].write(each) for i, each in enumerate(operations)),
                return_exceptions=True,
            )
        return list(answers)

    answers = database.run(run())
    for answer in answers:
        assert not isinstance(answer, BaseException) or isinstance(answer, GpoolError), answer
        assert not isinstance(answer, InternalFault), answer
    return answers


@contextmanager
def opened(url: str) -> Iterator[Database]:
    made = Database(url)
    try:
        yield made
    finally:
        made.close()


def returned(task: int, epoch: int = 1, value: bytes = b"v", value_sha256: str = "") -> Finished:
    return Finished(task, epoch, EndReason.RETURNED, None, value, value_sha256, duration_us=1000)


def exited(task: int, epoch: int = 1, code: int = 1, text: str = "") -> Finished:
    return Finished(task, epoch, EndReason.EXITED, code, error_text=text, duration_us=1000)


class Pool:
    """One user, `ann`, and a term; nodes and tasks as the test asks for them. Time passes with every call."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.numbers = count(1000)
        self.clock = count(1_700_000_000_000_000, 1_000_000)
        self.ann = self.user("ann")
        self.term = database.write(leases.take_term(self.now()))

    def now(self) -> Instant:
        return Instant(next(self.clock))

    def write(self, operation: Operation[T]) -> T:
        return self.database.write(operation)

    def read(self, operation: Operation[T]) -> T:
        return self.database.read(operation)

    def user(self, name: str) -> UserId:
        made = User(UserId(next(self.numbers)), name, LENDS_AND_RUNS, self.now())
        self.write(users.create_user(made))
        return made.id

    def account(self, name: str, **ways: Any) -> UserId:
        """A user with ways in: `password_hash`, `wallet`, `oidc`."""
        made = User(UserId(next(self.numbers)), name, LENDS_AND_RUNS, self.now())
        self.write(
            accounts.register(
                made,
                ways.get("password_hash"),
                ways.get("wallet"),
                ways.get("invite_hash"),
                self.now(),
                ways.get("oidc"),
            )
        )
        return made.id

    def team(self, name: str, owner: UserId | None = None) -> TeamId:
        made = Team(TeamId(next(self.numbers)), name, self.now())
        self.write(teams.create_team(made, self.ann if owner is None else owner))
        return made.id

    def node(self, name: str, gpus: int = 0) -> NodeId:
        offered = tuple(
            Gpu(i, f"{name}-{i}", "H100", "nvidia", 80 << 30, simulated=True) for i in range(gpus)
        )
        offer = Offer(4000, 1 << 34, 1 << 36, offered)
        node = NodeId(next(self.numbers))
        ids = [next(self.numbers) for _ in offered]
        self.write(
            nodes.create_node(node, name, self.ann, None, f"secret-{node}", offer, ids, self.now())
        )
        return node

    def submission(
        self,
        count: int = 1,
        *,
        spec: TaskSpec = COMMAND,
        user: UserId | None = None,
        batch: BatchId | None = None,
        more: bool = False,
        payload: bytes = b"",
        payload_sha256: str = "",
        **further: Any,
    ) -> Submission:
        made = [
            NewTask(TaskId(next(self.numbers)), place, payload, payload_sha256)
            for place in range(count)
        ]
        return Submission(
            BatchId(next(self.numbers)) if batch is None else batch,
            batch is None,
            not more,
            SpecId(next(self.numbers)),
            spec,
            self.ann if user is None else user,
            made,
            self.now(),
            **further,
        )

    def submit(self, count: int = 1, **options: Any) -> list[TaskId]:
        done = self.write(submit_one(self.submission(count, **options)))
        assert isinstance(done, SubmittedTasks)
        return [task.id for task in done.tasks]

    def try_submit(self, **options: Any) -> SubmittedTasks | MissingArtifacts:
        return self.write(submit_one(self.submission(**options)))

    def place(
        self,
        node: NodeId,
        granted: Sequence[TaskId],
        epoch: int = 1,
        allocation: Allocation = CPU,
        spec: TaskSpec = COMMAND,
    ) -> Placement:
        grants = tuple(LeaseGrant(task, epoch) for task in granted)
        return Placement(node, allocation, shape_of(spec, self.ann), grants)

    def grant(
        self,
        node: NodeId,
        granted: Sequence[TaskId],
        epoch: int = 1,
        number: int = 0,
        slices: tuple[Slice, ...] = (),
    ) -> AppliedPlan:
        place = self.place(node, granted, epoch, replace(CPU, number=number, slices=slices))
        return self.write(leases.apply_plan([place], self.term, self.now()))

    def beats(self, *said: tuple[NodeId, Sequence[Hold]]) -> list[tuple[Hold, ...]]:
        """Of each, what it does not hold any more."""
        return self.write(
            leases.record_heartbeats([(node, holds, self.now()) for node, holds in said])
        )

    def leased(self, node: NodeId, **options: Any) -> TaskId:
        """A fresh task, leased to the node under epoch 1."""
        (task,) = self.submit(**options)
        assert self.grant(node, [task]).refused == ()
        return task

    def running(self, node: NodeId, **options: Any) -> TaskId:
        task = self.leased(node, **options)
        assert self.record(node, Started(task, 1)).started == (task,)
        return task

    def record(self, node: NodeId, *items: ReportItem) -> Recording:
        """What one frame changed; `refused` without the node, which is this one."""
        done = self.write(leases.record([(node, items)], self.now()))
        assert {refused for refused, _ in done.refused} <= {node}
        return replace(done, refused=tuple(hold for _, hold in done.refused))

    def expire(self, node: NodeId) -> Recording:
        return self.write(leases.expire(node, self.now()))

    def cancel(self, *wanted: TaskId, user: UserId | None = None) -> Recording:
        return self.write(tasks.cancel(wanted, user, self.now()))

    def view(self, task: TaskId) -> TaskView:
        found = self.read(tasks.task(task, None))
        assert found is not None
        return found
