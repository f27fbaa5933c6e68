"""Reports on their way to the server: output gathered into chunks, reports in numbered batches, kept until acknowledged.

With nothing in flight a report leaves at once; else reports gather until the batch is recorded, `LINGER_US` has passed
or `FULL` items wait. At most `MAX_IN_FLIGHT` batches are unrecorded; a reconnect sends them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpool.agent.state_machine.instructions import NEVER
from gpool.core.model import KIB, MIB, EndReason, Phase
from gpool.wire.frames import (
    Checkpointed,
    Finished,
    LogChunk,
    Progressed,
    Reached,
    Released,
    ReportItem,
    Reports,
    SignedGpu,
    Started,
)

PROGRESS_EVERY_US = 1_000_000
"""Shortest time between two reports of a task's progress."""


class ProgressReports:
    """Newest unreported progress of each lease. `due_at`: when to call `take`."""

    __slots__ = ("_newest", "_taken_at", "due_at")

    def __init__(self) -> None:
        self._newest: dict[tuple[int, int], Progressed] = {}
        self._taken_at: dict[tuple[int, int], int] = {}
        self.due_at = NEVER

    def add(self, now: int, item: Progressed) -> None:
        lease = item.task, item.epoch
        self._newest[lease] = item
        self.due_at = min(self.due_at, self._due_at(now, lease))

    def take(self, now: int) -> list[Progressed]:
        """Progress to report now: at once, or `PROGRESS_EVERY_US` after the last report of the same lease."""
        due = [lease for lease in self._newest if self._due_at(now, lease) <= now]
        found = [self._newest.pop(lease) for lease in due]
        recent = {one: at for one, at in self._taken_at.items() if at + PROGRESS_EVERY_US > now}
        self._taken_at = recent | dict.fromkeys(due, now)
        self.due_at = min((self._due_at(now, one) for one in self._newest), default=NEVER)
        return found

    def _due_at(self, now: int, lease: tuple[int, int]) -> int:
        at = self._taken_at.get(lease)
        return now if at is None else at + PROGRESS_EVERY_US


LINGER_US = 5_000
FULL = 500
MAX_ITEMS = 2_000
MAX_BYTES = 4 * MIB  # half of a frame's limit: the sizes below are estimates
MAX_IN_FLIGHT = 4
ITEM_BYTES = 64  # of an item without its data
SIGNATURE_BYTES = 512  # of a signature with its path and GPUs
ENDS = frozenset({Finished, Released})  # reports that may be signed
GOES_ON = frozenset({LogChunk, Checkpointed, Progressed})  # reports of an attempt that is not over
REPLACING = frozenset({Checkpointed, Progressed})  # reports of which only the newest counts

LOG_CHUNK_BYTES = 64 * KIB
LOG_HEAD_BYTES = 12 * MIB
LOG_TAIL_BYTES = MIB
"""Kept of an attempt's output: its head, and the tail of each stream. Together less than the server's limit for a task."""
LOG_EVERY_US = 100_000
"""Shortest time between two reports of a task's output."""
MAX_HELD_BYTES = 4 * KIB
"""Longest begun line that waits for its end."""


