"""Keeps the warm sandboxes that the pool wants: prepares them, hands each out once, ends the rest. Decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import assert_never

import structlog

from gpool.agent.running.sandboxes import Environments, Warmed, started
from gpool.agent.runtime.protocol import RunnerJob, Runtime, RuntimeAbility, SandboxFailed
from gpool.agent.state_machine.warm_plan import Discard, Prepare, WarmKey, WarmPool, room_for_warm
from gpool.core.errors import GpoolError
from gpool.core.model import Offer

LOOK_EVERY_S = 5.0
REFILL_AFTER_S = 0.25  # whoever asked comes first
MOST_CPU_MILLI = 500  # while it imports: the processors are for tasks

log = structlog.get_logger(__name__)


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that could be had without taking them from anybody."""
    for line in meminfo.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return 0


class WarmKeeper:
    """`keep` runs for as long as the agent does; whatever is still warm then is ended."""

    def __init__(
        self,
        runtimes: Sequence[Runtime],
        environments: Environments | None,
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
        self._ready: dict[int, Warmed] = {}
        self._tending: dict[int, asyncio.Task[None]] = {}  # preparing, then watching, one an entry
        self._ending: set[asyncio.Task[None]] = set()  # not to be disturbed any more
        self._wake = asyncio.Event()

    # ---- told by others

    def take(self, key: WarmKey) -> Warmed | None:
        """A sandbox for work with this key, yours from now on; None: start one. Either way more may be prepared."""
        asyncio.get_running_loop().call_later(REFILL_AFTER_S, self._wake.set)
        number = self._pool.ask(self._clock(), key)
        if number is None:
            return None
        self._tending.pop(number).cancel()
        return self._ready.pop(number)

    def offered(self, offer: Offer) -> None:
        """What the owner lends now; of a machine that is closed, nothing."""
        self._offered_bytes = 0 if offer.closed else offer.memory_bytes
        self._wake.set()

    def lease_began(self, holder: object, memory_bytes: int) -> None:
        """Memory that was idle is somebody's now: the pool gives way."""
        self._leased[holder] = memory_bytes
        if self._pool.entries:
            self._wake.set()

    def lease_ended(self, holder: object) -> None:
        if self._leased.pop(holder, None) is not None and self._pool.demands:
            self._wake.set()

    # ---- keeping

    async def keep(self) -> None:
        try:
            while True:
                self._wake.clear()
                self._settle()
                timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._wake.set)
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
                    self._tending[order.number] = asyncio.create_task(self._tend(order))
                case Discard():
                    self._let_end(order.number).cancel()
                case _:
                    assert_never(order)

    async def _tend(self, order: Prepare) -> None:
        """Prepares one and watches over it, until it ends or is handed out."""
        number = order.number
        try:
            warmed = await self._make(order)
        except (SandboxFailed, GpoolError, OSError) as error:
            log.info("not_warmed", preload=order.key.preload, why=str(error))
            self._tending.pop(number, None)
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
            self._let_end(number)
            self._pool.gone(number)
        except asyncio.CancelledError:
            if number not in self._ready:
                return  # handed out
        del self._ready[number]
        await warmed.remove()
        self._pool.gone(number)
        self._wake.set()

    def _let_end(self, number: int) -> asyncio.Task[None]:
        task = self._tending.pop(number)
        self._ending.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("warm_sandbox_not_removed", exc_info=error)

    async def _make(self, order: Prepare) -> Warmed:
        key = order.key
        runtime = self._warming[key.runtime]
        async with contextlib.AsyncExitStack() as stack:
            environment = None
            if key.environment is not None:
                if self._environments is None:
                    raise SandboxFailed(f"this node has no environment {key.environment[0]!r}")
                making = self._environments.prepare(*key.environment, _unheard)
                environment = await stack.enter_async_context(making)
            job = RunnerJob(
                key.python, (), key.slices, key.limits, environment, preload=key.preload
            )
            meanwhile = replace(
                key.limits,
                cpu_milli=min(MOST_CPU_MILLI, key.limits.cpu_milli),
                memory_bytes=order.most_bytes,
            )
            sandbox = await started(runtime, runtime.warm_runner(job, meanwhile))
            if not sandbox.forks:
                await sandbox.remove()
                raise SandboxFailed("one of its modules takes hold of a GPU when it is imported")
            return Warmed(sandbox, stack.pop_all())

    async def _end_all(self) -> None:
        for number in list(self._tending):
            self._let_end(number).cancel()
        if self._ending:
            await asyncio.wait(list(self._ending))


def _unheard(line: str) -> None:
    """What is built before anybody asked for it is told to nobody."""
