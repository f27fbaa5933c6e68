"""The one transition table of a lease on the agent. Every change of a lease's state goes through it.

`python -m gpool.agent.state_machine.transitions` prints docs/agent-lifecycle.md. Depends on nothing.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class LeaseState(StrEnum):
    QUEUED = "queued"
    SENT = "sent"
    RUNNING = "running"
    STOPPING = "stopping"
    TIMING_OUT = "timing_out"
    SHUTTING_DOWN = "shutting_down"
    PREEMPTING = "preempting"
    EXPIRED = "expired"
    DROPPED = "dropped"
    FINISHED = "finished"
    RETURNED = "returned"
    RELEASED = "released"
    FORGOTTEN = "forgotten"


class LeaseMove(StrEnum):
    SENT = "sent"  # the call was handed to a runner
    STARTED = "started"  # the command's sandbox is being prepared
    REQUEUED = "requeued"  # the runner ended before the call began
    STOPPED = "stopped"  # by the server
    TIMED_OUT = "timed_out"
    SHUT_DOWN = "shut_down"  # the owner stops the agent
    PREEMPTED = "preempted"  # by the server or the owner
    EXPIRED = "expired"  # the lease time is over, see `lease_time`
    DROPPED = "dropped"  # the server says the lease is not this node's
    FINISHED = "finished"  # the end is in the outbox
    RETURNED = "returned"  # never begun; `HandedBack` is in the outbox
    RELEASED = "released"  # `Released` is in the outbox
    CLEARED = "cleared"  # the sandbox of a dropped lease is gone


S, M = LeaseState, LeaseMove

MEANINGS: dict[LeaseState, str] = {
    S.QUEUED: "in the lease queue of its allocation; nothing of it runs",
    S.SENT: "a call in a runner; it may begin at any moment and cannot be taken back",
    S.RUNNING: "a command with a sandbox, from the fetching of its inputs to the upload of its outputs",
    S.STOPPING: "its sandbox is being ended because the server asked; `Released` follows",
    S.TIMING_OUT: "its sandbox is being ended at its time-out; `Finished` (timed_out) follows",
    S.SHUTTING_DOWN: "its sandbox is being ended because the agent stops; `Finished` (preempted) follows",
    S.PREEMPTING: "its sandbox is being ended for another task or the owner; `Finished` (preempted) follows",
    S.EXPIRED: "its lease time is over, its sandbox is being ended; `Finished` (lost) follows",
    S.DROPPED: "not this node's lease any more; its sandbox is being ended, nothing is reported",
    S.FINISHED: "final: its end is reported",
    S.RETURNED: "final: reported as `HandedBack`, the server queues the task again",
    S.RELEASED: "final: reported as `Released`",
    S.FORGOTTEN: "final: nothing was reported",
}

LIVE = frozenset({S.QUEUED, S.SENT, S.RUNNING})
"""States of a lease that nothing has interfered with."""
FINAL = frozenset({S.FINISHED, S.RETURNED, S.RELEASED, S.FORGOTTEN})
OWN_END_COUNTS = frozenset({S.TIMING_OUT, S.SHUTTING_DOWN, S.PREEMPTING})
"""Ending states in which a result that arrives first is still reported: the work is done."""

_IN_SANDBOX = (S.SENT, S.RUNNING)
_ENDING = (S.STOPPING, S.TIMING_OUT, S.SHUTTING_DOWN, S.PREEMPTING, S.EXPIRED)

TABLE: dict[tuple[LeaseState, LeaseMove], LeaseState] = {
    (S.QUEUED, M.SENT): S.SENT,
    (S.QUEUED, M.STARTED): S.RUNNING,
    (S.QUEUED, M.FINISHED): S.FINISHED,  # its sandbox did not start, or not in time
    (S.QUEUED, M.RETURNED): S.RETURNED,
    (S.QUEUED, M.RELEASED): S.RELEASED,
    (S.QUEUED, M.DROPPED): S.FORGOTTEN,
    (S.SENT, M.REQUEUED): S.QUEUED,
    **{(state, M.FINISHED): S.FINISHED for state in _IN_SANDBOX},
    **{(state, M.TIMED_OUT): S.TIMING_OUT for state in _IN_SANDBOX},
    **{(state, M.SHUT_DOWN): S.SHUTTING_DOWN for state in _IN_SANDBOX},
    **{(state, M.PREEMPTED): S.PREEMPTING for state in _IN_SANDBOX},
    **{(state, M.EXPIRED): S.EXPIRED for state in (*_IN_SANDBOX, S.TIMING_OUT)},
    **{(state, M.STOPPED): S.STOPPING for state in (*_IN_SANDBOX, *_ENDING)},
    **{(state, M.DROPPED): S.DROPPED for state in (*_IN_SANDBOX, *_ENDING)},
    (S.STOPPING, M.RELEASED): S.RELEASED,
    (S.TIMING_OUT, M.FINISHED): S.FINISHED,
    (S.SHUTTING_DOWN, M.FINISHED): S.FINISHED,
    (S.SHUTTING_DOWN, M.RETURNED): S.RETURNED,  # its call had not begun
    (S.PREEMPTING, M.FINISHED): S.FINISHED,
    (S.PREEMPTING, M.RETURNED): S.RETURNED,  # its call had not begun
    (S.EXPIRED, M.FINISHED): S.FINISHED,
    (S.DROPPED, M.CLEARED): S.FORGOTTEN,
}

STEPS: dict[tuple[LeaseState, LeaseMove], tuple[int, LeaseState, bool]] = {
    step: (row, target, target not in LIVE) for row, (step, target) in enumerate(TABLE.items())
}
"""The table with its row numbers, and whether the target is an ending state. A story holds rows, not objects: every call
of a task makes two moves, and numbers cost the garbage collector nothing."""
_ROWS = tuple(TABLE.items())

STORY_LENGTH = 32
"""Transitions kept for each lease, the latest ones: a call can be requeued any number of times."""

Story = tuple[int | str, ...]
"""Time, row of the table and reason of each transition, in one flat tuple."""


class LeaseTransition(NamedTuple):
    at: int  # boot clock, microseconds
    source: LeaseState
    move: LeaseMove
    target: LeaseState
    reason: str = ""

    def __str__(self) -> str:
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.at}: {self.source} -{self.move}-> {self.target}{why}"


def transitions_of(story: Story) -> list[LeaseTransition]:
    found = []
    for at, row, reason in zip(story[::3], story[1::3], story[2::3], strict=True):
        assert isinstance(at, int)
        assert isinstance(row, int)
        (source, move), target = _ROWS[row]
        found.append(LeaseTransition(at, source, move, target, str(reason)))
    return found


class IllegalTransition(AssertionError):
    """A bug in the state machine, never a mistake of the server or a task."""


def as_markdown() -> str:
    lines = [
        "# The lifecycle of a lease on the agent",
        "",
        "Generated from `gpool.agent.state_machine.transitions` (`make docs`); `make check` fails when",
        "it is stale. The lifecycle of the task on the server is in [lifecycle.md](lifecycle.md).",
        "",
        "| state | meaning |",
        "|---|---|",
        *(f"| {state} | {meaning} |" for state, meaning in MEANINGS.items()),
        "",
        "| from | move | to |",
        "|---|---|---|",
        *(f"| {source} | {move} | {target} |" for (source, move), target in TABLE.items()),
        "",
        "No move leaves a final state. A lease leaves an ending state only after nothing of its sandbox",
        "runs any more, so a report of its end is also the promise that its GPUs are free. A move that",
        "is not in the table raises `IllegalTransition` with the story of the lease: its last",
        f"{STORY_LENGTH} transitions with their times and reasons.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(as_markdown(), end="")  # noqa: T201 - its output is the page
