"""Holds trials of GPUs: begins them, keeps their time, asks, judges. The theory and the rules are `core.gpuproof`.

GPUs that could be one device under two names sit together. A GPU under trial is kept back from the scheduler, before its first
trial too; one that is late may try again, one that was wrong stays out until it joins again or an operator lets it in.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random, SystemRandom
from typing import TYPE_CHECKING, TypeVar

import msgspec

from gpool.core.ids import NodeId
from gpool.core.model import Gpu, Instant, Span
from gpool.core.specs.gpu import is_model
from gpool.core.trust.gpu_verification import (
    MAKES,
    DeviceIdentity,
    GpuVerdict,
    Opening,
    VerificationKeys,
    VerificationTerms,
    VerifiedGpu,
    could_be_one,
    keys_of,
    may_ask,
    terms_for,
)
from gpool.server.gpu_verification.checking import Claimed, check_openings
from gpool.server.settings import Settings, span
from gpool.server.store.operations.nodes import gpu_verification
from gpool.server.store.operations.nodes.gpu_verification import Record
from gpool.server.store.protocol import Operation, Store
from gpool.server.store.values import NodeRow
from gpool.server.wakeups import Wake
from gpool.wire.frames import (
    AnswerNow,
    ExamineGpu,
    FromGpu,
    GpuAnswered,
    GpuCommitted,
    GpuJudged,
    GpuMeasured,
    GpuOpened,
    GpuUnable,
    MeasureGpu,
    OpenTiles,
    ToGpu,
)

if TYPE_CHECKING:
    from gpool.server.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)
T = TypeVar("T")

WAITS = "it has not proved yet what it claims; its trial comes"
TRIES = 3
AGAIN_AFTER = Span(600_000_000)
"""A GPU that failed may be tried again when its node joins again, not sooner."""
LOOK_EVERY = Span(5_000_000)
MEASURED_WITHIN = Span(60_000_000)
"""A trial waits no longer for a measurement."""


def terms_of(gpu: Gpu) -> VerificationTerms | None:
    """What a GPU is asked; None: of this make there is nothing to ask."""
    makes = [name for name in MAKES if is_model(name, gpu.model)]
    if gpu.vendor != "nvidia" or not makes:
        return None
    return terms_for(gpu.memory_bytes, MAKES[max(makes, key=len)])  # H100PCIE before H100


@dataclass(frozen=True, slots=True)
class Examining:
    """What the operator wants."""

    examine: bool
    measure: bool
    again_every: Span
    terms: Callable[[Gpu], VerificationTerms | None] = terms_of

    @classmethod
    def of(cls, settings: Settings) -> Examining:
        return cls(settings.examine_gpus, settings.measure_gpus, span(settings.reexamine_s))


@dataclass(slots=True)
class _Trial:
    number: int
    node: NodeId
    uuid: str
    keys: VerificationKeys
    seat: VerifiedGpu
    nonce: bytes = b""
    tiles: tuple[int, ...] = ()
    checking: bool = False


@dataclass(frozen=True, slots=True)
class _Candidate:
    record: Record
    place: DeviceIdentity
    terms: VerificationTerms


class Examiner:
    def __init__(
        self,
        store: Store,
        scheduler: Scheduler,
        now: Callable[[], Instant],
        wanted: Examining,
        dice: Random | None = None,
    ) -> None:
        self.wake = Wake()
        self._store, self._scheduler, self._now, self._wanted = store, scheduler, now, wanted
        self._dice = dice if dice is not None else SystemRandom()
        self._sittings: list[dict[int, _Trial]] = []
        self._number = 0
        self._late: dict[tuple[NodeId, str], int] = {}
        self._measuring: dict[tuple[NodeId, str], Instant] = {}  # since when
        self._measured: set[tuple[NodeId, str]] = set()  # or unable; asked once in a connection
        self._looked_at = Instant(0)

    @property
    def examines(self) -> bool:
        """Whether `admit` takes time."""
        return self._wanted.examine

    async def admit(self, row: NodeRow) -> NodeRow:
        """A node said what it lends: what is to be examined is kept back before anything can be placed there."""
        node = row.node.id
        self._measuring = {key: at for key, at in self._measuring.items() if key[0] != node}
        self._measured = {key for key in self._measured if key[0] != node}
        if not self._wanted.examine or not row.node.offer.gpus:
            return row
        devices = {gpu.uuid: gpu for gpu in row.node.offer.gpus}
        now = self._now()
        for record in await self._store.read(gpu_verification.records(row.node.id)):
            gpu = devices.get(record.uuid)
            if gpu is not None and gpu.simulated and record.verdict is not GpuVerdict.SIMULATED:
                done = gpu_verification.judge(row.node.id, record.uuid, GpuVerdict.SIMULATED, now)
                row = await self._written(done, row)
            elif gpu is not None and _is_to_wait(record, now) and self._wanted.terms(gpu):
                kept = gpu_verification.keep_back(row.node.id, [record.uuid], WAITS)
                row = await self._written(kept, row)
        self.wake.call()
        return row

    async def _written(self, operation: Operation[NodeRow | None], before: NodeRow) -> NodeRow:
        after = await self._write(operation)
        return before if after is None else after

    async def _write(self, operation: Operation[T]) -> T:
        """Whether a write that fails was made we cannot know: the scheduler looks again."""
        try:
            return await self._store.write(operation)
        except BaseException:
            self._scheduler.doubt()
            raise

    async def take(self, node: NodeId, frame: FromGpu) -> None:
        """A frame about a GPU of that node."""
        now = self._now()
        if isinstance(frame, GpuMeasured):
            await self._note(node, frame)
            return
        if isinstance(frame, GpuUnable):
            log.warning("node %s cannot try its GPU %.60r: %.300s", node, frame.uuid, frame.why)
            if frame.trial == 0:
                self._end_measuring((node, frame.uuid))
                return
        trial = self._trial(node, frame.trial)
        if trial is None:
            return
        match frame:
            case GpuCommitted():
                trial.seat = trial.seat.committed(frame.root, now)
            case GpuAnswered():
                trial.seat = trial.seat.answered(frame.roots, now)
                if trial.seat.verdict is None:
                    self._open(trial)
            case GpuOpened():
                await self._check(trial, frame.openings)
            case GpuUnable():
                trial.seat = trial.seat.judged(GpuVerdict.UNABLE)
        await self._go_on(now)

    async def run_once(self, now: Instant) -> None:
        await self._go_on(now)
        if now - self._looked_at >= LOOK_EVERY or self._looked_at > now:
            self._looked_at = now
            await self._look(now)

    # ---- trials

    def _trial(self, node: NodeId, number: int) -> _Trial | None:
        for sitting in self._sittings:
            if number in sitting and sitting[number].node == node:
                return sitting[number]
        return None

    async def _go_on(self, now: Instant) -> None:
        """Times up, nonces out, verdicts written."""
        for sitting in list(self._sittings):
            for trial in sitting.values():
                if not trial.checking:
                    trial.seat = trial.seat.at(now)
            if may_ask(trial.seat for trial in sitting.values()):
                for trial in sitting.values():
                    self._ask(trial)
            for trial in [each for each in sitting.values() if each.seat.verdict is not None]:
                if sitting.pop(trial.number, None) is not None:  # not judged meanwhile
                    await self._judge(trial, now)
        self._sittings = [sitting for sitting in self._sittings if sitting]

    def _ask(self, trial: _Trial) -> None:
        if trial.seat.verdict is None and trial.seat.asked_at is None:
            trial.nonce = secrets.token_bytes(32)
            trial.seat = trial.seat.asked(self._now())
            self._tell(trial.node, AnswerNow(trial.number, trial.nonce))

    def _open(self, trial: _Trial) -> None:
        terms = trial.seat.terms
        count = min(terms.opened, terms.size.tiles)
        trial.tiles = tuple(self._dice.sample(range(terms.size.tiles), count))
        self._tell(trial.node, OpenTiles(trial.number, trial.tiles))

    async def _check(self, trial: _Trial, openings: Sequence[Opening]) -> None:
        seat = trial.seat = trial.seat.at(self._now())
        if trial.checking or seat.verdict is not None:
            return
        if seat.root is None or seat.answer is None or not trial.tiles:
            trial.seat = seat.judged(GpuVerdict.MALFORMED)
            return
        trial.checking = True
        claimed = Claimed(seat.terms.size, trial.keys, trial.nonce, seat.root, seat.answer)
        dice = secrets.token_bytes(16)
        verdict = await asyncio.to_thread(check_openings, claimed, trial.tiles, openings, dice)
        trial.seat = trial.seat.judged(verdict)

    async def _judge(self, trial: _Trial, now: Instant) -> None:
        verdict, key = trial.seat.verdict, (trial.node, trial.uuid)
        assert verdict is not None
        log.info("GPU %s of node %s: %s", trial.uuid, trial.node, verdict.value)
        self._tell(trial.node, GpuJudged(trial.number, verdict, verdict.text))
        if verdict.is_late:
            self._late[key] = self._late.get(key, 0) + 1
            if self._late[key] < TRIES:
                return  # it waits, still kept back, for the next look
        self._late.pop(key, None)
        row = await self._write(gpu_verification.judge(*key, verdict, now))
        if row is not None:
            self._scheduler.node_changed(row.node)

    def _tell(self, node: NodeId, frame: ToGpu) -> None:
        channel = self._scheduler.channels.get(node)
        if channel is not None:
            channel.tell_gpu(frame)

    # ---- who is next

    async def _look(self, now: Instant) -> None:
        if not (self._wanted.examine or self._wanted.measure) or not self._scheduler.channels:
            return
        records = await self._store.read(gpu_verification.records())
        if self._wanted.measure:
            self._measure(records, now)
        if self._wanted.examine:
            await self._keep_some_back(records)
            for group in _together(self._candidates(records, now)):
                self._begin(group, now)

    def _measure(self, records: Iterable[Record], now: Instant) -> None:
        under_trial = self._under_trial()
        for record in records:
            key = (record.node, record.uuid)
            gpu = self._idle(record)
            if gpu is None or record.measured is not None or key in under_trial:
                continue
            if gpu.simulated or gpu.vendor != "nvidia":
                continue
            if key not in self._measuring and key not in self._measured:
                self._measuring[key] = now
                self._tell(record.node, MeasureGpu(record.uuid))

    def _end_measuring(self, key: tuple[NodeId, str]) -> bool:
        """Whether it was being measured; a trial may follow at once."""
        self._looked_at = Instant(0)
        self.wake.call()
        self._measured.add(key)
        return self._measuring.pop(key, None) is not None

    async def _note(self, node: NodeId, frame: GpuMeasured) -> None:
        key = (node, frame.uuid)
        if self._end_measuring(key):
            text = msgspec.json.encode(frame.measured).decode()
            await self._write(gpu_verification.note_measured(node, frame.uuid, text))

    async def _keep_some_back(self, records: Iterable[Record]) -> None:
        """At moments nobody knows, a GPU that passed is tried again."""
        chance = LOOK_EVERY / self._wanted.again_every
        for record in records:
            if record.verdict is not GpuVerdict.PASSED or self._dice.random() >= chance:
                continue
            if self._idle(record) is not None:
                kept = gpu_verification.keep_back(record.node, [record.uuid], WAITS)
                row = await self._write(kept)
                if row is not None:
                    self._scheduler.node_changed(row.node)

    def _under_trial(self) -> set[tuple[NodeId, str]]:
        return {(t.node, t.uuid) for sitting in self._sittings for t in sitting.values()}

    def _candidates(self, records: Iterable[Record], now: Instant) -> list[_Candidate]:
        """Neither under trial nor being measured: the one would slow the other down."""
        under_trial = self._under_trial()
        found = []
        for record in records:
            key = (record.node, record.uuid)
            since = self._measuring.get(key)
            if record.unproven != WAITS or key in under_trial:
                continue
            if since is not None and now - since < MEASURED_WITHIN:
                continue
            gpu = self._idle(record)
            terms = self._wanted.terms(gpu) if gpu is not None else None
            if terms is not None:
                here = self._scheduler.state.nodes[record.node].node
                place = DeviceIdentity(
                    record.owner,
                    here.offer.hostname if here is not None else "",
                    record.uuid,
                    record.joined_at,
                )
                found.append(_Candidate(record, place, terms))
        return found

    def _begin(self, group: Sequence[_Candidate], now: Instant) -> None:
        sitting: dict[int, _Trial] = {}
        for each in group:
            self._number = max(
                self._number + 1, now
            )  # a number is never used twice, after a restart either
            record, size = each.record, each.terms.size
            seed = secrets.token_bytes(32)
            keys = keys_of(seed, record.node, record.uuid, self._number)
            seat = VerifiedGpu(each.terms, now)
            sitting[self._number] = _Trial(self._number, record.node, record.uuid, keys, seat)
            self._tell(
                record.node,
                ExamineGpu(self._number, record.node, record.uuid, seed, size, each.terms.rounds),
            )
        self._sittings.append(sitting)

    def _idle(self, record: Record) -> Gpu | None:
        """The device, when its node is here and nothing runs on it."""
        entry = self._scheduler.state.nodes.get(record.node)
        if entry is None or entry.node is None or record.node not in self._scheduler.channels:
            return None
        room = entry.room.gpus.get(record.position)
        if room is not None and room.free_share < 1000:
            return None
        for gpu in entry.node.offer.gpus:
            if gpu.uuid == record.uuid:
                return gpu
        return None


def _is_to_wait(record: Record, now: Instant) -> bool:
    if record.verdict is None:
        return record.unproven != WAITS
    failed = record.verdict is not GpuVerdict.PASSED and record.unproven is not None
    return failed and now - (record.judged_at or 0) >= AGAIN_AFTER


def _together(candidates: Sequence[_Candidate]) -> list[list[_Candidate]]:
    """Those who could be one device, and whoever could be one with any of them."""
    groups: list[list[_Candidate]] = []
    for candidate in candidates:
        near = [
            group
            for group in groups
            if any(could_be_one(candidate.place, other.place) for other in group)
        ]
        groups = [group for group in groups if group not in near]
        groups.append([candidate, *(each for group in near for each in group)])
    return groups
