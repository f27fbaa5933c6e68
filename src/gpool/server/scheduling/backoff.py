"""Nodes that give back what they are given, cannot start it, or hold on to what is over, and are left alone for a while. Hints,
lost with the process.

How long one rests, `core.merits` says; whose fault it is that a task could not be started, `core.retries`. One that does not let go of a gang is not spoken to until its lease time is over:
then it has lost what it holds, by its own reckoning too, and the gang's other nodes are free.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from gpool.core.ids import NodeId, TaskId
from gpool.core.lifecycle import NO_FAULT
from gpool.core.model import Instant, TaskStatus
from gpool.core.scheduler.state.state import Line
from gpool.core.trust.reliability import backoff_after, backoff_for_fault
from gpool.server.store.values import Recording

GIVES_BACK = "gave back what it was given again and again"
CANNOT_START = "says that it cannot start anything just now"
STARTS_NOTHING = "could not start what was given to it, and others could"


class Rests:
    def __init__(self) -> None:
        self._times: dict[NodeId, int] = {}  # how much oftener they gave back than carried on
        self._faults: dict[NodeId, int] = {}  # ... could not start what they were given
        self._until: dict[NodeId, tuple[Instant, str]] = {}
        self.shunned: set[NodeId] = set()  # not spoken to until they have lost what they hold

    @property
    def is_any(self) -> bool:
        """Whether any node gave back anything, or was at fault."""
        return bool(self._times or self._faults)

    def why(self, node: NodeId) -> str:
        """Why it rests; empty: it does not."""
        return self._until[node][1] if node in self._until else ""

    def __contains__(self, node: NodeId) -> bool:
        return node in self._until

    def note(
        self, recording: Recording, held: Mapping[TaskId, Line], now: Instant
    ) -> Sequence[NodeId]:
        """Who carried what it was given to its end, and who gave it back though nobody asked it to; those that rest now.

        What waits in line behind something long, or behind what could not be started, is given back rightly: only a
        whole line counts.
        """
        again = {task.task for task in recording.requeued if task.fault is None}
        gave_back = set()
        for task in recording.requeued:
            line = held.get(task.task)
            if line is None or line.stopping or task.reason not in NO_FAULT:
                continue
            if line.tasks <= again:
                gave_back.add(task.node)
        ended = [each for each in recording.ended if each.task in held]
        good = [each for each in ended if each.status is TaskStatus.SUCCEEDED]
        _less(self._times, _nodes_of(held[each.task] for each in ended))
        _less(self._faults, _nodes_of(held[each.task] for each in good))
        return self._gave_back(gave_back, now)

    def _gave_back(self, nodes: Collection[NodeId], now: Instant) -> Sequence[NodeId]:
        """However much it was at once, it counts once."""
        resting = []
        for node in nodes:
            times = self._times[node] = self._times.get(node, 0) + 1
            rest = backoff_after(times)
            if rest:
                self._rest(node, Instant(now + rest), GIVES_BACK)
                resting.append(node)
        return resting

    def blame(self, nodes: Collection[NodeId], now: Instant, why: str) -> None:
        """It is their fault that tasks could not be started. However many it was while one rests, it counts once."""
        for node in nodes:
            if node not in self._until:
                times = self._faults[node] = self._faults.get(node, 0) + 1
                self._rest(node, Instant(now + backoff_for_fault(times)), why)

    def _rest(self, node: NodeId, until: Instant, why: str) -> None:
        if node not in self._until or self._until[node][0] < until:
            self._until[node] = (until, why)

    def over(self, now: Instant) -> Sequence[NodeId]:
        """Those that have rested."""
        found = [node for node, (until, _) in self._until.items() if until <= now]
        for node in found:
            del self._until[node]
        return found

    def forget(self, node: NodeId) -> None:
        self._times.pop(node, None)
        self._faults.pop(node, None)
        self._until.pop(node, None)
        self.shunned.discard(node)


def _nodes_of(lines: Iterable[Line]) -> set[NodeId]:
    return {part.node for line in lines for part in (line, *line.members)}


def _less(counts: dict[NodeId, int], nodes: Collection[NodeId]) -> None:
    for node in counts.keys() & nodes:
        counts[node] -= 1
        if not counts[node]:
            del counts[node]
