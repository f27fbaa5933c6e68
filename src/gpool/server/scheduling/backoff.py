"""Backoff: nodes and tasks left out of planning for a while. In memory only; a restart forgets it.

**A node that returns leases** (`NodeBackoff`). A counter goes up by 1 when a node returns a whole allocation unasked,
and down by 1 when an attempt ends there. Above 8 the node gets no leases for 1, 2, 4 ... 600 s
(`core.reliability`). Nobody is at fault, so the task's retry count stays. Example: a node returns each lease at
once. After the 9th it is out for 1 s, after the 10th for 2 s, after the 11th for 4 s.

**A node that cannot start tasks** (`FailedStarts`, decision 0017, `core.reliability`). The node is at fault if it says so,
or if tasks of two users failed to start there and began elsewhere: ran for 10 s or succeeded. One user's tasks never
count alone, because a consumer can submit tasks that start nowhere. Backoff is 2, 4, 8 ... 600 s; a successful attempt
lowers the count by 1. Example: tasks of users A and B fail on node 7 at 12:00:00 and begin on node 8 at 12:00:05. At
12:00:15 both have run for 10 s, and node 7 is out until 12:00:17. In any case a task that failed to start on a node
goes to other nodes first (`Shape.avoids`).

**A task whose plan the store rejects** (`RejectedPlans`). One rejection is normal: something was committed between
plan and write. At the second in a row the picture is rebuilt. From the third on the task leaves the queue for 1, 2,
4 ... 60 s, so that passes are not spent on it. Example: rejected at 0 s, 1 s and 2 s, it is planned at 3 s, then 5 s.
A task whose payer lacks funds leaves the queue until the payer's balance or budget allows it, at most for 60 s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gpool.core.ids import NodeId, TaskId
from gpool.core.lifecycle import NO_FAULT
from gpool.core.model import SECOND, Instant, Shape, Span, TaskStatus
from gpool.core.reliability import Evidence, backoff_after, backoff_for_fault
from gpool.core.scheduler.explain.mismatch import Explanation, counted
from gpool.core.scheduler.order.limits import Holder
from gpool.core.scheduler.state.events import Placement, QueuedTask, TasksQueued, TasksWithdrawn
from gpool.core.scheduler.state.queue import epoch_of
from gpool.core.scheduler.state.state import State
from gpool.core.scheduler.state.waiting import HeldAllocation
from gpool.observability.logs import get_logger
from gpool.server.store.values import Recording, UnfundedPlace

log = get_logger(__name__)

RETURNS_LEASES = "returned its leases again and again"
CANNOT_START = "reports that it cannot start tasks"
STARTS_NOTHING = "failed to start tasks that started on other nodes"

STARTED_AFTER = Span(10 * SECOND)
"""An attempt counts as started after this run time: a sandbox may fail a moment after it was reported running."""

REBUILD_AFTER = 2
"""Rejections of a task's plan in a row after which the picture is rebuilt."""

LONGEST_PAUSE = Span(60 * SECOND)
"""Longest pause of a task whose plans are rejected."""


class NodeBackoff:
    def __init__(self) -> None:
        self._returns: dict[NodeId, int] = {}  # allocations returned minus attempts ended
        self._faults: dict[NodeId, int] = {}  # failed starts minus attempts that succeeded
        self._until: dict[NodeId, tuple[Instant, str]] = {}

    @property
    def is_any(self) -> bool:
        return bool(self._returns or self._faults)

    def reason(self, node: NodeId) -> str:
        return self._until[node][1] if node in self._until else ""

    def __contains__(self, node: NodeId) -> bool:
        return node in self._until

    def count(
        self, recording: Recording, held: Mapping[TaskId, HeldAllocation], now: Instant
    ) -> Sequence[NodeId]:
        """Count returned allocations and ended attempts; return nodes whose backoff begins.

        Only whole allocations count: leases queued behind a long or failed one are returned rightly.
        """
        again = {task.task for task in recording.requeued if task.fault is None}
        returned = set()
        for task in recording.requeued:
            line = held.get(task.task)
            if line is None or line.stopping or task.reason not in NO_FAULT:
                continue
            if line.tasks <= again:
                returned.add(task.node)
        ended = [each for each in recording.ended if each.task in held]
        good = [each for each in ended if each.status is TaskStatus.SUCCEEDED]
        _decrement(self._returns, _nodes_of(held[each.task] for each in ended))
        _decrement(self._faults, _nodes_of(held[each.task] for each in good))
        return self._count_returns(returned, now)

    def _count_returns(self, nodes: Collection[NodeId], now: Instant) -> Sequence[NodeId]:
        """Count once per node, however many allocations one recording returned."""
        begins = []
        for node in nodes:
            times = self._returns[node] = self._returns.get(node, 0) + 1
            lasts = backoff_after(times)
            if lasts:
                self._extend(node, Instant(now + lasts), RETURNS_LEASES)
                log.warning("backoff begins", node=node, why=RETURNS_LEASES)
                begins.append(node)
        return begins

    def blame(self, nodes: Collection[NodeId], now: Instant, why: str) -> None:
        for node in nodes:
            if node not in self._until:
                times = self._faults[node] = self._faults.get(node, 0) + 1
                self._extend(node, Instant(now + backoff_for_fault(times)), why)

    def _extend(self, node: NodeId, until: Instant, why: str) -> None:
        if node not in self._until or self._until[node][0] < until:
            self._until[node] = (until, why)

    def end_expired(self, now: Instant) -> Sequence[NodeId]:
        found = [node for node, (until, _) in self._until.items() if until <= now]
        for node in found:
            del self._until[node]
        return found

    def forget(self, node: NodeId) -> None:
        self._returns.pop(node, None)
        self._faults.pop(node, None)
        self._until.pop(node, None)


