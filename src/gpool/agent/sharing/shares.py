"""GPU shares of this machine: begin and end tenancies, one after another on each card. `plan` decides.

A tenancy begins with its first sandbox and outlives the last one briefly, so that consecutive tasks of one user find
daemon, instance and memory as they were; another user's task ends it at once. Its end: stop the MPS daemon, overwrite
and check the memory, remove the instance, restore the settings. A card whose memory could not be cleaned takes no other
user: `unclean` says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import TypeVar

import structlog

from gpool.agent.machine.nvml import NotPermitted, Nvml, NvmlError
from gpool.agent.runtime.devices import CONTROL_NODES, capability_nodes, device_nodes
from gpool.agent.runtime.protocol import GpuShare, PartFailed, Runtime, SandboxFailed
from gpool.agent.sharing import modes, plan
from gpool.agent.sharing.memory import Watchdog, Watched, fault, scrub
from gpool.agent.sharing.modes import INSIDE, SOCKET, MpsDaemon, MpsPrograms
from gpool.agent.sharing.plan import Tenancy
from gpool.core.model import MIB, Gpu, Sharing, Slice

LINGER_S = 3.0
ONE_PROCESS = "exclusive_process"
OWN = "GPOOL_GPU_OWN"  # read by runner/forking.py: the GPU's memory is the sandbox's alone
IN_USE = "in use"
TRIES, AGAIN_S = 30, 0.1
FREE_WITHIN_S = 10.0  # longer than a scrub takes
AGAIN_AFTER_S = 30.0

T = TypeVar("T")

log = structlog.get_logger(__name__)


class _ActiveTenancy:
    """Tenancy in progress."""

    __slots__ = ("daemon", "held", "instance", "leaving", "tenancy")

    def __init__(self, tenancy: Tenancy) -> None:
        self.tenancy = tenancy
        self.held: list[Slice] = []
        self.instance: modes.Instance | None = None
        self.daemon: MpsDaemon | None = None
        self.leaving: asyncio.Task[None] | None = None


class GpuShares:
    """`sandboxes` runs the scrubber; None: memory is not cleaned, and only the owner's tasks run."""

    def __init__(
        self,
        nvml: Nvml,
        sandboxes: Runtime | None,
        records: modes.Records,
        *,
        mps: MpsPrograms | None = None,
        shared_uid: Callable[[int], int | None] = lambda _: None,
        nodes_of: modes.NodesOf = capability_nodes,
        linger_s: float = LINGER_S,
        free_within_s: float = FREE_WITHIN_S,
    ) -> None:
        self._nvml = nvml
        self._sandboxes = sandboxes
        self._records = records
        self._mps = mps
        self._shared_uid = shared_uid
        self._nodes_of = nodes_of
        self._linger_s = linger_s
        self._free_within_s = free_within_s
        self._gpus: dict[int, Gpu] = {}
        self._houses: dict[Tenancy, _ActiveTenancy] = {}
        self._before: dict[str, modes.CardSettings] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._watchdog = Watchdog(nvml.processes)
        self._retrying: set[asyncio.Task[None]] = set()
        self.unclean: dict[str, str] = {}
        """By uuid: why a card takes nobody new."""

    def use_gpus(self, gpus: Sequence[Gpu]) -> None:
        self._gpus = {gpu.index: gpu for gpu in gpus}

    @property
    def tenancies(self) -> frozenset[Tenancy]:
        return frozenset(self._houses)

    async def start(self) -> None:
        """Restore and clean cards that an earlier agent left in use."""
        left = list(self._records.left())
        await asyncio.to_thread(modes.recover, self._nvml, self._records)
        if self._mps is not None:
            await asyncio.to_thread(shutil.rmtree, self._mps.folder, ignore_errors=True)
        for uuid, settings in left:
            self._records.keep(uuid, settings)  # kept until the card is clean
            self._set_aside(uuid, "an agent ended before it had cleaned it", first_s=0.0)

    async def close(self) -> None:
        for house in list(self._houses.values()):
            if house.leaving is not None:
                house.leaving.cancel()
            async with self._lock(house.tenancy.gpu):
                await self._end(house)
        await self._watchdog.close()
        for task in self._retrying:
            task.cancel()
        if self._retrying:
            await asyncio.wait(list(self._retrying))
        if self._mps is not None:
            await self._mps.launcher.close()

    def settings_before(self, uuid: str) -> modes.CardSettings | None:
        return self._before.get(uuid)

    # ---- interface

    @contextlib.asynccontextmanager
    async def seat(self, user: int, slices: Sequence[Slice], /) -> AsyncIterator[GpuShare | None]:
        real = [
            (self._gpus[part.gpu_index], part) for part in slices if self._is_real(part.gpu_index)
        ]
        if not real:
            yield None
            return
        async with contextlib.AsyncExitStack() as stack:
            houses = []
            for gpu, part in real:
                house = await self._enter(gpu, part, user)
                stack.callback(self._let_go, house, part)
                houses.append(house)
            seat = self._furnish(houses, real)
            for house, (gpu, part) in zip(houses, real, strict=True):
                if house.tenancy.mode in plan.SOFT:
                    watched = Watched(gpu.uuid, part.memory_bytes, seat)
                    self._watchdog.begin(watched)
                    stack.callback(self._watchdog.end, watched)
            yield seat

    def _is_real(self, index: int) -> bool:
        gpu = self._gpus.get(index)
        return gpu is not None and not gpu.simulated and gpu.vendor == "nvidia"

    # ---- sandboxes join and leave

    async def _enter(self, gpu: Gpu, part: Slice, user: int) -> _ActiveTenancy:
        wanted = plan.tenancy_of(gpu, part, user)
        async with self._lock(gpu.uuid):
            for other in plan.conflicts(self._houses, wanted):
                house = self._houses[other]
                if house.held:
                    raise PartFailed(f"GPU {gpu.index} is still in use ({other.mode.value})")
                await undisturbed(self._end(house))
            if gpu.uuid in self.unclean:
                raise PartFailed(f"GPU {gpu.index} is not clean: {self.unclean[gpu.uuid]}")
            known = self._houses.get(wanted)
            try:
                house = known if known is not None else await undisturbed(self._begin(wanted))
            except asyncio.CancelledError:
                if wanted in self._houses:  # begun, but its sandbox is gone
                    self._leave_empty(self._houses[wanted])
                raise
            if house.leaving is not None:
                house.leaving.cancel()
                house.leaving = None
            house.held.append(part)
            if house.daemon is not None:
                try:
                    await house.daemon.limit(plan.mps_limits(house.held))
                except BaseException:
                    self._let_go(house, part)
                    raise
            return house

    def _let_go(self, house: _ActiveTenancy, part: Slice) -> None:
        house.held.remove(part)
        self._leave_empty(house)

    def _leave_empty(self, house: _ActiveTenancy) -> None:
        if not house.held and house.leaving is None:
            house.leaving = asyncio.create_task(self._end_later(house))

    async def _end_later(self, house: _ActiveTenancy) -> None:
        await asyncio.sleep(self._linger_s)
        async with self._lock(house.tenancy.gpu):
            if not house.held:
                house.leaving = None
                await self._end(house)

    def _lock(self, uuid: str) -> asyncio.Lock:
        return self._locks.setdefault(uuid, asyncio.Lock())

    # ---- begin of a tenancy

    async def _begin(self, wanted: Tenancy) -> _ActiveTenancy:
        house = _ActiveTenancy(wanted)
        self._houses[wanted] = house
        try:
            await patiently(lambda: self._prepare(house))
            if wanted.mode is Sharing.MPS:
                await self._start_mps(house)
        except (NvmlError, SandboxFailed) as error:
            await self._end(house, used=False)
            raise PartFailed(f"the GPU could not be prepared: {error}") from error
        except BaseException:  # our own fault: restore the card
            await self._end(house, used=False)
            raise
        return house

    def _prepare(self, house: _ActiveTenancy) -> None:
        wanted = house.tenancy
        if wanted.gpu not in self._before:
            settings = modes.record(self._nvml, wanted.gpu)
            self._records.keep(wanted.gpu, settings)
            self._before[wanted.gpu] = settings
        if wanted.mode is Sharing.MIG:
            house.instance = modes.make(self._nvml, wanted, self._nodes_of)
        elif self._nvml.card(wanted.gpu).mig:
            self._nvml.set_mig(wanted.gpu, False)

    async def _start_mps(self, house: _ActiveTenancy) -> None:
        if self._mps is None:
            raise SandboxFailed("this node has no MPS")
        gpu = house.tenancy.gpu
        blocking = await blocking_process(self._nvml, gpu, self._free_within_s)
        with contextlib.suppress(NotPermitted):  # the watchdog still catches evaders of MPS
            await asyncio.to_thread(self._nvml.set_compute_mode, gpu, ONE_PROCESS)
            if blocking:
                raise SandboxFailed(f"process {blocking} of another program uses the GPU")
        index = next((one.index for one in self._gpus.values() if one.uuid == gpu), 0)
        house.daemon = MpsDaemon(self._mps, gpu, self._shared_uid(index))
        await house.daemon.start()

    # ---- end of a tenancy

    async def _end(self, house: _ActiveTenancy, *, used: bool = True) -> None:
        tenancy = house.tenancy
        gpu = tenancy.gpu
        why = ""
        try:
            if house.daemon is not None:
                await house.daemon.stop()
                await asyncio.to_thread(self._restore_mode, gpu)
            if used:
                why = await self._clean(gpu, self._whole_seat(house))
            if house.instance is not None:
                made = house.instance.made
                await patiently(lambda: self._nvml.unmake_mig(gpu, made.id))
        except (NvmlError, SandboxFailed) as error:
            why = why or str(error)
        self._houses.pop(tenancy, None)
        if not any(other.gpu == gpu for other in self._houses):
            why = await self._restore(gpu) or why
            if not why and gpu not in self.unclean:
                self._records.drop(gpu)
        if why:
            self._set_aside(gpu, why)
        else:
            log.info("tenancy_ended", gpu=gpu, mode=tenancy.mode.value)

    async def _clean(self, gpu: str, seat: GpuShare) -> str:
        """Reason if unclean, else empty."""
        if self._sandboxes is None:
            return ""
        told = await scrub(self._sandboxes, seat)
        why = fault(told)
        log.info("gpu_scrubbed", gpu=gpu, bytes=told.scrubbed, why=why)
        return f"its memory could not be cleaned: {why}" if why else ""

    def _set_aside(self, gpu: str, why: str, first_s: float = AGAIN_AFTER_S) -> None:
        log.error("gpu_unclean", gpu=gpu, why=why)
        is_known, self.unclean[gpu] = gpu in self.unclean, why
        if is_known:
            return
        task = asyncio.create_task(self._clean_after_all(gpu, first_s))
        self._retrying.add(task)
        task.add_done_callback(self._retrying.discard)

    async def _clean_after_all(self, gpu: str, pause_s: float) -> None:
        while True:
            await asyncio.sleep(pause_s)
            pause_s = AGAIN_AFTER_S
            async with self._lock(gpu):
                if any(other.gpu == gpu for other in self._houses):
                    continue  # other instances of the card are in use
                why = await self._restore(gpu)
                why = why or await self._clean(gpu, self._card_seat(gpu))
                if not why:
                    self._records.drop(gpu)
                    self.unclean.pop(gpu, None)
                    return
                self.unclean[gpu] = why

    def _restore_mode(self, gpu: str) -> None:
        before = self._before.get(gpu)
        with contextlib.suppress(NotPermitted):
            if before is not None:
                self._nvml.set_compute_mode(gpu, before.compute_mode)

    async def _restore(self, gpu: str) -> str:
        """Reason for a failure, else empty."""
        before = self._before.get(gpu)
        if before is None:
            return ""
        try:
            changed = await patiently(lambda: modes.restore(self._nvml, gpu, before))
        except NvmlError as error:
            return f"it could not be set back: {error}"
        self._before.pop(gpu, None)
        if changed:
            log.info("card_restored", gpu=gpu, changed=changed)
        return ""

    # ---- the share of a sandbox

    def _furnish(
        self, houses: Sequence[_ActiveTenancy], real: Sequence[tuple[Gpu, Slice]]
    ) -> GpuShare:
        nodes: list[str] = []
        visible: list[str] = []
        more: list[tuple[str, str]] = []
        binds: list[tuple[str, Path]] = []
        for house, (_, part) in zip(houses, real, strict=True):
            whole = self._whole_seat(house)
            nodes += whole.nodes
            visible += [value for _, value in whole.variables]
            if house.daemon is not None:
                binds.append((f"{INSIDE}/{SOCKET}", house.daemon.socket))
                more += mps_variables(part)
        if not any(house.tenancy.mode in plan.SOFT for house in houses):
            more.append((OWN, "1"))
        return GpuShare(
            tuple(dict.fromkeys(nodes)),
            (("CUDA_VISIBLE_DEVICES", ",".join(visible)), *more),
            tuple(binds),
        )

    def _whole_seat(self, house: _ActiveTenancy) -> GpuShare:
        if house.instance is None:
            return self._card_seat(house.tenancy.gpu)
        nodes = self._card_seat(house.tenancy.gpu).nodes
        made = house.instance.made
        return GpuShare((*nodes, *house.instance.nodes), (("CUDA_VISIBLE_DEVICES", made.uuid),))

    def _card_seat(self, uuid: str) -> GpuShare:
        card = [gpu for gpu in self._gpus.values() if gpu.uuid == uuid]
        return GpuShare(device_nodes(card) or CONTROL_NODES, (("CUDA_VISIBLE_DEVICES", uuid),))


