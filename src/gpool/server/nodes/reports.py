"""Reports of nodes: validated, then batched into one write for many nodes; the commit is folded before any node gets its
answer. One file because validation and batches share the frames and their limits.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Address
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from gpool.core.errors import Invalid
from gpool.core.ids import NodeId, TaskId
from gpool.core.model import (
    INLINE_LIMIT_BYTES,
    KIB,
    MIB,
    EndReason,
    Gpu,
    Instant,
    Offer,
    OutputFile,
    SliceProfile,
)
from gpool.core.money.prices import MAX_MINIMUM, MAX_NOTICE_S
from gpool.core.scheduler.place.kinds import MAX_GPUS
from gpool.core.specs import fields, progress
from gpool.server.receipts.signatures import is_well_formed
from gpool.server.store.batching import WriteBatcher
from gpool.server.store.operations.leases import leases
from gpool.server.store.operations.leases.connections import NodeLink
from gpool.server.store.operations.tasks.storage import NO_LIMITS, StorageLimits
from gpool.server.store.protocol import Operation, brief
from gpool.server.store.values import BatchResult, Recording
from gpool.server.wakeups import AwaitedResults
from gpool.wire.frames import (
    MAX_SPEC_BYTES,
    Checkpointed,
    Finished,
    Hold,
    LogChunk,
    Progressed,
    Released,
    ReportItem,
)

SHA256 = re.compile(r"[0-9a-f]{64}")
SITE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
GANG_PORTS = (1024, 60_000)
MAX_GANG_LINKS = 10
FILE_WIRE_BYTES = 100
"""A checkpoint's file in a frame without its name: mostly its hash."""
MAX_OFFER_BYTES = MIB
"""An offer as stored: a thousand GPUs with all details. Each read of the node reads it."""
MAX_RUNTIMES = 16
MAX_PROFILES = 32
MAX_PLACES = 16
"""Memory slices of a GPU; the planner iterates over them."""
MAX_ITEMS = 20_000
"""Of one frame of reports, ten times what an agent sends; each costs a lookup."""
MAX_ERROR_LETTERS = 64 * KIB
"""Twice what an agent sends; each listing of the task contains it."""

SERVER_REASONS = frozenset(
    {
        EndReason.CANCELLED,
        EndReason.LOSES_NODES,
        EndReason.NODE_FAILED,
        EndReason.OUT_OF_FUNDS,
        EndReason.NO_QUORUM,
    }
)
"""Ends without a retry that only consumers and the server decide. A node *releases* a cancelled lease."""


def offer_problem(offer: Offer, *, is_local: bool = False, max_gpus: int = MAX_GPUS) -> str | None:
    """Problem of an offer; None if valid. `is_local`: the whole pool is one machine."""
    if not (0 <= offer.cpu_milli <= 10_000_000 and 0 <= offer.memory_bytes <= 1 << 60):
        return f"an offer of {offer.cpu_milli} milli-CPUs and {offer.memory_bytes} bytes of memory"
    if not 0 <= offer.disk_bytes <= 1 << 60:
        return f"an offer of {offer.disk_bytes} bytes of disk"
    if len(offer.gpus) > max_gpus:
        return f"an offer of {len(offer.gpus)} GPUs; a node of this pool offers at most {max_gpus}"
    if len(offer.labels) > fields.MAX_LABELS:
        return f"{len(offer.labels)} labels; at most {fields.MAX_LABELS} can be given"
    names = [runtime.name for runtime in offer.runtimes]
    if len(names) > MAX_RUNTIMES or any(len(name) > 100 or "\0" in name for name in names):
        return "an offer with too many runtimes, or one with too long a name"
    if len({gpu.index for gpu in offer.gpus}) < len(offer.gpus):
        return "two GPUs with one index"
    if len({gpu.uuid for gpu in offer.gpus}) < len(offer.gpus):
        return "one GPU under two indexes"
    for gpu in offer.gpus:
        texts = (gpu.uuid, gpu.model, gpu.vendor)
        if not (0 <= gpu.index <= 1023 and 0 < gpu.memory_bytes <= 1 << 50):
            return f"a GPU with index {gpu.index} and {gpu.memory_bytes} bytes of memory"
        if any(not text or len(text) > 200 or "\0" in text for text in texts):
            return f"a GPU whose uuid, model or vendor is empty, too long or holds a NUL (index {gpu.index})"
        if not _has_valid_details(gpu):
            return f"a GPU with too long or too many details (index {gpu.index})"
        if not _has_valid_profiles(gpu.profiles):
            return f"a GPU with impossible slice profiles (index {gpu.index})"
    if (problem := _price_problem(offer)) is not None:
        return problem
    try:
        fields.normal_labels(offer.labels)
    except Invalid as error:
        return f"invalid labels: {error.detail}"
    words = (
        offer.hostname,
        offer.agent_version,
        offer.closed,
        *offer.pythons,
        *offer.environments,
        *offer.builds,
        *offer.audience,
        *offer.free_for,
    )
    if len(words) > 1000 or any(len(word) > 300 or "\0" in word for word in words):
        return "an offer with more than 1000 texts, or one over 300 letters or with a NUL"
    size = len(msgspec.msgpack.encode(offer))
    if size > MAX_OFFER_BYTES:
        return f"an offer of {size} bytes; at most {MAX_OFFER_BYTES} are stored"
    return _site_problem(offer, is_local=is_local)


