"""Nodes that give back what they are given, or hold on to what is over, and are left alone for a while. Hints, lost with the process.

How long one rests, `core.merits` says. One that does not let go of a gang is not spoken to until its lease time is over:
then it has lost what it holds, by its own reckoning too, and the gang's other nodes are free.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gpool.core.ids import NodeId, TaskId
from gpool.core.lifecycle import NO_FAULT
from gpool.core.merits import rest_after
from gpool.core.model import Instant
from gpool.core.scheduling.state import Line
from gpool.server.store.values import Recording


class Rests:
    def __init__(self) -> None:
        self._times: dict[NodeId, int] = {}  # how much oftener they gave back than carried on
        self._until: dict[NodeId, Instant] = {}
        self.shunned: set[NodeId] = set()  # not spoken to until they have lost what they hold

    @property
    def is_any(self) -> bool:
        """Whether any node gave back anything."""
        return bool(self._times)

    def __contains__(self, node: NodeId) -> bool:
        return node in self._until

    def note(
        self, recording: Recording, held: Mapping[TaskId, Line], now: Instant
    ) -> Sequence[NodeId]:
        """Who carried what it was given to its end, and who gave it back though nobody asked it to; those that rest now.

        What waits in line behind something long is given back rightly: only a whole line counts.
        """
        again = {task.task for task in recording.requeued}
        gave_back = set()
        for task in recording.requeued:
            line = held.get(task.task)
            if line is None or line.stopping or task.reason not in NO_FAULT:
                continue
            if line.tasks <= again:
                gave_back.add(task.node)
        lines = [held[each.task] for each in recording.ended if each.task in held]
        self._carried({part.node for line in lines for part in (line, *line.members)})
        return self._gave_back(gave_back, now)

    def _gave_back(self, nodes: Collection[NodeId], now: Instant) -> Sequence[NodeId]:
        """However much it was at once, it counts once."""
        resting = []
        for node in nodes:
            times = self._times[node] = self._times.get(node, 0) + 1
            rest = rest_after(times)
            if rest:
                self._until[node] = Instant(now + rest)
                resting.append(node)
        return resting

    def _carried(self, nodes: Collection[NodeId]) -> None:
        for node in self._times.keys() & nodes:
            self._times[node] -= 1
            if not self._times[node]:
                del self._times[node]

    def over(self, now: Instant) -> Sequence[NodeId]:
        """Those that have rested."""
        found = [node for node, until in self._until.items() if until <= now]
        for node in found:
            del self._until[node]
        return found

    def forget(self, node: NodeId) -> None:
        self._times.pop(node, None)
        self._until.pop(node, None)
        self.shunned.discard(node)