class LogBuffer:
    """Unreported output of one attempt. `due_at`: when to report it.

    Past `LOG_HEAD_BYTES` the last `LOG_TAIL_BYTES` of each stream are held until the end, so that a flood on one stream
    hides neither the end of it nor an error on the other.

    A begun line waits once for its end: the server puts the chunks of a gang's members one after another, and a program
    without buffering writes a line and its end apart.
    """

    __slots__ = (
        "_dropped",
        "_epoch",
        "_holds_line",
        "_left",
        "_parts",
        "_sequence",
        "_tails",
        "_task",
        "due_at",
    )

    def __init__(self, task: int, epoch: int) -> None:
        self._task = task
        self._epoch = epoch
        self._parts: list[tuple[int, bytearray]] = []
        self._sequence = 0
        self._left = LOG_HEAD_BYTES  # bytes that the head still takes
        self._tails: dict[int, bytearray] = {}
        self._dropped = 0  # bytes between head and tails
        self._holds_line = False  # the parts begin with a line that has waited
        self.due_at: int | None = None

    def append(self, now: int, stream: int, data: bytes) -> None:
        head, rest = data[: self._left], data[self._left :]
        if rest:
            self._append_tail(stream, rest)
        if not head:
            return
        self._left -= len(head)
        self._add(stream, head)
        if self.due_at is None:
            self.due_at = now + LOG_EVERY_US

    def _add(self, stream: int, data: bytes | bytearray) -> None:
        if self._parts and self._parts[-1][0] == stream:
            self._parts[-1][1].extend(data)
        else:
            self._parts.append((stream, bytearray(data)))

    def _append_tail(self, stream: int, data: bytes) -> None:
        tail = self._tails.setdefault(stream, bytearray())
        tail += data[-LOG_TAIL_BYTES:]
        self._dropped += len(data[:-LOG_TAIL_BYTES])
        excess = len(tail) - LOG_TAIL_BYTES
        if excess > 0:
            self._dropped += excess
            del tail[:excess]

    def take(self, now: int, *, ends: bool = False) -> list[LogChunk]:
        """Return the chunks to report; with `ends` also the tails, after a line that says what is missing."""
        held = None if ends else self._begun_line()
        if ends and self._tails:
            if self._dropped:
                note = (
                    f"\n[gpool: {self._dropped} bytes of output are not kept; the last "
                    f"{LOG_TAIL_BYTES // MIB} MiB of each stream follow]\n"
                )
                self._add(2, note.encode())
            for stream, tail in sorted(self._tails.items()):
                self._add(stream, tail)
            self._tails = {}
        chunks = []
        for stream, data in self._parts:
            for start in range(0, len(data), LOG_CHUNK_BYTES):
                piece = bytes(data[start : start + LOG_CHUNK_BYTES])
                chunks.append(LogChunk(self._task, self._epoch, self._sequence, stream, piece))
                self._sequence += 1
        self._parts = [] if held is None else [held]
        self._holds_line = held is not None
        self.due_at = None if held is None else now + LOG_EVERY_US
        return chunks

    def _begun_line(self) -> tuple[int, bytearray] | None:
        """Cut the begun line off the last part, unless it is long or has waited already."""
        if not self._parts:
            return None
        stream, data = self._parts[-1]
        end = data.rfind(b"\n") + 1
        has_waited = self._holds_line and len(self._parts) == 1 and end == 0
        if has_waited or not 0 < len(data) - end <= MAX_HELD_BYTES:
            return None
        held = data[end:]
        del data[end:]
        return stream, held


def _failed_running(item: ReportItem) -> bool:
    """Without the report of its start, the server would count a failed start and retry it elsewhere."""
    return type(item) is Finished and item.reason is EndReason.SANDBOX_FAILED and item.fault is None


class UnsignedWork(NamedTuple):
    """Work of a priced lease, to be signed with the others of its batch."""

    message: bytes
    gpus: tuple[SignedGpu, ...]


Works = dict[tuple[int, int], UnsignedWork]
"""By task and epoch."""
SignItems = Callable[[Sequence[ReportItem], Works], list[ReportItem]]


def _unsigned(items: Sequence[ReportItem], _: Works) -> list[ReportItem]:
    return list(items)


