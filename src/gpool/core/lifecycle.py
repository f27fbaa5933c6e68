"""Transition table of a task's status. Every change is checked here; an illegal one is a bug."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from gpool.core.model import EndReason, TaskStatus
from gpool.core.model import TaskStatus as S


class Move(StrEnum):
    GRANTED = "granted"  # the scheduler leased it to a node, next epoch
    STARTED = "started"  # the agent reports that the sandbox runs
    SUCCEEDED = "succeeded"
    FAILED = "failed"  # by itself: exit code, exception, time-out, memory
    RETRIED = "retried"  # failed by itself with retries left
    REQUEUED = "requeued"  # the lease ended through no fault of the task
    GAVE_UP = "gave_up"  # its nodes were lost three times, or it may not cost more
    CANCELLED = "cancelled"
    VERIFIED = "verified"  # a quorum of its siblings agreed on a success
    REFUSED = "refused"  # a quorum of its siblings agreed on a failure, or there was no quorum


TABLE: dict[tuple[TaskStatus, Move], TaskStatus] = {
    (S.QUEUED, Move.GRANTED): S.LEASED,
    (S.QUEUED, Move.CANCELLED): S.CANCELLED,
    (S.QUEUED, Move.VERIFIED): S.SUCCEEDED,
    (S.QUEUED, Move.REFUSED): S.FAILED,
    (S.LEASED, Move.STARTED): S.RUNNING,
    (S.LEASED, Move.FAILED): S.FAILED,  # a missing input, a sandbox that did not start
    (S.LEASED, Move.RETRIED): S.QUEUED,
    (S.LEASED, Move.REQUEUED): S.QUEUED,
    (S.LEASED, Move.GAVE_UP): S.FAILED,
    (S.LEASED, Move.CANCELLED): S.CANCELLED,
    (S.RUNNING, Move.SUCCEEDED): S.SUCCEEDED,
    (S.RUNNING, Move.FAILED): S.FAILED,
    (S.RUNNING, Move.RETRIED): S.QUEUED,
    (S.RUNNING, Move.REQUEUED): S.QUEUED,
    (S.RUNNING, Move.GAVE_UP): S.FAILED,
    (S.RUNNING, Move.CANCELLED): S.CANCELLED,
}

SUCCESSES = frozenset({EndReason.EXITED, EndReason.RETURNED})
"""Reasons that can mean success: a command's exit code 0, a function's value."""

NO_FAULT = frozenset({EndReason.LOST, EndReason.HANDED_BACK, EndReason.PREEMPTED})
"""Reasons that requeue the task without using one of its retries."""

MAX_LOSSES = 3


class IllegalMove(AssertionError):
    """Transition missing from the table: a bug in the caller, never a user's mistake."""


def after(status: TaskStatus, moves: Iterable[Move], story: object = "") -> TaskStatus:
    """Raises `IllegalMove` with the task's history."""
    for move in moves:
        try:
            status = TABLE[status, move]
        except KeyError:
            raise IllegalMove(f"a {status} task cannot be {move} ({story})") from None
    return status


def sources(move: Move) -> frozenset[TaskStatus]:
    """Statuses from which the move is legal, for the guard of a write."""
    return frozenset(status for (status, m) in TABLE if m is move)


def end_move(reason: EndReason, exit_code: int | None, *, tries_left: bool, losses: int) -> Move:
    """`losses` counts different lost nodes, this one included."""
    if reason in NO_FAULT:
        return Move.GAVE_UP if reason is EndReason.LOST and losses >= MAX_LOSSES else Move.REQUEUED
    if reason is EndReason.CANCELLED:
        return Move.CANCELLED
    if reason is EndReason.LOSES_NODES:
        return Move.GAVE_UP
    if reason is EndReason.RETURNED or (reason is EndReason.EXITED and exit_code == 0):
        return Move.SUCCEEDED
    return Move.RETRIED if tries_left else Move.FAILED


def as_markdown() -> str:
    """docs/lifecycle.md, generated: `python -m gpool.core.lifecycle > docs/lifecycle.md`."""
    lines = [
        "# The lifecycle of a task",
        "",
        "Generated from `gpool.core.lifecycle.TABLE` (`make docs`); a test fails when it is stale.",
        "",
        "| from | move | to |",
        "|---|---|---|",
    ]
    lines += [f"| {source} | {move} | {target} |" for (source, move), target in TABLE.items()]
    lines += [
        "",
        "`succeeded`, `failed` and `cancelled` are final: no move leaves them. `verified` and `refused` end a",
        "task whose siblings ran instead of it; it stays `queued` until then ([verified",
        "results](guides/verified-results.md)).",
        "A lease keeps its allocation until the agent confirms the end, the lease expires, or the server ends",
        "it because the agent does not, even if the task is cancelled ([leases](leases.md)).",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(as_markdown(), end="")  # noqa: T201 - standard output is the page
