"""Rounds of siblings: which runs count as answers, which are replaced, and when a parent has no chance left. Pure.

    verify=2    round 1: two siblings          both answer 7                 accepted
                round 1: two siblings          7 and 8                       More(3): round 2
                round 2: three more siblings   7, 7, 7                       4 : 1, a lead of 3: accepted
    verify=spot round 1: one sibling           not drawn for a check         accepted
                round 1: one sibling           drawn                         as verify=2 with one answer

A round is decided when every sibling of it has answered or has been replaced: no answer is read before. A sibling that
gave no answer (its node was lost, could not start it, or is late) is void; another owner's node gets the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import SECOND, EndReason, Instant, Span
from gpool.core.trust.comparison import Same
from gpool.core.trust.quorum import QUORUMS, Decision, More, Quorum, QuorumReached, decide

SPOT = 1
"""`Requirements.siblings` of a spot-checked task: one sibling, and a quorum of two only if it is drawn for a check."""

NO_ANSWERS = frozenset(
    {
        EndReason.CANCELLED,
        EndReason.BAD_INPUT,
        EndReason.LOSES_NODES,
        EndReason.SANDBOX_FAILED,
        EndReason.OUT_OF_FUNDS,
        EndReason.NODE_FAILED,
        EndReason.LOST,
        EndReason.HANDED_BACK,
        EndReason.PREEMPTED,
    }
)
"""Ends that say nothing about the task's answer. All others are answers, failures of the task included."""

MOST_VOID = 8
"""Siblings without an answer after which a parent fails: no node can run it."""

AWAY = Span(60 * SECOND)
"""Time that a waiting sibling of a closed or disconnected node waits for it."""

BUSY = Span(600 * SECOND)
"""Time that a sibling waits for a busy node."""

LEAST_PATIENCE = Span(600 * SECOND)
PATIENCE = 4
"""Once a sibling has answered, the others may take this many times as long, and at least `LEAST_PATIENCE`."""


_NOT_RUN = Span(0)


class RunState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    ANSWERED = "answered"
    VOID = "void"


@dataclass(frozen=True, slots=True)
class SiblingRun:
    """`since`: queued or leased then. `ran`: from the lease to the answer."""

    task: TaskId
    node: NodeId
    state: RunState
    since: Instant
    ran: Span = _NOT_RUN


def rule_for(siblings: int) -> Quorum:
    return QUORUMS[max(2, siblings)]


def late(
    runs: Sequence[SiblingRun], away: Collection[NodeId], now: Instant
) -> tuple[SiblingRun, ...]:
    """Return the open siblings to replace. `away`: nodes that take no tasks now."""
    longest = max((run.ran for run in runs if run.state is RunState.ANSWERED), default=None)
    found = []
    for run in runs:
        age = now - run.since
        if run.state is RunState.WAITING:
            is_late = age > (AWAY if run.node in away else BUSY)
        elif run.state is RunState.RUNNING and longest is not None:
            is_late = age > max(LEAST_PATIENCE, PATIENCE * longest)
        else:
            is_late = False
        if is_late:
            found.append(run)
    return tuple(found)


def is_open(runs: Sequence[SiblingRun]) -> bool:
    return any(run.state in (RunState.WAITING, RunState.RUNNING) for run in runs)


def is_hopeless(runs: Sequence[SiblingRun]) -> bool:
    return sum(run.state is RunState.VOID for run in runs) >= MOST_VOID


def verdict(siblings: int, answers: int, same: Same, *, is_checked: bool) -> Decision:
    """Decide a complete round. `is_checked`: the first answer of a spot-checked task was drawn for a check."""
    if siblings == SPOT and answers == 1 and not is_checked:
        return QuorumReached(0, (0,), ())
    if siblings == SPOT and not answers:
        return More(1)
    return decide(rule_for(siblings), answers, same)
