"""The manager of warm sandboxes: prepares and ends them as `warm_plan` decides, hands each out once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import assert_never

import structlog

from gpool.agent.running.sandboxes import EnvironmentProvider, WarmedSandbox, start_sandbox
from gpool.agent.runtime.protocol import RunnerJob, Runtime, RuntimeAbility, SandboxFailed
from gpool.agent.state_machine.warm_plan import Discard, Prepare, WarmKey, WarmPool, room_for_warm
from gpool.core.errors import GpoolError
from gpool.core.model import Offer

SETTLE_EVERY_S = 5.0
REFILL_AFTER_S = 0.25  # the sandbox just asked for starts first
MOST_CPU_MILLI = 500  # during the imports: the processors are for tasks

log = structlog.get_logger(__name__)


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    for line in meminfo.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return 0


class WarmPoolManager:
    def __init__(
        self,
        runtimes: Sequence[Runtime],
        environments: EnvironmentProvider | None,
        clock: Callable[[], int],
        available: Callable[[], int] = available_memory,
    ) -> None:
        self._warming = {
            one.name: one for one in runtimes if RuntimeAbility.WARM_RUNNERS in one.abilities
        }
        self._environments = environments
        self._clock = clock
        self._available = available
        self._pool = WarmPool()
        self._offered_bytes = 0
        self._leased: dict[object, int] = {}
        self._ready: dict[int, WarmedSandbox] = {}
        self._tasks: dict[
            int, asyncio.Task[None]
        ] = {}  # one per entry: prepares it, then waits for its end
        self._ending: set[asyncio.Task[None]] = set()  # not to be cancelled again
        self._wake = asyncio.Event()

    # ---- called by executors and the daemon

    def take(self, key: WarmKey) -> WarmedSandbox | None:
        """None: start one. Another may be prepared either way."""
        asyncio.get_running_loop().call_later(REFILL_AFTER_S, self._wake.set)
        number = self._pool.ask(self._clock(), key)
        if number is None:
            return None
        self._tasks.pop(number).cancel()
        return self._ready.pop(number)

    def offered(self, offer: Offer) -> None:
        self._offered_bytes = 0 if offer.closed else offer.memory_bytes
        self._wake.set()

    def lease_began(self, holder: object, memory_bytes: int) -> None:
        self._leased[holder] = memory_bytes
        if self._pool.entries:
            self._wake.set()

    def lease_ended(self, holder: object) -> None:
        if self._leased.pop(holder, None) is not None and self._pool.demands:
            self._wake.set()

    # ---- the loop

    async def run(self) -> None:
        try:
            while True:
                self._wake.clear()
                self._settle()
                timer = asyncio.get_running_loop().call_later(SETTLE_EVERY_S, self._wake.set)
                await self._wake.wait()
                timer.cancel()
        finally:
            await self._end_all()

    def _settle(self) -> None:
        held = self._pool.bytes_held
        leased = sum(self._leased.values())
        room = room_for_warm(self._offered_bytes, leased, self._available(), held)
        for order in self._pool.settle(self._clock(), room):
            match order:
                case Prepare():
                    self._tasks[order.number] = asyncio.create_task(self._prepare(order))
                case Discard():
                    self._detach(order.number).cancel()
                case _:
                    assert_never(order)

    async def _prepare(self, order: Prepare) -> None:
        number = order.number
        try:
            warmed = await self._make(order)
        except (SandboxFailed, GpoolError, OSError) as error:
            log.info("not_warmed", preload=order.key.preload, why=str(error))
            self._tasks.pop(number, None)
            self._pool.failed(self._clock(), number)
            return
        except asyncio.CancelledError:
            self._pool.gone(number)
            self._wake.set()
            raise
        used = warmed.sandbox.memory_used()
        self._pool.prepared(number, used)
        log.info("warmed", preload=order.key.preload, environment=order.key.environment, bytes=used)
        self._ready[number] = warmed
        self._wake.set()
        try:
            await warmed.sandbox.ended()
            self._detach(number)
            self._pool.gone(number)
        except asyncio.CancelledError:
            if number not in self._ready:
                return  # handed out
        del self._ready[number]
        await warmed.remove()
        self._pool.gone(number)
        self._wake.set()

    def _detach(self, number: int) -> asyncio.Task[None]:
        task = self._tasks.pop(number)
        self._ending.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("warm_sandbox_not_removed", exc_info=error)

    async def _make(self, order: Prepare) -> WarmedSandbox:
        key = order.key
        runtime = self._warming[key.runtime]
        async with contextlib.AsyncExitStack() as stack:
            environment = None
            if key.environment is not None:
                if self._environments is None:
                    raise SandboxFailed(f"this node has no environment {key.environment[0]!r}")
                making = self._environments.prepare(*key.environment, _unheard, None)
                environment = await stack.enter_async_context(making)
            job = RunnerJob(
                key.python, (), key.slices, key.limits, environment, preload=key.preload
            )
            meanwhile = replace(
                key.limits,
                cpu_milli=min(MOST_CPU_MILLI, key.limits.cpu_milli),
                memory_bytes=order.most_bytes,
            )
            sandbox = await start_sandbox(runtime, runtime.warm_runner(job, meanwhile))
            if not sandbox.forks:
                await sandbox.remove()
                raise SandboxFailed("one of its modules opens a GPU when it is imported")
            return WarmedSandbox(sandbox, stack.pop_all())

    async def _end_all(self) -> None:
        for number in list(self._tasks):
            self._detach(number).cancel()
        if self._ending:
            await asyncio.wait(list(self._ending))


def _unheard(line: str) -> None:
    """No task has asked for this environment yet."""