class Outbox:
    __slots__ = (
        "_batches",
        "_items",
        "_reached",
        "_sequence",
        "_sign",
        "_since",
        "_sizes",
        "_started",
        "_works",
        "progress",
    )

    def __init__(self, sign: SignItems = _unsigned) -> None:
        """`sign`: add signatures of works to the ends in a batch."""
        self._sign = sign
        self._works: Works = {}  # of ends that wait
        self.progress = ProgressReports()
        self._items: list[ReportItem] = []
        self._sizes: list[int] = []
        self._since = NEVER  # when the oldest waiting item came
        self._started: dict[int, Started] = {}
        self._reached: dict[int, Reached] = {}
        self._batches: dict[int, tuple[list[ReportItem], list[int]]] = {}
        self._sequence = 0

    def __bool__(self) -> bool:
        return bool(self._items or self._batches or self._started or self._reached)

    def add(
        self, now: int, item: ReportItem, data_bytes: int = 0, work: UnsignedWork | None = None
    ) -> None:
        if self._since == NEVER:
            self._since = now
        if work is not None:
            self._works[item.task, item.epoch] = work
            data_bytes += SIGNATURE_BYTES
        if (self._started or self._reached) and type(item) not in GOES_ON:
            begun = self._started.pop(item.task, None)
            self._reached.pop(item.task, None)
            if begun is not None and _failed_running(item):
                self._items.append(begun)
                self._sizes.append(ITEM_BYTES)
        if type(item) in REPLACING:
            self._supersede(type(item), item.task)
        self._items.append(item)
        self._sizes.append(ITEM_BYTES + data_bytes)

    def add_started(self, now: int, task: int, epoch: int) -> None:
        """Report the start, unless the attempt ends before the batch leaves (and not by a failure of its sandbox)."""
        if self._since == NEVER:
            self._since = now
        self._started[task] = Started(task, epoch)
        self._reached.pop(task, None)

    def add_reached(self, now: int, task: int, epoch: int, phase: Phase) -> None:
        """Report the phase, unless the attempt reaches a later one before the batch leaves."""
        if self._since == NEVER:
            self._since = now
        self._reached[task] = Reached(task, epoch, phase)

    def _supersede(self, kind: type[ReportItem], task: int) -> None:
        """Drop older reports: a checkpoint sent after a newer one would undo progress."""

        def is_older(item: ReportItem) -> bool:
            return type(item) is kind and item.task == task

        self._items, self._sizes = _without(self._items, self._sizes, is_older)
        self._batches = {n: _without(*batch, is_older) for n, batch in self._batches.items()}

    def recorded(self, sequence: int) -> None:
        for number in [n for n in self._batches if n <= sequence]:
            del self._batches[number]

    def resend(self, now: int) -> None:
        if not self._batches:
            return
        items: list[ReportItem] = []
        sizes: list[int] = []
        for number in sorted(self._batches):
            items += self._batches[number][0]
            sizes += self._batches[number][1]
        self._batches.clear()
        self._items = items + self._items
        self._sizes = sizes + self._sizes
        if self._items:  # all of them may have been dropped meanwhile
            self._since = min(self._since, now)

    def drop(self, gone: set[tuple[int, int]]) -> None:
        def is_gone(item: ReportItem) -> bool:
            return (item.task, item.epoch) in gone

        self._items, self._sizes = _without(self._items, self._sizes, is_gone)
        self._batches = {n: _without(*batch, is_gone) for n, batch in self._batches.items()}
        for lease in gone.intersection(self._works):
            del self._works[lease]
        for task in [t for t, s in self._started.items() if (t, s.epoch) in gone]:
            del self._started[task]
        for task in [t for t, r in self._reached.items() if (t, r.epoch) in gone]:
            del self._reached[task]
        if not (self._items or self._started or self._reached):
            self._since = NEVER

    def ended_leases(self) -> set[tuple[int, int]]:
        """Leases whose end is not yet recorded: heartbeats still state them, so that the server keeps them."""
        found = {(i.task, i.epoch) for i in self._items if type(i) is Finished}
        for items, _ in self._batches.values():
            found |= {(i.task, i.epoch) for i in items if type(i) is Finished}
        return found

    @property
    def flush_at(self) -> int:
        if self._since == NEVER or len(self._batches) >= MAX_IN_FLIGHT:
            return NEVER
        return self._since + LINGER_US

    def flush(self, now: int) -> list[Reports]:
        frames: list[Reports] = []
        while (self._items or self._started or self._reached) and len(
            self._batches
        ) < MAX_IN_FLIGHT:
            if self._batches and len(self._items) < FULL and now < self._since + LINGER_US:
                break
            frames.append(self._next_batch())
        return frames

    def _next_batch(self) -> Reports:
        started: list[ReportItem] = [*self._started.values(), *self._reached.values()]
        self._started.clear()
        self._reached.clear()
        count = total = 0
        for size in self._sizes[:MAX_ITEMS]:
            if count and total + size > MAX_BYTES:
                break
            count += 1
            total += size
        items = started + self._items[:count]
        sizes = [ITEM_BYTES] * len(started) + self._sizes[:count]
        self._items = self._items[count:]
        self._sizes = self._sizes[count:]
        if not self._items:
            self._since = NEVER
        if self._works:
            items = self._signed(items)
        self._sequence += 1
        self._batches[self._sequence] = (items, sizes)
        return Reports(self._sequence, tuple(items))

    def _signed(self, items: list[ReportItem]) -> list[ReportItem]:
        """Sign the works of a batch once; a batch that is sent again keeps its signatures."""
        leases = [(item.task, item.epoch) for item in items if type(item) in ENDS]
        works = {lease: self._works.pop(lease) for lease in leases if lease in self._works}
        return self._sign(items, works) if works else items


def _without(
    items: list[ReportItem], sizes: list[int], unwanted: Callable[[ReportItem], bool]
) -> tuple[list[ReportItem], list[int]]:
    kept = [n for n, item in enumerate(items) if not unwanted(item)]
    if len(kept) == len(items):
        return items, sizes
    return [items[n] for n in kept], [sizes[n] for n in kept]
