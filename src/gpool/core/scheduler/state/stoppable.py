"""Running allocations that a pass may stop, grouped by class, and the waits of their tasks; both kept between passes.
The state reports changed allocations; a pass regroups those, and the ones whose protection, level or promotion changed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Mapping
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from gpool.core.ids import NodeId, UserId
from gpool.core.model import Instant, Span
from gpool.core.scheduler.order.fair_share import Amounts
from gpool.core.scheduler.order.orders import AGES, Promotion, level_of
from gpool.core.scheduler.state.waiting import HeldAllocation

MAX_CHANGED = 4096
"""Changed allocations that are remembered; past them all are read anew."""

_SLACK = 64


def is_protected(line: HeldAllocation, now: Instant, period: Span) -> bool:
    """A first start is not protected."""
    if line.since <= now - period:
        return False
    lease = next(iter(line.leases.values()))
    return lease.epoch > 1 or lease.attained > 0


class GroupKey(NamedTuple):
    user: UserId
    team: int | None
    amounts: Amounts
    level: int
    promotion: Promotion
    by: Instant | None  # deadline


class FreedParts:
    """Amounts that stopping these allocations frees, one column per part of a gang: CPU, memory, disk, GPUs (a slice counts as one)."""

    __slots__ = ("amounts", "lines", "nodes")

    def __init__(self, lines: Iterable[HeldAllocation]) -> None:
        parts = [(part, line) for line in lines for part in (line, *line.members)]
        self.lines = [line for _, line in parts]
        self.nodes: list[NodeId] = [part.node for part, _ in parts]
        held = [part.allocation for part, _ in parts]
        rows = [(a.cpu_milli, a.memory_bytes, a.disk_bytes, len(a.slices)) for a in held]
        self.amounts: npt.NDArray[np.int64] = np.array(rows, np.int64).reshape(-1, 4).T


class RunningGroup:
    """Allocations of one class in every order."""

    __slots__ = ("_freed", "lines")

    def __init__(self) -> None:
        self.lines: dict[HeldAllocation, None] = {}
        self._freed: FreedParts | None = None

    def add(self, line: HeldAllocation) -> None:
        self.lines[line] = None
        self._freed = None

    def remove(self, line: HeldAllocation) -> None:
        del self.lines[line]
        self._freed = None

    @property
    def freed(self) -> FreedParts:
        if self._freed is None:
            self._freed = FreedParts(self.lines)
        return self._freed


class PromotedTasks(Protocol):
    def of_user(self, user: UserId) -> Mapping[int, Promotion]: ...


class GroupingStage(NamedTuple):
    """Instant and protection period for which allocations are grouped."""

    now: Instant
    period: Span
    promotions: PromotedTasks


class _Grouped(NamedTuple):
    key: GroupKey
    task: int  # of the first lease


class RunningGroups:
    """Unprotected allocations that do not stop yet. Protection and levels end at known times, kept in a heap."""

    def __init__(self) -> None:
        self._groups: dict[GroupKey, RunningGroup] = {}
        self._at: dict[HeldAllocation, _Grouped] = {}
        self._lines: dict[int, HeldAllocation] = {}  # by the task of the first lease
        self._promoted: dict[UserId, Mapping[int, Promotion]] = {}
        self._due: list[tuple[int, int, HeldAllocation]] = []
        self._next: dict[HeldAllocation, int] = {}  # valid entry of `_due`
        self._serial = count()
        self._last: tuple[Instant, Span] | None = None

    def may_follow(self, stage: GroupingStage) -> bool:
        """Whether time did not go back and the period is the same."""
        return self._last is None or (self._last[0] <= stage.now and self._last[1] == stage.period)

    def at(
        self, stage: GroupingStage, changed: Iterable[HeldAllocation]
    ) -> Mapping[GroupKey, RunningGroup]:
        """`changed`: since the last call."""
        self._last = (stage.now, stage.period)
        again = dict.fromkeys(changed)
        again |= dict.fromkeys(self._ended(stage.now))
        again |= dict.fromkeys(self._of_changed_promotion(stage.promotions))
        for line in again:
            self._remove(line)
            if line.leases and not line.stopping:
                self._add(line, stage)
        return self._groups

    def _ended(self, now: Instant) -> list[HeldAllocation]:
        due, found = self._due, []
        while due and due[0][0] <= now:
            at, _, line = heappop(due)
            if self._next.get(line) == at:
                found.append(line)
        if len(due) > 2 * len(self._next) + _SLACK:
            self._due = [(at, next(self._serial), line) for line, at in self._next.items()]
            heapify(self._due)
        return found

    def _of_changed_promotion(self, promotions: PromotedTasks) -> list[HeldAllocation]:
        found: list[HeldAllocation] = []
        before, self._promoted = self._promoted, {}
        for user in {key.user for key in self._groups}:
            old, new = before.get(user, {}), promotions.of_user(user)
            self._promoted[user] = new
            if old != new:
                tasks = [task for task in old if new.get(task) is not old[task]]
                tasks += [task for task in new if task not in old]
                found += [self._lines[task] for task in tasks if task in self._lines]
        return found

    def _remove(self, line: HeldAllocation) -> None:
        self._next.pop(line, None)
        grouped = self._at.pop(line, None)
        if grouped is not None:
            group = self._groups[grouped.key]
            group.remove(line)
            if not group.lines:
                del self._groups[grouped.key]
            if self._lines.get(grouped.task) is line:
                del self._lines[grouped.task]

    def _add(self, line: HeldAllocation, stage: GroupingStage) -> None:
        now, shape = stage.now, line.shape
        if is_protected(line, now, stage.period):
            self._look_again(line, line.since + stage.period)
            return
        task, lease = next(iter(line.leases.items()))
        level = level_of(Span(lease.attained + max(0, now - line.since)))
        if level < len(AGES):
            self._look_again(line, line.since + AGES[level] - lease.attained)
        promoted = self._promoted.get(shape.user)
        if promoted is None:
            promoted = self._promoted[shape.user] = stage.promotions.of_user(shape.user)
        promotion = promoted.get(task, Promotion.NONE)
        key = GroupKey(shape.user, shape.team, line.amounts, level, promotion, shape.by)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = RunningGroup()
        group.add(line)
        self._at[line] = _Grouped(key, task)
        self._lines[task] = line

    def _look_again(self, line: HeldAllocation, at: int) -> None:
        self._next[line] = at
        heappush(self._due, (at, next(self._serial), line))


class WaitedTask(NamedTuple):
    """Sorts by age, then id."""

    queued_at: int
    task: int
    gpus: int  # thousandths
    waited: int


class _Waits:
    """Running tasks that waited for at least `least` before their start, by user, oldest first."""

    def __init__(self, least: Span) -> None:
        self.least = least
        self.by_user: dict[UserId, list[WaitedTask]] = {}
        self._of: dict[HeldAllocation, list[WaitedTask]] = {}

    def read(self, line: HeldAllocation) -> None:
        user = line.shape.user
        for each in self._of.pop(line, ()):
            theirs = self.by_user[user]
            del theirs[bisect_left(theirs, each)]
            if not theirs:
                del self.by_user[user]
        latest = line.since - self.least  # waited: until its start, less its run time before
        for task, lease in line.leases.items():
            waited = line.since - lease.queued_at - lease.attained
            if lease.queued_at <= latest and waited >= self.least:
                found = WaitedTask(lease.queued_at, task, line.amounts[0], waited)
                self._of.setdefault(line, []).append(found)
                insort(self.by_user.setdefault(user, []), found)


class _Changed:
    """Allocations changed since they were last read."""

    def __init__(self) -> None:
        self._lines: dict[HeldAllocation, None] | None = None

    def add(self, line: HeldAllocation) -> None:
        if self._lines is not None:
            self._lines[line] = None
            if len(self._lines) > MAX_CHANGED:
                self._lines = None

    def take(self) -> Iterable[HeldAllocation] | None:
        """None: any may have changed."""
        taken, self._lines = self._lines, {}
        return taken


class StoppableAllocations:
    """Allocations that are preemptible, or were preempted and have not stopped."""

    __slots__ = ("_groups", "_lines", "_stopping", "_to_group", "_to_read", "_waits")

    def __init__(self) -> None:
        self._lines: dict[tuple[NodeId, int], HeldAllocation] = {}
        self._stopping: dict[tuple[NodeId, int], HeldAllocation] = {}
        self._groups = RunningGroups()
        self._waits: _Waits | None = None
        self._to_group, self._to_read = _Changed(), _Changed()

    def __len__(self) -> int:
        return len(self._lines)

    def values(self) -> Collection[HeldAllocation]:
        return self._lines.values()

    def get(self, node: NodeId, number: int) -> HeldAllocation | None:
        return self._lines.get((node, number))

    @property
    def stopping(self) -> Collection[HeldAllocation]:
        return self._stopping.values()

    def put(self, line: HeldAllocation) -> None:
        key = (line.node, line.allocation.number)
        self._lines[key] = line
        if line.stopping:
            self._stopping[key] = line
        self.note(line)

    def drop(self, line: HeldAllocation) -> None:
        key = (line.node, line.allocation.number)
        if self._lines.pop(key, None) is not None:
            self._stopping.pop(key, None)
            self.note(line)

    def note(self, line: HeldAllocation) -> None:
        """Report a change of its leases."""
        self._to_group.add(line)
        self._to_read.add(line)

    def groups(self, stage: GroupingStage) -> Mapping[GroupKey, RunningGroup]:
        """Valid until the state or the instant changes."""
        changed = self._to_group.take()
        if changed is None or not self._groups.may_follow(stage):
            self._groups, changed = RunningGroups(), self._lines.values()
        return self._groups.at(stage, changed)

    def waited(self, user: UserId, least: Span) -> list[WaitedTask]:
        """The user's running tasks that waited for at least `least`, oldest first; not to be changed."""
        changed = self._to_read.take()
        if self._waits is None or self._waits.least != least or changed is None:
            self._waits, changed = _Waits(least), self._lines.values()
        for line in changed:
            self._waits.read(line)
        return self._waits.by_user.get(user, [])


def grouped(
    lines: Iterable[HeldAllocation], stage: GroupingStage
) -> Mapping[GroupKey, RunningGroup]:
    """Groups of some allocations, for one pass."""
    return RunningGroups().at(stage, lines)
