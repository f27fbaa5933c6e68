"""Reliability of nodes: failed starts with the node to blame, losses, backoff, verified GPU speed. Pure.

**Losses.** The record is the node's connected time and its losses with leases, both decaying with `HALF_LIFE`. The mean
time between losses is estimated as if the node had also been observed for `PRIOR` with one loss: the MTBF of a new node.

**Backoff.** A node that returns every lease unstarted would get the same again at once. After `FREE` returns more than
completions it gets a backoff that doubles each time; a node to blame for failed starts (`core.reliability`) from the first
time. Example: 9 returns without a completion: 1 s, 10: 2 s, 11: 4 s, up to 600 s.

Results are rounded to coarse steps, so that values seldom change and similar nodes are equal.

**The task.** A failed start uses no retry: the task is requeued and prefers nodes not tried yet (`Shape.avoids`). It
fails with the last node's message after `MAX_UNSTARTED` tries, or `MAX_BY_NODE` where nodes blamed themselves.

**The node.** A consumer can cause failed starts (a missing image) and must not be able to take a provider out of the
pool. Evidence is:

- the node's report that it cannot start even the simplest sandbox;
- tasks of `ENOUGH` different users that failed to start there and started elsewhere; never one user's tasks, nor tasks
  that start nowhere.

Example: tasks of ann and bob fail to start on n1, then run on n2: n1 gets a backoff. If both tasks were ann's, n1 gets
none. Starting any task clears a node of its evidence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import log2

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.lifecycle import Move
from gpool.core.model import SECOND, EndReason, Fault, Instant, Merit, Span

_HOUR = 3600 * 1_000_000
_NONE, _NEVER = Span(0), Instant(0)
PRIOR = Merit().mtbf
HALF_LIFE = Span(14 * 24 * _HOUR)
LOSS = 1000
"""Weight of one loss: losses decay, so they are counted in thousandths."""


@dataclass(frozen=True, slots=True)
class ReliabilityRecord:
    up: Span = _NONE
    losses_milli: int = 0
    at: Instant = _NEVER

    def later(self, at: Instant, up: Span = _NONE, losses: int = 0) -> ReliabilityRecord:
        passed = max(0, at - self.at)
        kept = 0.5 ** (passed / HALF_LIFE)
        return ReliabilityRecord(
            Span(round(self.up * kept) + up),
            round(self.losses_milli * kept) + LOSS * losses,
            Instant(max(at, self.at)),
        )

    @property
    def mtbf(self) -> Span:
        """Rounded to powers of two of an hour."""
        mean = LOSS * (self.up + PRIOR) / (self.losses_milli + LOSS)
        return Span(_HOUR << min(16, max(0, round(log2(mean / _HOUR)))))


FREE = 8
LONGEST_BACKOFF = Span(600 * SECOND)
SHORTEST_BACKOFF = Span(2 * SECOND)


def backoff_after(times: int) -> Span:
    """`times`: returns less completions."""
    if times <= FREE:
        return _NONE
    return Span(min(LONGEST_BACKOFF, SECOND << min(times - FREE - 1, 20)))


def backoff_for_fault(times: int) -> Span:
    """Backoff of a node to blame for failed starts; `times`: faults less completions."""
    if times <= 0:
        return _NONE
    return Span(min(LONGEST_BACKOFF, SHORTEST_BACKOFF << min(times - 1, 20)))


def least_rate(measured: Iterable[int]) -> int:
    """The slowest GPU's rate, rounded down to half an octave; 0 if one was not measured."""
    slowest = min(measured, default=0)
    if slowest <= 0:
        return 0
    return round(2 ** (int(2 * log2(slowest)) / 2))


MAX_UNSTARTED = 3
"""Failed starts of a task before it fails, where no node blames itself; its retries are added."""

MAX_BY_NODE = 5
"""The same limit for all failed starts together."""

ENOUGH = 2
"""Users whose tasks could not be started on a node and started elsewhere."""


@dataclass(frozen=True, slots=True)
class Unstarted:
    """Failed starts of a task; `by_node`: those for which the node blamed itself."""

    unclear: int = 0
    by_node: int = 0

    def and_one(self, fault: Fault) -> Unstarted:
        if fault is Fault.UNCLEAR:
            return Unstarted(self.unclear + 1, self.by_node)
        return Unstarted(self.unclear, self.by_node + 1)

    @property
    def times(self) -> int:
        return self.unclear + self.by_node


def unstarted_move(tries: Unstarted, retries: int) -> Move:
    """`tries` includes the present failure."""
    if tries.unclear >= MAX_UNSTARTED + retries or tries.times >= MAX_BY_NODE + retries:
        return Move.FAILED
    return Move.REQUEUED


def archived_as(fault: Fault) -> EndReason:
    return EndReason.SANDBOX_FAILED if fault is Fault.UNCLEAR else EndReason.NODE_FAILED


def given_up(said: str, tries: Unstarted) -> str:
    """The last node's message comes first."""
    if tries.times < 2:
        return said
    return f"{said} (it was tried {tries.times} times and could not be started)".lstrip()


class Evidence:
    """Folded from committed events. A task's evidence ends with it."""

    def __init__(self) -> None:
        self._tried: dict[TaskId, tuple[UserId, set[NodeId]]] = {}  # nodes with failed starts
        self._against: dict[NodeId, set[UserId]] = {}

    @property
    def is_any(self) -> bool:
        return bool(self._tried or self._against)

    @property
    def against(self) -> Mapping[NodeId, Collection[UserId]]:
        return self._against

    def failed(self, task: TaskId, user: UserId, node: NodeId, fault: Fault) -> bool:
        """Return whether this failure alone blames the node."""
        if fault is Fault.NODE:
            return True
        if fault is Fault.UNCLEAR:
            self._tried.setdefault(task, (user, set()))[1].add(node)
        return False

    def began(self, task: TaskId, nodes: Collection[NodeId]) -> list[NodeId]:
        """Return the nodes blamed by the task's earlier failed starts."""
        for node in self._against.keys() & set(nodes):
            del self._against[node]
        user, tried = self._tried.pop(task, (None, set[NodeId]()))
        if user is None:
            return []
        found = []
        for node in sorted(tried.difference(nodes)):
            users = self._against.setdefault(node, set())
            users.add(user)
            if len(users) >= ENOUGH:
                found.append(node)
                del self._against[node]
        return found

    def ended(self, tasks: Collection[TaskId]) -> None:
        """Tasks that ended without a start are no evidence."""
        if self._tried:
            for task in tasks:
                self._tried.pop(task, None)

    def forget(self, node: NodeId) -> None:
        self._against.pop(node, None)
        for _, tried in self._tried.values():
            tried.discard(node)