async def undisturbed(work: Coroutine[object, object, T]) -> T:
    """Finish despite cancellation: half of it would leave a card in an unknown state."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def blocking_process(nvml: Nvml, gpu: str, within_s: float) -> int:
    """Wait for processes that compute on the card, such as the scrubber of an agent that is being stopped: beside one, the
    server of MPS cannot open a card in exclusive mode, and the task would fail. Return the pid of one that stays, or 0.
    """
    pid = 0
    for _ in range(max(1, round(within_s / AGAIN_S))):
        there = await asyncio.to_thread(nvml.processes, gpu)
        pid = next((one.pid for one in there if one.computes), 0)
        if not pid:
            break
        await asyncio.sleep(AGAIN_S)
    return pid


async def patiently(call: Callable[[], T]) -> T:
    """Retry in a thread: a card counts a process as a user for a moment after its end."""
    for _ in range(TRIES):
        try:
            return await asyncio.to_thread(call)
        except NvmlError as error:
            if IN_USE not in str(error).lower():
                raise
            await asyncio.sleep(AGAIN_S)
    return await asyncio.to_thread(call)


def mps_variables(part: Slice) -> list[tuple[str, str]]:
    """A client can only lower the server's limits."""
    return [
        ("CUDA_MPS_PIPE_DIRECTORY", INSIDE),
        ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", f"0={max(1, part.memory_bytes // MIB)}M"),
        ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", str(plan.percentage(part))),
    ]
