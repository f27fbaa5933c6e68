"""Runs GPU verification: batches, time limits, challenges, verdicts. Rules: `core.gpu_verification`.

GPUs that could be one device under two names are verified simultaneously. A GPU is withheld until it has passed; after
a timeout it may try again, after a wrong answer only if its node joins again or an operator admits it.
One file because the selection excludes the verifications and measurements in progress.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from random import Random, SystemRandom
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from gpool.core.gpu_verification import (
    DeviceIdentity,
    GpuModels,
    GpuVerdict,
    Opening,
    VerificationKeys,
    VerificationTerms,
    VerifiedGpu,
    could_be_one,
    keys_of,
    make_of,
    may_ask,
    terms_for,
)
from gpool.core.ids import NodeId
from gpool.core.model import Gpu, Instant, Span
from gpool.observability.logs import get_logger
from gpool.server.nodes.gpu_checks import Claimed, check_openings
from gpool.server.nodes.gpu_models import models_with, packaged_models
from gpool.server.scheduling.picture import StatePicture
from gpool.server.settings import Settings, span
from gpool.server.store.operations import gpus
from gpool.server.store.operations.gpus import WAITS, GpuVerificationRecord
from gpool.server.store.protocol import Operation, Store
from gpool.server.store.values import NodeRow
from gpool.server.wakeups import Wake
from gpool.transfer.requests import is_loopback
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

log = get_logger(__name__)
T = TypeVar("T")

TRIES = 3
AGAIN_AFTER = Span(600_000_000)
"""Time after which a GPU that failed is verified again, when its node connects."""
SELECT_EVERY = Span(5_000_000)
MAX_NODES = 64
"""Connected nodes whose GPUs one selection reads, by id and in turn, besides new nodes and those with a withheld GPU."""
MEASURED_WITHIN = Span(60_000_000)
"""A verification waits no longer for a measurement."""


def terms_of(gpu: Gpu, models: GpuModels) -> VerificationTerms | None:
    """Terms of a GPU's verification; None: it cannot be verified."""
    if gpu.vendor != "nvidia" or gpu.guest:
        return None
    make = make_of(gpu.model, gpu.memory_bytes, models)
    return None if make is None else terms_for(gpu.memory_bytes, make)


@dataclass(frozen=True, slots=True)
class VerificationSettings:
    examine: bool
    measure: bool
    again_every: Span
    models: GpuModels = field(default_factory=packaged_models)
    terms: Callable[[Gpu, GpuModels], VerificationTerms | None] = terms_of

    @classmethod
    def of(cls, settings: Settings) -> VerificationSettings:
        asked, reached_at = settings.examine_gpus, urlsplit(settings.url).hostname or ""
        is_one_machine = settings.is_local and is_loopback(reached_at)  # not behind a proxy
        return cls(
            not is_one_machine if asked is None else asked,
            settings.measure_gpus,
            span(settings.reexamine_s),
            models_with(settings.gpu_models),
        )

    def terms_for(self, gpu: Gpu) -> VerificationTerms | None:
        return self.terms(gpu, self.models)

    def known_verdict(self, gpu: Gpu) -> GpuVerdict | None:
        """Verdict about a GPU that cannot be verified; None: it can."""
        if gpu.simulated:
            return GpuVerdict.SIMULATED
        return None if self.terms_for(gpu) else GpuVerdict.UNKNOWN_MODEL


@dataclass(slots=True)
class _Verification:
    number: int
    node: NodeId
    uuid: str
    keys: VerificationKeys
    progress: VerifiedGpu
    nonce: bytes = b""
    tiles: tuple[int, ...] = ()
    checking: bool = False


@dataclass(frozen=True, slots=True)
class _Candidate:
    record: GpuVerificationRecord
    place: DeviceIdentity
    terms: VerificationTerms


