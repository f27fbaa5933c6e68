"""Simulated consumers: submit, repeat unanswered requests under the same key, cancel, wait for results."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from gpool.core.errors import Unreachable
from gpool.core.ids import BatchId, TaskId, decode, encode
from gpool.server.actions.tasks import query, submit
from gpool.server.actions.tasks.repeated import WantedTasks
from gpool.server.server import Once, Server
from gpool.server.store.identity_values import Caller
from gpool.server.store.values import User
from gpool.testing.simulation import Dice, Trace, VirtualLoop
from gpool.testing.world.host import ServerHost
from gpool.testing.world.network import SimulatedNetwork
from gpool.testing.world.oracle import Oracle, mark_of
from gpool.wire.documents import FunctionDocument, TaskRequest

T = TypeVar("T")
MS = 1_000
PATIENCE_S = 5.0
"""Time after which a client repeats an unanswered request."""

FUNCTION_SHA256 = "f" * 64
Work = Callable[[Server], Coroutine[Any, Any, T]]


@dataclass(frozen=True, slots=True)
class ConsumerEnvironment:
    loop: VirtualLoop
    network: SimulatedNetwork
    host: ServerHost
    oracle: Oracle
    trace: Trace
    fail: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PlannedSubmission:
    name: str
    count: int
    request: TaskRequest
    once: Once | None
    at_us: int
    asks_twice: bool
    cancels: int  # number of its tasks to cancel
    cancels_all: bool
    closes_with: TaskRequest | None = None  # a second part of the same batch


def draw_submission(dice: Dice, name: str, until_us: int) -> PlannedSubmission:
    count = dice.pick((1, 1, 2, 4, 8, 16))
    keyed = dice.chance(0.85)
    splits = keyed and dice.chance(0.2)
    request = _request(dice, name, count).model_copy(update={"more": splits})
    rest = _request(dice, f"{name}+", dice.between(1, 3)) if splits else None
    return PlannedSubmission(
        name=name,
        count=tasks_in(request),
        request=request,
        once=Once(name, f"print of {name}") if keyed else None,
        at_us=dice.between(0, until_us),
        asks_twice=keyed and dice.chance(0.3),
        cancels=dice.between(1, 3) if dice.chance(0.35) else 0,
        cancels_all=dice.chance(0.15),
        closes_with=rest,
    )


def _request(dice: Dice, name: str, count: int) -> TaskRequest:
    common: dict[str, Any] = {
        "name": name,
        "gpu": dice.pick((None, None, None, 0.5, 0.5, 1, 2)),
        "cpus": dice.pick((0.5, 1.0, 2.0)),
        "memory": "1GB",
        "timeout_s": dice.pick((0.8, 2.0, 4.0)),
        "retries": dice.pick((0, 0, 1, 2)),
        "priority": dice.pick((0, 0, 0, 10, -10)),
    }
    if common["gpu"] in (1, 2):
        count = min(count, 4)  # they run one by one; more would outlast the run
    if common["gpu"] is None and dice.chance(0.3):
        common["vram"] = "6GB"
    if dice.chance(0.5):
        longest = dice.pick((100, 1000, 4000))
        if dice.chance(0.4):  # its checkpoint holds its progress as a number
            common |= {
                "checkpoint": "state/",
                "checkpoint_every_s": 1.0,
                "grace_s": dice.pick((0.0, 0.2, 1.5)),
                "retries": dice.pick((1, 3, 3)),
            }
        return TaskRequest(command=["work", str(longest)], copies=count, **common)
    calls: list[Any] = [base64.b64encode(f"{name}:{n}".encode()).decode() for n in range(count)]
    function = FunctionDocument(sha256=FUNCTION_SHA256, python="3.11")
    return TaskRequest(function=function, calls=calls, **common)


def draw_gang(dice: Dice, name: str, until_us: int) -> PlannedSubmission:
    nodes = dice.pick((2, 2, 3))
    request = TaskRequest(
        name=name,
        command=["work", str(dice.pick((100, 1000, 4000)))],
        copies=dice.pick((1, 1, 2)),
        nodes=nodes,
        engine=dice.pick(("none", "torchrun", "ray")),
        on_loss=dice.pick(("reform", "reform", "end")),
        preemptible=dice.chance(0.5),
        gpu=dice.pick((None, 0.5, 1)) if nodes == 2 else None,
        cpus=dice.pick((0.5, 1.0)),
        memory="1GB",
        timeout_s=dice.pick((2.0, 4.0)),
        retries=dice.pick((0, 1, 2)),
    )
    return PlannedSubmission(
        name=name,
        count=request.copies,
        request=request,
        once=Once(name, f"print of {name}"),
        at_us=dice.between(0, until_us),
        asks_twice=dice.chance(0.2),
        cancels=dice.between(0, 1) if dice.chance(0.3) else 0,
        cancels_all=False,
    )


def draw_endless(dice: Dice, name: str, until_us: int, count: int) -> list[PlannedSubmission]:
    """Tasks that run for longer than any run lasts, and are cancelled: the run ends only if each is stopped."""
    return [
        PlannedSubmission(
            name=f"{name}-e{number}",
            count=1,
            request=TaskRequest(
                name=f"{name}-e{number}",
                command=["work", "100000000"],
                cpus=0.1,
                memory="100MB",
                timeout_s=100_000.0,
                retries=9,
                priority=20,
            ),
            once=Once(f"{name}-e{number}", "endless"),
            at_us=dice.between(0, until_us),
            asks_twice=False,
            cancels=1,
            cancels_all=False,
        )
        for number in range(count)
    ]


def tasks_in(request: TaskRequest) -> int:
    return request.copies if request.calls is None else len(request.calls)


class Consumer:
    def __init__(self, around: ConsumerEnvironment, name: str, user: User, dice: Dice) -> None:
        self._around, self.name, self._dice = around, name, dice
        self._user = Caller(user, {})
        self.unfinished = 0

    async def live(self, submissions: list[PlannedSubmission]) -> None:
        self.unfinished = len(submissions)
        await asyncio.gather(*(self._pursue(planned) for planned in submissions))

    async def _pursue(self, planned: PlannedSubmission) -> None:
        await asyncio.sleep(planned.at_us / 1e6)
        try:
            await self._obtain(planned)
        except Unreachable:
            self._tell(
                "gives up", planned.name
            )  # it had no key: it cannot know, and does not ask twice
        self.unfinished -= 1

    async def _obtain(self, planned: PlannedSubmission) -> None:
        accepted = await self._submit(planned.name, planned.count, planned.request, planned.once)
        batch, tasks = accepted.batch, accepted.tasks
        if planned.closes_with is not None:
            rest = planned.closes_with.model_copy(update={"batch": encode("batch", batch)})
            once = Once(f"{planned.name}+", "the rest")
            more = await self._submit(f"{planned.name}+", tasks_in(rest), rest, once)
            if more.batch != batch:
                self._around.fail(f"{planned.name}+ went into another batch")
            tasks += more.tasks
        if planned.cancels or planned.cancels_all:
            await asyncio.sleep(self._dice.between(0, 3_000) / 1e3)
            await self._cancel(planned, batch, tasks)
        if planned.asks_twice:
            again = await self._persist(
                lambda s: submit.submit(s, self._user, WantedTasks(planned.request), planned.once)
            )
            if again.body != accepted.body:
                self._around.fail(f"{planned.name}: the same key was answered differently")
        await self._collect(batch, tasks)

    async def _submit(
        self, name: str, count: int, request: TaskRequest, once: Once | None
    ) -> submit.Accepted:
        self._around.oracle.submission_begins(name, count, request.nodes)

        def work(server: Server) -> Coroutine[Any, Any, submit.Accepted]:
            return submit.submit(server, self._user, WantedTasks(request), once)

        self._tell("submits", name, count)
        accepted = await (
            self._ask(work, repeatable=False) if once is None else self._persist(work)
        )
        self._tell("has", name, accepted.tasks)
        self._around.oracle.submission_acknowledged(name, accepted.tasks)
        return accepted

    async def _cancel(
        self, planned: PlannedSubmission, batch: BatchId, tasks: tuple[TaskId, ...]
    ) -> None:
        if planned.cancels_all:
            self._tell("cancels batch", batch)
            await self._persist(lambda s: query.cancel_batch(s, self._user, batch, None))
            unlucky = list(tasks)
        else:
            unlucky = self._dice.sample(tasks, min(planned.cancels, len(tasks)))
            for task in unlucky:
                self._tell("cancels", task)
                once = Once(f"cancel-{task}", "")
                await self._persist(partial(self._cancel_task, task, once))
        for task in unlucky:
            self._around.oracle.cancel_acknowledged(task)

    async def _collect(self, batch: BatchId, tasks: tuple[TaskId, ...]) -> None:
        after = 0
        missing = set(tasks)
        while missing:
            chunk = await self._persist(partial(self._read_results, batch, after))
            for line in chunk.splitlines():
                if not line.strip():
                    continue
                document = json.loads(line)
                after += 1
                if document["sequence"] != after:
                    self._around.fail(
                        f"{batch}: result {document['sequence']} came after {after - 1}"
                    )
                task = decode("task", document["id"])
                value = base64.b64decode(document.get("value", ""))
                mark = mark_of(value, document.get("error_text", ""))
                self._around.oracle.result_seen(task, document["status"], mark)
                missing.discard(TaskId(task))
        self._tell("is served", batch)

    async def _cancel_task(self, task: TaskId, once: Once, server: Server) -> None:
        await query.cancel_task(server, self._user, task, once)

    async def _read_results(self, batch: BatchId, after: int, server: Server) -> bytes:
        """The next request resumes after the first piece, as after a broken connection."""
        stream = await query.batch_results(server, self._user, batch, after)
        try:
            async for chunk in stream:
                return chunk
        finally:
            await stream.aclose()  # type: ignore[attr-defined]
        return b""

    # ---- the network

    async def _persist(self, work: Work[T]) -> T:
        pause_s = 0.05
        while True:
            try:
                return await self._ask(work, repeatable=True)
            except Unreachable:
                await asyncio.sleep(pause_s * (0.5 + self._dice.random()))
                pause_s = min(2 * pause_s, 1.0)

    async def _ask(self, work: Work[T], *, repeatable: bool) -> T:
        network, dice, conditions = (
            self._around.network,
            self._dice,
            self._around.network.conditions,
        )
        await asyncio.sleep(network.latency_us() / 1e6)
        if dice.chance(conditions.request_lost):
            raise await self._silence("the request was lost")
        answer = self._deliver(work)
        if repeatable and dice.chance(conditions.request_repeated):
            late_us = dice.between(0, dice.pick((3, 3, 2_000)) * MS)
            self._around.loop.after_us(late_us, self._deliver_again, work)
        try:
            value = await asyncio.wait_for(asyncio.shield(answer), PATIENCE_S)  # noqa: TID251
        except TimeoutError:
            raise Unreachable("no answer in time") from None
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if me is None or me.cancelling() or not answer.cancelled():
                raise
            raise await self._silence("the server died") from None
        if dice.chance(conditions.answer_lost):
            raise await self._silence("the answer was lost")
        await asyncio.sleep(network.latency_us() / 1e6)
        return value

    def _deliver(self, work: Work[T]) -> asyncio.Task[T]:
        process = self._around.host.serving()
        if process is None:
            raise Unreachable("nobody listens")
        return process.spawn(work(process.server))

    def _deliver_again(self, work: Work[T]) -> None:
        process = self._around.host.serving()
        if process is not None:
            self._tell("is repeated")
            process.spawn(work(process.server))

    async def _silence(self, why: str) -> Unreachable:
        await asyncio.sleep(self._dice.between(10, 1_000) / 1e3)
        return Unreachable(why)

    def _tell(self, what: str, *details: object) -> None:
        self._around.trace.say(self.name, what, *details)
