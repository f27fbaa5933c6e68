"""Waiting tasks of one shape, oldest first, in 24 bytes a task: three packed columns and a head index.
Late tasks (a lost lease returns with its old age) are in a sorted list, merged when read. A task that leaves from the
middle stays as a dead entry until it reaches the front or dead entries outnumber the rest.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from itertools import takewhile
from typing import NamedTuple

from gpool.core.ids import TaskId
from gpool.core.model import Shape
from gpool.core.scheduler.state.events import QueuedTask


class TaskQueueEntry(NamedTuple):
    """Waiting task; sorts by age, then id.

    The lower half of the stamp is the epoch (`epoch_of`). The upper half grows when tasks arrive while dead entries exist,
    so that a task that left and returned under one epoch is not taken for its dead entry.
    """

    queued_at: int
    task: int
    stamp: int


class QueueTicket(NamedTuple):
    """Shared by tasks with equal stamps."""

    queue: Queue
    stamp: int


_EPOCH_BITS = 32
_EPOCH_MASK = (1 << _EPOCH_BITS) - 1
_SLACK = 256


def epoch_of(entry: TaskQueueEntry | QueueTicket) -> int:
    return entry.stamp & _EPOCH_MASK


class Queue:
    """`live` is shared by all queues of a state: a task waits if and only if it has a ticket."""

    __slots__ = (
        "_arrival",
        "_head",
        "_ids",
        "_late",
        "_live",
        "_since",
        "_stamps",
        "_tickets",
        "shape",
        "size",
    )

    def __init__(self, shape: Shape, live: dict[TaskId, QueueTicket]) -> None:
        self.shape = shape
        self.size = 0
        self._live = live
        self._tickets: dict[int, QueueTicket] = {}
        self._since = array("q")
        self._ids = array("q")
        self._stamps = array("q")
        self._head = 0
        self._arrival = 0
        self._late: list[TaskQueueEntry] = []

    def add(self, tasks: Iterable[QueuedTask]) -> set[Queue]:
        """Return the queues that lost tasks, to be tidied. A waiting task keeps its position unless its epoch changed."""
        live, tickets = self._live, self._tickets
        since, ids, stamps = self._since, self._ids, self._stamps
        last_at, last_id = (since[-1], ids[-1]) if since else (-1, -1)
        late: list[TaskQueueEntry] = []
        left: set[Queue] = set()
        if not self._has_no_dead():
            self._arrival += 1
        added, stamp, epoch_before = 0, -1, -1
        ticket: QueueTicket | None = None
        for task in tasks:
            id_, epoch, at = task.id, task.epoch, task.queued_at
            if id_ in live:
                queue, waiting = live[id_]
                if queue is self and waiting & _EPOCH_MASK == epoch:
                    continue
                queue.size -= 1
                left.add(queue)
            if epoch != epoch_before:
                epoch_before = epoch
                stamp = self._arrival << _EPOCH_BITS | epoch
                known = tickets.get(stamp)
                ticket = tickets[stamp] = known or QueueTicket(self, stamp)
            assert ticket is not None
            live[id_] = ticket
            added += 1
            if at > last_at or (at == last_at and id_ > last_id):
                since.append(at)
                ids.append(id_)
                stamps.append(stamp)
                last_at, last_id = at, id_
            else:
                late.append(TaskQueueEntry(at, id_, stamp))
        self.size += added
        if len(late) == 1:
            insort(self._late, late[0])
        elif late:
            self._late += late
            self._late.sort()
        return left

    def tidy(self) -> None:
        live, ids, stamps, head = self._live, self._ids, self._stamps, self._head
        end = len(ids)
        while head < end:
            ticket = live.get(TaskId(ids[head]))
            if ticket is not None and ticket.queue is self and ticket.stamp == stamps[head]:
                break
            head += 1
        self._head = head
        if self._late and not self._is_live(self._late[0]):
            first = next((i for i, e in enumerate(self._late) if self._is_live(e)), len(self._late))
            del self._late[:first]
        if end + len(self._late) - self.size > self.size + _SLACK or self.size == 0:
            self._compact()

    def _compact(self) -> None:
        if self._has_no_dead():
            del self._since[: self._head], self._ids[: self._head], self._stamps[: self._head]
            self._head = 0
            return
        kept = list(self.entries())
        self._since = array("q", [at for at, _, _ in kept])
        self._ids = array("q", [id_ for _, id_, _ in kept])
        self._stamps = array("q", [stamp for _, _, stamp in kept])
        self._head = 0
        self._late = []
        used = set(self._stamps)
        self._tickets = {stamp: t for stamp, t in self._tickets.items() if stamp in used}

    def entries(self) -> Iterator[TaskQueueEntry]:
        if self._late:
            late = (entry for entry in self._late if self._is_live(entry))
            return merge(self._in_order(), late)
        return self._in_order()

    def head(self) -> TaskQueueEntry | None:
        return next(self.entries(), None)

    def front(self) -> TaskQueueEntry:
        at, fronts = self._head, self._late[:1]
        if at < len(self._ids):
            fronts.append(TaskQueueEntry(self._since[at], self._ids[at], self._stamps[at]))
        if fronts and all(map(self._is_live, fronts)):
            return min(fronts)
        return next(self.entries())

    def entry_of(self, task: TaskId) -> TaskQueueEntry | None:
        ticket = self._live.get(task)
        if ticket is None or ticket.queue is not self:
            return None
        at = self._head
        while True:
            try:
                at = self._ids.index(task, at)
            except ValueError:
                break
            if self._stamps[at] == ticket.stamp:
                return TaskQueueEntry(self._since[at], task, ticket.stamp)
            at += 1
        return next(e for e in self._late if e.task == task and e.stamp == ticket.stamp)

    def count_while(self, is_ahead: Callable[[int, TaskQueueEntry], bool]) -> int:
        """`is_ahead(position, entry)` is monotone."""
        if self._late or not self._has_no_dead():
            ahead = takewhile(lambda pair: is_ahead(*pair), enumerate(self.entries()))
            return sum(1 for _ in ahead)
        low, high, head = 0, self.size, self._head
        while low < high:
            middle = (low + high) // 2
            at = head + middle
            if is_ahead(middle, TaskQueueEntry(self._since[at], self._ids[at], self._stamps[at])):
                low = middle + 1
            else:
                high = middle
        return low

    def count_older(self, at: int) -> int:
        """Upper bound of the tasks queued before `at`, by binary search; entries that left from the middle count."""
        older = bisect_left(self._since, at, self._head) - self._head
        return min(self.size, older + bisect_left(self._late, (at,)))

    def _is_live(self, entry: TaskQueueEntry) -> bool:
        ticket = self._live.get(TaskId(entry.task))
        return ticket is not None and ticket.queue is self and ticket.stamp == entry.stamp

    def _in_order(self) -> Iterator[TaskQueueEntry]:
        live, start, chunk = self._live, self._head, 4
        while start < len(self._ids):
            end = start + chunk
            block = map(
                TaskQueueEntry,
                self._since[start:end],
                self._ids[start:end],
                self._stamps[start:end],
            )
            if self._has_no_dead():
                yield from block
            else:
                for entry in block:
                    ticket = live.get(TaskId(entry.task))
                    if ticket is not None and ticket.queue is self and ticket.stamp == entry.stamp:
                        yield entry
            start, chunk = end, 512

    def _has_no_dead(self) -> bool:
        return len(self._ids) - self._head + len(self._late) == self.size
