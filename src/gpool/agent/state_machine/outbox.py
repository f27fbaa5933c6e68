"""Reports on their way to the server: output gathered into chunks, GPU readings aggregated between heartbeats, reports
in numbered batches, kept until acknowledged.

With nothing in flight a report leaves at once; else reports gather until the batch is recorded, `LINGER_US` has passed
or `FULL` items wait. At most `MAX_IN_FLIGHT` batches are unrecorded; a reconnect sends them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from gpool.agent.state_machine.instructions import NEVER
from gpool.core.model import KIB, MIB, EndReason, Phase, Slice
from gpool.wire.frames import (
    Checkpointed,
    Finished,
    GpuReading,
    LogChunk,
    Progressed,
    Reached,
    ReportItem,
    Reports,
    Started,
    TaskReading,
)


class ReadingAverages:
    def __init__(self) -> None:
        self._readings: dict[int, list[GpuReading]] = {}

    def add(self, readings: Iterable[GpuReading]) -> None:
        for reading in readings:
            self._readings.setdefault(reading.gpu, []).append(reading)

    def take(self) -> tuple[GpuReading, ...]:
        """Return per GPU: mean utilisation and power, highest memory and temperature."""
        readings, self._readings = self._readings, {}
        return tuple(
            GpuReading(
                gpu,
                _mean([one.utilisation_percent for one in many]),
                _most([one.memory_bytes for one in many]),
                _mean([one.power_mw for one in many]),
                _most([one.temperature_c for one in many]),
            )
            for gpu, many in sorted(readings.items())
        )


def by_task(
    readings: Sequence[GpuReading], running: Mapping[tuple[int, int], tuple[Slice, ...]]
) -> tuple[TaskReading, ...]:
    """Reading for each running (task, epoch) on exclusive GPUs; shared ones have none."""
    by_gpu = {reading.gpu: reading for reading in readings}
    users: dict[int, int] = {}
    for slices in running.values():
        for part in slices:
            users[part.gpu_index] = users.get(part.gpu_index, 0) + 1
    found = []
    for (task, epoch), slices in running.items():
        mine = [by_gpu[part.gpu_index] for part in slices if part.gpu_index in by_gpu]
        if len(mine) < len(slices) or any(users[part.gpu_index] > 1 for part in slices) or not mine:
            continue
        found.append(
            TaskReading(
                task,
                epoch,
                _mean([one.utilisation_percent for one in mine]),
                _sum([one.memory_bytes for one in mine]),
                _sum([one.power_mw for one in mine]),
                _most([one.temperature_c for one in mine]),
            )
        )
    return tuple(found)


def _known(values: Sequence[int | None]) -> list[int]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[int | None]) -> int | None:
    known = _known(values)
    return round(sum(known) / len(known)) if known else None


def _sum(values: Sequence[int | None]) -> int | None:
    known = _known(values)
    return sum(known) if known else None


def _most(values: Sequence[int | None]) -> int | None:
    return max(_known(values), default=None)


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


class Outbox:
    __slots__ = (
        "_batches",
        "_items",
        "_reached",
        "_sequence",
        "_since",
        "_sizes",
        "_started",
        "progress",
    )

    def __init__(self) -> None:
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

    def add(self, now: int, item: ReportItem, data_bytes: int = 0) -> None:
        if self._since == NEVER:
            self._since = now
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
        self._sequence += 1
        self._batches[self._sequence] = (items, sizes)
        return Reports(self._sequence, tuple(items))


def _without(
    items: list[ReportItem], sizes: list[int], unwanted: Callable[[ReportItem], bool]
) -> tuple[list[ReportItem], list[int]]:
    kept = [n for n, item in enumerate(items) if not unwanted(item)]
    if len(kept) == len(items):
        return items, sizes
    return [items[n] for n in kept], [sizes[n] for n in kept]