def _price_problem(offer: Offer) -> str | None:
    prices = [offer.price_microcredits, *(gpu.price_microcredits or 0 for gpu in offer.gpus)]
    for price in prices:
        if not 0 <= price <= fields.MAX_PRICE:
            return f"a price of {price} micro-credits an hour"
    if not 0 <= offer.min_charge_microcredits <= MAX_MINIMUM:
        return f"a minimum charge of {offer.min_charge_microcredits} micro-credits"
    if not 0 <= offer.notice_s <= MAX_NOTICE_S:
        return f"a notice of {offer.notice_s} s before reclaiming"
    return None


def _site_problem(offer: Offer, *, is_local: bool) -> str | None:
    """Check the address: other owners' agents at a shared site connect to it, so it must be a machine's own."""
    if offer.site and not SITE.fullmatch(offer.site):
        return f"a site that is not a word of letters, digits and . _ -: {offer.site[:100]!r}"
    if len(offer.gang_links) > MAX_GANG_LINKS or any(len(one) > 30 for one in offer.gang_links):
        return f"{len(offer.gang_links)} kinds of gang links; at most {MAX_GANG_LINKS} short words can be given"
    if offer.gang_port and not GANG_PORTS[0] <= offer.gang_port <= GANG_PORTS[1]:
        return f"gang port {offer.gang_port}; it must be from {GANG_PORTS[0]} to {GANG_PORTS[1]}"
    if not offer.address:
        return None
    try:
        address = IPv4Address(offer.address)
    except ValueError:
        return f"an address that is no IPv4 address: {offer.address[:100]!r}"
    nobodys = address.is_multicast or address.is_unspecified or address.is_reserved
    if nobodys or address.is_link_local or (address.is_loopback and not is_local):
        return f"{address} as the address by which others of its site reach it; name one with --address"
    return None


def _has_valid_details(gpu: Gpu) -> bool:
    words = [gpu.closed, gpu.ails]
    if (more := gpu.details) is not None:
        lists = (more.links, more.near, more.mig_profiles, more.mig_instances)
        if any(len(one) > 1024 for one in lists):
            return False
        words += [more.source, more.driver, more.capability, more.bus, more.pcie]
        words += [*more.mig_profiles, *more.mig_instances]
    return all(len(word) <= 300 and "\0" not in word for word in words)


def _has_valid_profiles(profiles: tuple[SliceProfile, ...]) -> bool:
    """Whether sizes and starts are possible on hardware: the planner enumerates them."""
    if len(profiles) > MAX_PROFILES or len({one.name for one in profiles}) < len(profiles):
        return False
    return all(
        0 < len(one.name) <= 100
        and "\0" not in one.name
        and 0 < one.memory_bytes <= 1 << 50
        and 0 < one.compute <= 1000
        and 0 < one.size <= MAX_PLACES
        and len(one.starts) <= MAX_PLACES
        and all(0 <= start <= MAX_PLACES - one.size for start in one.starts)
        for one in profiles
    )


