"""Shares of AMD and Intel GPUs: each card whole, one sandbox at a time, and passed on only when nothing of the last one holds it.

The kernel's driver clears the memory that a process gets (decision 0021); gpool waits until the last process is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import structlog

from gpool.agent.machine.drm import DRM_VENDORS, DrmCards, bus_of
from gpool.agent.machine.nvml import GpuProcess, NvmlError
from gpool.agent.runtime.devices import drm_variables
from gpool.agent.runtime.protocol import GpuShare, PartFailed
from gpool.agent.sharing.memory import Watchdog, Watched
from gpool.core.model import Gpu, Slice

DRAINED_WITHIN_S = 10.0
LOOK_EVERY_S = 0.1
WATCH_EVERY_S = 1.0
"""Each look walks over the descriptors of all processes of the host."""
AGAIN_AFTER_S = 30.0

log = structlog.get_logger(__name__)


class DrmShares:
    """`is_ours` tests whether a pid is a process of this agent's sandboxes."""

    def __init__(
        self,
        cards: DrmCards,
        is_ours: Callable[[int], bool],
        *,
        drained_within_s: float = DRAINED_WITHIN_S,
        again_after_s: float = AGAIN_AFTER_S,
    ) -> None:
        self._cards = cards
        self._is_ours = is_ours
        self._drained_within_s = drained_within_s
        self._again_after_s = again_after_s
        self._gpus: dict[int, Gpu] = {}
        self._held: set[str] = set()
        self._watchdog = Watchdog(self._processes, WATCH_EVERY_S)
        self._draining: set[asyncio.Task[None]] = set()
        self.unclean: dict[str, str] = {}
        """By uuid: why a card takes nobody new."""

    def use_gpus(self, gpus: Sequence[Gpu]) -> None:
        real = [gpu for gpu in gpus if gpu.vendor in DRM_VENDORS and not gpu.simulated]
        self._gpus = {gpu.index: gpu for gpu in real}

    async def start(self) -> None:
        """Wait for processes that an earlier agent's sandboxes left: they die with it."""
        for gpu in self._gpus.values():
            self._drain_later(gpu, 0.0)

    async def close(self) -> None:
        await self._watchdog.close()
        for task in self._draining:
            task.cancel()
        if self._draining:
            await asyncio.wait(list(self._draining))

    @contextlib.asynccontextmanager
    async def seat(
        self, slices: Sequence[Slice], share: GpuShare | None = None
    ) -> AsyncIterator[GpuShare | None]:
        """Add the AMD and Intel GPUs to `share`, or to a new one. `share` itself without such a GPU. Raises `PartFailed`.

        Even the same user's next task gets a card without the last one's processes.
        """
        gpus = [self._gpus[part.gpu_index] for part in slices if part.gpu_index in self._gpus]
        if not gpus:
            yield share
            return
        async with contextlib.AsyncExitStack() as stack:
            for gpu in gpus:
                await self._enter(gpu)
                stack.callback(self._leave, gpu)
            share = share if share is not None else GpuShare()
            share.add(await asyncio.to_thread(self._nodes, gpus), _variables(gpus))
            for gpu in gpus:
                watched = Watched(gpu.uuid, gpu.memory_bytes, share)
                self._watchdog.begin(watched)
                stack.callback(self._watchdog.end, watched)
            yield share

    async def _enter(self, gpu: Gpu) -> None:
        if gpu.uuid in self._held:
            raise PartFailed(f"GPU {gpu.index} is still in use")
        self._held.add(gpu.uuid)
        try:
            why = self.unclean.get(gpu.uuid) or await self._drained(gpu)
        except BaseException:
            self._held.discard(gpu.uuid)
            raise
        if why:
            self._held.discard(gpu.uuid)
            if gpu.uuid not in self.unclean:
                self._set_aside(gpu, why)
            raise PartFailed(f"GPU {gpu.index} is not free: {why}")

    def _leave(self, gpu: Gpu) -> None:
        self._held.discard(gpu.uuid)

    async def _drained(self, gpu: Gpu) -> str:
        """Wait until no process of a sandbox holds the card. Return why it does not end; empty once it has."""
        left: tuple[int, ...] = ()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drained_within_s):
                while True:
                    try:
                        left = await asyncio.to_thread(self._left, gpu)
                    except NvmlError as error:
                        return str(error)
                    if not left:
                        return ""
                    await asyncio.sleep(LOOK_EVERY_S)
        return f"the driver has not released process {left[0]} of the last task: reset the card"

    def _left(self, gpu: Gpu) -> tuple[int, ...]:
        """Processes of ended sandboxes, and ended processes whose memory the driver still holds."""
        return tuple(
            process.pid
            for process in self._cards.processes(gpu)
            if not self._cards.is_running(process.pid) or self._is_ours(process.pid)
        )

    def _set_aside(self, gpu: Gpu, why: str) -> None:
        log.error("gpu_unclean", gpu=gpu.uuid, why=why)
        self.unclean[gpu.uuid] = why
        self._drain_later(gpu, self._again_after_s)

    def _drain_later(self, gpu: Gpu, pause_s: float) -> None:
        task = asyncio.create_task(self._drain_after_all(gpu, pause_s))
        self._draining.add(task)
        task.add_done_callback(self._draining.discard)

    async def _drain_after_all(self, gpu: Gpu, pause_s: float) -> None:
        while True:
            await asyncio.sleep(pause_s)
            pause_s = self._again_after_s
            if gpu.uuid in self._held:
                return
            why = await self._drained(gpu)
            if not why:
                self.unclean.pop(gpu.uuid, None)
                return
            self.unclean[gpu.uuid] = why

    def _processes(self, uuid: str) -> tuple[GpuProcess, ...]:
        for gpu in self._gpus.values():
            if gpu.uuid == uuid:
                return self._cards.processes(gpu)
        return ()

    def _nodes(self, gpus: Sequence[Gpu]) -> tuple[str, ...]:
        found = self._cards.found()
        nodes: list[str] = []
        for gpu in gpus:
            card = found.get(bus_of(gpu))
            if card is None:
                raise PartFailed(f"GPU {gpu.index} has no render node any more")
            nodes += self._cards.nodes(card)
        return tuple(dict.fromkeys(nodes))


def _variables(gpus: Sequence[Gpu]) -> tuple[tuple[str, str], ...]:
    """Numbers from 0: a sandbox can open no other card."""
    found: list[tuple[str, str]] = []
    for vendor in sorted({gpu.vendor for gpu in gpus}):
        count = sum(gpu.vendor == vendor for gpu in gpus)
        found += drm_variables(vendor, range(count))
    return tuple(found)