class GpuVerifier:
    def __init__(
        self,
        store: Store,
        picture: StatePicture,
        now: Callable[[], Instant],
        wanted: VerificationSettings,
        random: Random | None = None,
    ) -> None:
        self.wake = Wake()
        self._store, self._picture, self._now, self._wanted = store, picture, now, wanted
        self._random = random if random is not None else SystemRandom()
        self._batches: list[dict[int, _Verification]] = []
        self._number = 0
        self._late: dict[tuple[NodeId, str], int] = {}
        self._measuring: dict[tuple[NodeId, str], Instant] = {}  # since when
        self._measured: set[tuple[NodeId, str]] = set()  # or unable; asked once in a connection
        self._selected_at = Instant(0)
        self._attended: set[NodeId] = set()
        """Nodes read by every selection: new ones and those with a withheld GPU, which must meet in one batch."""
        self._read_to = NodeId(0)  # id of the last node that was read in turn

    @property
    def verifies(self) -> bool:
        return self._wanted.examine

    async def admit(self, row: NodeRow) -> NodeRow:
        """Withhold GPUs of a new offer that must be verified, before anything can be placed there."""
        node = row.node.id
        self._measuring = {key: at for key, at in self._measuring.items() if key[0] != node}
        self._measured = {key for key in self._measured if key[0] != node}
        self._attended.add(node)
        if not self._wanted.examine or not row.node.offer.gpus:
            return row
        devices = {gpu.uuid: gpu for gpu in row.node.offer.gpus}
        now = self._now()
        for record in await self._store.read(gpus.records([row.node.id])):
            gpu = devices.get(record.uuid)
            if gpu is None:
                continue
            verdict = self._wanted.known_verdict(gpu)
            if verdict is not None and record.verdict is not verdict:
                row = await self._written(gpus.judge(node, record.uuid, verdict, now), row)
            elif verdict is None and _must_wait(record, now):
                row = await self._written(gpus.keep_back(node, [record.uuid], WAITS), row)
        self.wake.call()
        return row

    @property
    def models(self) -> GpuModels:
        return self._wanted.models

    async def _written(self, operation: Operation[NodeRow | None], before: NodeRow) -> NodeRow:
        after = await self._write(operation)
        return before if after is None else after

    async def _write(self, operation: Operation[T]) -> T:
        with self._picture.commit():
            return await self._store.write(operation)

    async def take(self, node: NodeId, frame: FromGpu) -> None:
        now = self._now()
        if isinstance(frame, GpuMeasured):
            await self._store_measurement(node, frame)
            return
        if isinstance(frame, GpuUnable):
            log.warning(
                "node cannot verify its GPU", node=node, gpu=frame.uuid[:60], why=frame.why[:300]
            )
            if frame.trial == 0:
                self._end_measuring((node, frame.uuid))
                return
        run = self._verification(node, frame.trial)
        if run is None:
            return
        match frame:
            case GpuCommitted():
                run.progress = run.progress.committed(frame.root, now)
            case GpuAnswered():
                run.progress = run.progress.answered(frame.roots, now)
                if run.progress.verdict is None:
                    self._open(run)
            case GpuOpened():
                await self._check(run, frame.openings)
            case GpuUnable():
                run.progress = run.progress.judged(GpuVerdict.UNABLE)
        await self._advance(now)

    async def run_once(self, now: Instant) -> None:
        await self._advance(now)
        if now - self._selected_at >= SELECT_EVERY or self._selected_at > now:
            self._selected_at = now
            await self._select(now)

    # ---- verifications in progress

    def _verification(self, node: NodeId, number: int) -> _Verification | None:
        for batch in self._batches:
            if number in batch and batch[number].node == node:
                return batch[number]
        return None

    async def _advance(self, now: Instant) -> None:
        for batch in list(self._batches):
            for run in batch.values():
                if not run.checking:
                    run.progress = run.progress.at(now)
            if may_ask(run.progress for run in batch.values()):
                for run in batch.values():
                    self._ask(run)
            for run in [each for each in batch.values() if each.progress.verdict is not None]:
                if batch.pop(run.number, None) is not None:  # not judged meanwhile
                    await self._judge(run, now)
        self._batches = [batch for batch in self._batches if batch]

    def _ask(self, run: _Verification) -> None:
        if run.progress.verdict is None and run.progress.asked_at is None:
            run.nonce = secrets.token_bytes(32)
            run.progress = run.progress.asked(self._now())
            self._send(run.node, AnswerNow(run.number, run.nonce))

    def _open(self, run: _Verification) -> None:
        terms = run.progress.terms
        count = min(terms.opened, terms.size.tiles)
        run.tiles = tuple(self._random.sample(range(terms.size.tiles), count))
        self._send(run.node, OpenTiles(run.number, run.tiles))

    async def _check(self, run: _Verification, openings: Sequence[Opening]) -> None:
        progress = run.progress = run.progress.at(self._now())
        if run.checking or progress.verdict is not None:
            return
        if progress.root is None or progress.answer is None or not run.tiles:
            run.progress = progress.judged(GpuVerdict.MALFORMED)
            return
        run.checking = True
        claimed = Claimed(
            progress.terms.size,
            run.keys,
            run.nonce,
            progress.root,
            progress.answer,
        )
        dice = secrets.token_bytes(16)
        verdict = await asyncio.to_thread(check_openings, claimed, run.tiles, openings, dice)
        run.progress = run.progress.judged(verdict)

    async def _judge(self, run: _Verification, now: Instant) -> None:
        verdict, key = run.progress.verdict, (run.node, run.uuid)
        assert verdict is not None
        log.info("GPU verified", node=run.node, gpu=run.uuid, verdict=verdict.value)
        self._send(run.node, GpuJudged(run.number, verdict, verdict.text))
        if verdict.is_late:
            self._late[key] = self._late.get(key, 0) + 1
            if self._late[key] < TRIES:
                return  # still withheld; selected again
        self._late.pop(key, None)
        row = await self._write(gpus.judge(*key, verdict, now))
        if row is not None:
            self._picture.node_changed(row.node)

    def _send(self, node: NodeId, frame: ToGpu) -> None:
        connection = self._picture.nodes.connection(node)
        if connection is not None:
            connection.tell_gpu(frame)

    # ---- selection

    async def _select(self, now: Instant) -> None:
        if (
            not (self._wanted.examine or self._wanted.measure)
            or not self._picture.nodes.connections
        ):
            return
        connected = {connection.node for connection in self._picture.nodes.connections}
        page = self._next_page(connected)
        attended = self._attended & connected
        # A node is admitted before it counts as connected: it is read once it is.
        self._attended = (self._attended - attended) & self._picture.state.nodes.keys()
        records = await self._store.read(gpus.records(attended | page))
        self._attended |= {each.node for each in records if each.unproven == WAITS}
        if self._wanted.measure:
            self._measure(records, now)
        if self._wanted.examine:
            rounds = -(-len(connected) // MAX_NODES)
            await self._withhold_some([each for each in records if each.node in page], rounds)
            for group in _grouped(self._candidates(records, now)):
                self._begin(group, now)

    def _next_page(self, connected: set[NodeId]) -> set[NodeId]:
        """Return the next nodes by id; after the last one the first follows."""
        later = nsmallest(MAX_NODES, (node for node in connected if node > self._read_to))
        page = later or nsmallest(MAX_NODES, connected)
        self._read_to = page[-1]
        return set(page)

    def _measure(self, records: Iterable[GpuVerificationRecord], now: Instant) -> None:
        under_verification = self._under_verification()
        for record in records:
            key = (record.node, record.uuid)
            gpu = self._idle(record)
            if gpu is None or record.measured is not None or key in under_verification:
                continue
            if gpu.simulated or gpu.guest or gpu.vendor != "nvidia":
                continue
            if key not in self._measuring and key not in self._measured:
                self._measuring[key] = now
                self._send(record.node, MeasureGpu(record.uuid))

    def _end_measuring(self, key: tuple[NodeId, str]) -> bool:
        """Whether this GPU was being measured; a node that was not asked changes nothing."""
        if self._measuring.pop(key, None) is None:
            return False
        self._measured.add(key)
        self._selected_at = Instant(0)
        self.wake.call()
        return True

    async def _store_measurement(self, node: NodeId, frame: GpuMeasured) -> None:
        key = (node, frame.uuid)
        if self._end_measuring(key):
            text = msgspec.json.encode(frame.measured).decode()
            await self._write(gpus.note_measured(node, frame.uuid, text))

    async def _withhold_some(self, records: Iterable[GpuVerificationRecord], rounds: int) -> None:
        """Withhold GPUs at random for another verification; each is considered once in so many rounds."""
        chance = rounds * SELECT_EVERY / self._wanted.again_every
        for record in records:
            if record.verdict is not GpuVerdict.PASSED or self._random.random() >= chance:
                continue
            if self._idle(record) is not None:
                kept = gpus.keep_back(record.node, [record.uuid], WAITS)
                row = await self._write(kept)
                if row is not None:
                    self._attended.add(record.node)
                    self._picture.node_changed(row.node)

    def _under_verification(self) -> set[tuple[NodeId, str]]:
        return {(t.node, t.uuid) for batch in self._batches for t in batch.values()}

    def _candidates(
        self, records: Iterable[GpuVerificationRecord], now: Instant
    ) -> list[_Candidate]:
        """GPUs to verify that are neither being verified nor measured: one would slow the other down."""
        under_verification = self._under_verification()
        found = []
        for record in records:
            key = (record.node, record.uuid)
            since = self._measuring.get(key)
            if record.unproven != WAITS or key in under_verification:
                continue
            if since is not None and now - since < MEASURED_WITHIN:
                continue
            gpu = self._idle(record)
            terms = self._wanted.terms_for(gpu) if gpu is not None else None
            if terms is not None:
                here = self._picture.state.nodes[record.node].node
                place = DeviceIdentity(
                    record.owner,
                    here.offer.hostname if here is not None else "",
                    record.uuid,
                    record.joined_at,
                )
                found.append(_Candidate(record, place, terms))
        return found

    def _begin(self, group: Sequence[_Candidate], now: Instant) -> None:
        batch: dict[int, _Verification] = {}
        for each in group:
            self._number = max(self._number + 1, now)  # unique after a restart too
            record, size = each.record, each.terms.size
            seed = secrets.token_bytes(32)
            keys = keys_of(seed, record.node, record.uuid, self._number)
            progress = VerifiedGpu(each.terms, now)
            batch[self._number] = _Verification(
                self._number, record.node, record.uuid, keys, progress
            )
            self._send(
                record.node,
                ExamineGpu(self._number, record.node, record.uuid, seed, size, each.terms.rounds),
            )
        self._batches.append(batch)

    def _idle(self, record: GpuVerificationRecord) -> Gpu | None:
        entry = self._picture.state.nodes.get(record.node)
        if (
            entry is None
            or entry.node is None
            or self._picture.nodes.connection(record.node) is None
        ):
            return None
        room = entry.room.gpus.get(record.position)
        if room is not None and room.free_share < 1000:
            return None
        for gpu in entry.node.offer.gpus:
            if gpu.uuid == record.uuid:
                return gpu
        return None


def _must_wait(record: GpuVerificationRecord, now: Instant) -> bool:
    if record.verdict is None:
        return record.unproven != WAITS
    failed = record.verdict is not GpuVerdict.PASSED and record.unproven is not None
    is_new = record.verdict in (GpuVerdict.UNKNOWN_MODEL, GpuVerdict.SIMULATED)  # it was; not now
    return failed and (is_new or now - (record.judged_at or 0) >= AGAIN_AFTER)


def _grouped(candidates: Sequence[_Candidate]) -> list[list[_Candidate]]:
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