def _nodes_of(lines: Iterable[HeldAllocation]) -> set[NodeId]:
    return {part.node for line in lines for part in (line, *line.members)}


def _decrement(counts: dict[NodeId, int], nodes: Collection[NodeId]) -> None:
    for node in counts.keys() & nodes:
        counts[node] -= 1
        if not counts[node]:
            del counts[node]


class FailedStarts:
    """The store has the tried nodes of each open task; the evidence against nodes is lost with the process."""

    def __init__(self, backoff: NodeBackoff) -> None:
        self._backoff = backoff
        self._evidence = Evidence()
        self._tried: dict[TaskId, tuple[NodeId, ...]] = {}
        self._started: dict[TaskId, tuple[NodeId, Instant]] = {}  # reported running: where, when

    @property
    def is_any(self) -> bool:
        return bool(self._tried) or self._evidence.is_any

    def tried(self, task: TaskId) -> tuple[NodeId, ...]:
        return self._tried.get(task, ())

    def shape_for(self, task: TaskId, shape: Shape) -> Shape:
        tried = self._tried.get(task)
        return shape if tried is None else replace(shape, avoids=tried)

    def rebuild(self, tried: Iterable[tuple[TaskId, NodeId]]) -> None:
        before, self._tried, self._started = self._tried, {}, {}
        for task, node in tried:
            self._add(task, node)
        self._evidence.ended(before.keys() - self._tried.keys())

    def _add(self, task: TaskId, node: NodeId) -> None:
        """Keep the nodes sorted, so that tasks tried on the same nodes share one shape."""
        self._tried[task] = tuple(sorted({*self._tried.get(task, ()), node}))

    def count(
        self, recording: Recording, held: Mapping[TaskId, HeldAllocation], now: Instant | None
    ) -> Iterable[NodeId]:
        """Count a recording before it is folded; return nodes whose backoff begins (none without `now`)."""
        own: list[NodeId] = []
        others: list[NodeId] = []
        for task in recording.requeued:
            if task.fault is not None:
                self._add(task.task, task.node)
                line = held.get(task.task)
                if line is not None and line.members:
                    continue  # a gang's first member says nothing about the others
                if self._evidence.failed(task.task, task.user, task.node, task.fault):
                    own.append(task.node)
        if now is not None and self._evidence.is_any:
            for id_, node in self._began(recording, held, now):
                others += self._evidence.began(id_, {node})
        self.forget((*(end.task for end in recording.ended), *recording.withdrawn))
        if now is None:
            return ()
        self._backoff.blame(own, now, CANNOT_START)
        self._backoff.blame(others, now, STARTS_NOTHING)
        blamed = dict.fromkeys((*own, *others))
        for node in blamed:
            log.warning("backoff begins", node=node, why=self._backoff.reason(node))
        return blamed

    def _began(
        self, recording: Recording, held: Mapping[TaskId, HeldAllocation], now: Instant
    ) -> Iterable[tuple[TaskId, NodeId]]:
        """Tasks that certainly began, with their nodes. No gangs: the first member says nothing about the others."""
        found: dict[TaskId, NodeId] = {}
        for end in recording.ended:
            line = held.get(end.task)
            if end.status is TaskStatus.SUCCEEDED and line is not None and not line.members:
                found[end.task] = line.node
        for task in (*(end.task for end in recording.ended), *(t.task for t in recording.requeued)):
            self._started.pop(task, None)
        for id_ in recording.started:
            line = held.get(id_)
            is_evidence = line is not None and (
                id_ in self._tried or line.node in self._evidence.against
            )
            if line is not None and is_evidence and not line.members:
                self._started[id_] = (line.node, now)
        for id_, (node, since) in list(self._started.items()):
            if now - since >= STARTED_AFTER:
                del self._started[id_]
                found[id_] = node
        return list(found.items())

    def forget(self, tasks: Iterable[TaskId]) -> None:
        if self.is_any:
            gone = list(tasks)
            self._evidence.ended(gone)
            for task in gone:
                self._tried.pop(task, None)
                self._started.pop(task, None)

    def forget_node(self, node: NodeId) -> None:
        self._evidence.forget(node)