def checked_report(item: ReportItem) -> ReportItem | None:
    """The report to store: an invalid end becomes a failed attempt that names the problem.

    None for an invalid checkpoint: the previous one stays.
    """
    if isinstance(item, Checkpointed):
        return item if _is_valid_checkpoint(item) else None
    if isinstance(item, Progressed):
        return Progressed(item.task, item.epoch, *progress.checked(item.millionths, item.text))
    if isinstance(item, Released) and not is_well_formed(item.work):
        return Released(item.task, item.epoch)
    if not isinstance(item, Finished):
        return item
    if not is_well_formed(item.work):
        item = msgspec.structs.replace(item, work=None)
    if item.reason in SERVER_REASONS:
        return _failed(item, f"its node reported {item.reason}, which only the server may")
    if len(item.value) > INLINE_LIMIT_BYTES:
        return _failed(
            item, f"a value of {len(item.value)} bytes came inline; it belongs in an artifact"
        )
    if item.value_sha256 and not SHA256.fullmatch(item.value_sha256):
        return _failed(item, "its value is not named by a SHA-256")
    if item.outputs:
        if not all(SHA256.fullmatch(output.sha256) for output in item.outputs):
            return _failed(item, "an output is not named by a SHA-256")
        try:
            for output in item.outputs:
                fields.checked_path(output.path)
        except Invalid as error:
            return _failed(item, error.detail)
    if item.exit_code is not None and not -(1 << 31) <= item.exit_code < 1 << 31:
        return _failed(item, f"exit code {item.exit_code}")
    text, lasted = item.error_text, item.duration_us
    if "\0" in text or len(text) > MAX_ERROR_LETTERS or not 0 <= lasted < 1 << 53:
        return msgspec.structs.replace(
            item,
            error_text=text[:MAX_ERROR_LETTERS].replace("\0", "\N{REPLACEMENT CHARACTER}"),
            duration_us=lasted if 0 <= lasted < 1 << 53 else 0,
        )
    return item


MIN_ID_LETTERS = 8
"""Shorter ids identify no hardware; as words they would be replaced in ordinary text."""
OWN_WORDS = frozenset({EndReason.EXITED, EndReason.RETURNED, EndReason.RAISED})
"""Ends whose text is the task's own: the task sees its GPUs anyway."""


def hide_ids(text: str, gpus: Iterable[Gpu]) -> str:
    """Replace hardware ids and PCI addresses of these GPUs by `gpuN`: consumers and other users read the text."""
    for gpu in gpus if text else ():
        for id_ in (gpu.uuid, "" if gpu.details is None else gpu.details.bus):
            if len(id_) >= MIN_ID_LETTERS:
                text = text.replace(id_, f"gpu{gpu.index}")
    return text


def offer_without_ids(offer: Offer) -> Offer:
    """Return the offer without hardware ids in its texts."""
    texts = "\n".join((offer.closed, *(f"{gpu.closed}\n{gpu.ails}" for gpu in offer.gpus)))
    if hide_ids(texts, offer.gpus) == texts:
        return offer
    gpus = tuple(
        replace(gpu, closed=hide_ids(gpu.closed, offer.gpus), ails=hide_ids(gpu.ails, offer.gpus))
        for gpu in offer.gpus
    )
    return replace(offer, closed=hide_ids(offer.closed, offer.gpus), gpus=gpus)


def report_without_ids(item: ReportItem, gpus: Iterable[Gpu]) -> ReportItem:
    """Return the report without hardware ids in what the agent says of an attempt that it could not start or ended."""
    if not isinstance(item, Finished) or item.reason in OWN_WORDS or not item.error_text:
        return item
    return msgspec.structs.replace(item, error_text=hide_ids(item.error_text, gpus))


def _failed(item: Finished, why: str) -> Finished:
    return Finished(
        item.task,
        item.epoch,
        EndReason.BAD_OUTPUT,
        None,
        error_text=f"rejected by the server: {why}",
    )


def _is_valid_checkpoint(item: Checkpointed) -> bool:
    """Whether names are valid and distinct on every file system, no file is a folder of another, and all fit a frame."""
    size = sum(len(file.path.encode()) + FILE_WIRE_BYTES for file in item.files)
    if size > MAX_SPEC_BYTES or any(not _is_file(file) for file in item.files):
        return False
    try:
        names = {fields.folded_path(fields.checked_path(file.path)) for file in item.files}
    except Invalid:
        return False
    folders = {name[:at] for name in names for at in _cuts(name)}
    return len(names) == len(item.files) and not names & folders


def _cuts(name: str) -> Iterable[int]:
    return (at for at, letter in enumerate(name) if letter == "/")


def _is_file(file: OutputFile) -> bool:
    return SHA256.fullmatch(file.sha256) is not None and 0 <= file.size_bytes <= 1 << 50


T = TypeVar("T")
GATHERED_BYTES = 256 * KIB
"""Size of a frame up to which it is batched: PostgreSQL accepts no statement over a gigabyte."""
FILE_ROW_BYTES = 256  # of one file in a checkpoint's manifest