@dataclass(frozen=True, slots=True)
class _PausedTask:
    shape: Shape
    task: QueuedTask
    until: Instant
    unfunded: UnfundedPlace | None = None  # None: its plans were rejected


def pause_after(rejections: int) -> Span:
    beyond = rejections - REBUILD_AFTER
    return Span(0) if beyond <= 0 else Span(min(LONGEST_PAUSE, SECOND << min(beyond - 1, 10)))


class RejectedPlans:
    def __init__(self) -> None:
        self._counts: dict[TaskId, int] = {}  # rejections in a row
        self._paused: dict[TaskId, _PausedTask] = {}
        self.total = 0  # rejections since the server started

    def __contains__(self, task: TaskId) -> bool:
        return task in self._paused

    def __len__(self) -> int:
        return len(self._paused)

    def explanation(self, task: TaskId, now: Instant) -> Explanation | None:
        paused = self._paused.get(task)
        if paused is None or paused.unfunded is not None:
            return None
        times = counted(self._counts.get(task, 0), "time", "times")
        left = max(1, -(-(paused.until - now) // SECOND))
        return Explanation(
            "refused",
            f"The store rejected its planned start {times} in a row: the stored task or node did not allow it, and the "
            f"operator's log has the details. It is planned again in {left} s.",
        )

    def forget(self, tasks: Collection[TaskId]) -> None:
        if self._counts:
            for task in tasks:
                self._counts.pop(task, None)
                self._paused.pop(task, None)

    def count(self, places: Sequence[Placement], granted: Collection[TaskId]) -> list[TaskId]:
        self.forget(granted)
        asked = dict.fromkeys(grant.task for place in places for grant in place.grants)
        rejected = [task for task in asked if task not in granted]
        self.total += len(rejected)
        for task in rejected:
            self._counts[task] = self._counts.get(task, 0) + 1
        return rejected

    def needs_rebuild(self, rejected: Collection[TaskId]) -> bool:
        return any(self._counts[task] == REBUILD_AFTER for task in rejected)

    def pause(self, state: State, rejected: Collection[TaskId], now: Instant) -> None:
        for task in rejected:
            pause = pause_after(self._counts[task])
            if pause or state.queue_of(task) is None:  # cancelled meanwhile: it is forgotten
                self._withdraw(state, task, Instant(now + pause))

    def block(self, state: State, places: Sequence[UnfundedPlace], now: Instant) -> None:
        """Keep tasks without funds out of the queue until `release_payers`, at most for `LONGEST_PAUSE`."""
        for place in places:
            for task in place.tasks:
                self._counts.setdefault(task, 0)
                self._withdraw(state, task, Instant(now + LONGEST_PAUSE), place)

    def unfunded(self, task: TaskId) -> UnfundedPlace | None:
        paused = self._paused.get(task)
        return None if paused is None else paused.unfunded

    def blocked_payers(self) -> dict[Holder, int]:
        """Payers of tasks without funds, with the least that one of their tasks needs."""
        found: dict[Holder, int] = {}
        for paused in self._paused.values():
            place = paused.unfunded
            if place is not None:
                found[place.payer] = min(place.needed, found.get(place.payer, place.needed))
        return found

    def release_payers(self, payers: Collection[Holder]) -> list[TasksQueued]:
        return self._end(
            [
                paused
                for paused in self._paused.values()
                if paused.unfunded is not None and paused.unfunded.payer in payers
            ]
        )

    def _withdraw(
        self, state: State, task: TaskId, until: Instant, unfunded: UnfundedPlace | None = None
    ) -> None:
        waiting = state.queue_of(task)
        entry = None if waiting is None else waiting.queue.entry_of(task)
        if waiting is None or entry is None:
            self.forget((task,))
            return
        attained = state.attained(task, Instant(0))
        again = QueuedTask(task, epoch_of(entry), Instant(entry[0]), attained)
        self._paused[task] = _PausedTask(waiting.shape, again, until, unfunded)
        state.fold(TasksWithdrawn((task,)))

    def end_expired(self, now: Instant) -> list[TasksQueued]:
        return self._end([paused for paused in self._paused.values() if paused.until <= now])

    def _end(self, over: Sequence[_PausedTask]) -> list[TasksQueued]:
        for paused in over:
            del self._paused[paused.task.id]
        return [TasksQueued(paused.shape, (paused.task,)) for paused in over]

    def rebuild(self, state: State) -> None:
        """Apply the pauses to a rebuilt state, whose queue holds every queued task."""
        self._counts = {
            task: count for task, count in self._counts.items() if state.queue_of(task) is not None
        }
        for task, paused in list(self._paused.items()):
            del self._paused[task]
            self._withdraw(state, task, paused.until, paused.unfunded)