class Write(Protocol):
    def __call__(self, operation: Operation[T], /) -> Awaitable[T]: ...


class ReportSender(Protocol):
    """Connection by which a frame came. `link`: its row, where replicas exist."""

    node: NodeId
    closed: bool
    link: NodeLink | None


@dataclass(frozen=True, slots=True)
class _ReportFrame:
    sender: ReportSender
    items: Sequence[ReportItem]
    at: Instant


class _WrittenReports(NamedTuple):
    recording: Recording
    frames: frozenset[int]  # by `id`; without those of replaced connections


class ReportBatches:
    """`limits`: default storage quotas of the tasks' owners. `awaited` receives results before they are published.

    A commit is folded before the next await, in commit order, with one exception: ends of leases for which a request
    waits are folded one iteration of the loop later. Until then the picture counts their allocations as held, and an
    event that is folded in between cannot be about them: nothing happens to a task after its end.

    A frame that waits while a newer connection of its node replaces its own is not written: the newer one has read the
    leases as they were without it. The agent sends it again, if its process lives.
    """

    def __init__(
        self,
        write: Write,
        absorb: Callable[[Recording], None],
        limits: StorageLimits = NO_LIMITS,
    ) -> None:
        self._write, self._absorb, self._limits = write, absorb, limits
        self.awaited = AwaitedResults[BatchResult]()
        self._frames = WriteBatcher(self._record, self._fold)
        self._beats = WriteBatcher(self._beat, lambda _, drops: drops)

    async def beat(self, node: NodeId, holds: Sequence[Hold], now: Instant) -> tuple[Hold, ...]:
        return await self._beats.take((node, holds, now))

    async def _beat(self, group: Sequence[leases.Heartbeat]) -> list[tuple[Hold, ...]]:
        return await self._write(leases.record_heartbeats(group))

    async def record(
        self, sender: ReportSender, items: Sequence[ReportItem], now: Instant
    ) -> tuple[Hold, ...] | None:
        """Return the refused leases; None if nothing was written, since the connection was replaced."""
        frame = _ReportFrame(sender, items, now)
        take = self._frames.take if _is_light(items) else self._frames.take_alone
        return await take(frame)

    async def _record(self, group: Sequence[_ReportFrame]) -> _WrittenReports:
        group = [each for each in group if not each.sender.closed]
        if not group:
            return _WrittenReports(Recording(), frozenset())
        frames = [(each.sender.node, each.items) for each in group]
        links = {each.sender.node: each.sender.link for each in group if each.sender.link}
        rows = sum(len(each.items) for each in group)
        awaited: list[TaskId] = []
        if self.awaited:
            ended = (
                TaskId(item.task) for _, items in frames for item in items if type(item) is Finished
            )
            awaited = [task for task in ended if task in self.awaited]
        writing = leases.record(frames, group[-1].at, self._limits, awaited, links)
        recording = await self._write(brief(writing, rows))
        is_answered = [self.awaited.put(each.task, each) for each in recording.results]
        if any(is_answered) and recording.only_ends:
            try:
                await asyncio.sleep(0)  # the requests that waited for these results answer first
            except BaseException:
                self._absorb(recording)  # cancelled: committed, and folded by nobody else
                raise
        return _WrittenReports(recording, frozenset(map(id, group)))

    def _fold(
        self, group: Sequence[_ReportFrame], written: _WrittenReports
    ) -> list[tuple[Hold, ...] | None]:
        self._absorb(written.recording)
        return [_refused(frame, written) for frame in group]


def _refused(frame: _ReportFrame, written: _WrittenReports) -> tuple[Hold, ...] | None:
    recording, node = written.recording, frame.sender.node
    if node in recording.overtaken or id(frame) not in written.frames:
        return None
    if not recording.refused:
        return ()
    items = {(item.task, item.epoch) for item in frame.items}
    return tuple(
        hold
        for reporter, hold in recording.refused
        if reporter == node and (hold.task, hold.epoch) in items
    )


def _is_light(items: Sequence[ReportItem]) -> bool:
    return sum(map(_size, items)) <= GATHERED_BYTES


def _size(item: ReportItem) -> int:
    """Approximate bytes in a statement, of the items that can be large."""
    match item:
        case Finished():
            return len(item.value) + len(item.error_text)
        case LogChunk():
            return len(item.data)
        case Checkpointed():
            return FILE_ROW_BYTES * len(item.files)
        case _:
            return 0
