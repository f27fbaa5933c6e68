"""How a gang stands, by how its members stand: when the rest is called off, and what became of it. It writes nothing.

A gang is one task, and ends once. Nothing final is said before its last member has let go: when a node dies, the programs
of its peers fail within milliseconds, long before the node's silence is noticed; only then is it known which was the cause.
So of all ends together: a success stands; else a lost member is the cause, else one that had to make room, else one whose
node could not start it, else the first that ended otherwise. `call` comes earlier and frees the nodes: with the first end after which the gang cannot go on as it
is, the others are told to stop. It never changes its mind, since ends are numbered in the order they were written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpool.core.model import EndReason, Engine, OnLoss

YIELDED = frozenset({EndReason.PREEMPTED, EndReason.HANDED_BACK})
"""It had to go, and is not at fault."""


@dataclass(frozen=True, slots=True)
class MemberEnd:
    """How one member ended; `place` is its place among the ends of its gang: 1, 2, …"""

    rank: int
    place: int
    reason: EndReason
    exit_code: int | None = None

    @property
    def is_success(self) -> bool:
        """Also by a function's word, which counts as one: no member alone may make its gang a success by it."""
        exited = self.reason is EndReason.EXITED and self.exit_code == 0
        return exited or self.reason is EndReason.RETURNED


@dataclass(frozen=True, slots=True)
class Standing:
    """All that counts: how many members there are, and the ends of those that have let go."""

    nodes: int
    engine: Engine
    on_loss: OnLoss
    ends: tuple[MemberEnd, ...] = ()  # in any order
    making_room: bool = False  # it was asked to, as a whole, before anything had called it off


class Call(StrEnum):
    """What those who still run are told."""

    END = "end"  # it is over
    BACK = "back"  # it goes back to the queue: what can be saved is saved


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of the gang, as the end of one attempt; `rank` is the member that was the cause."""

    rank: int
    reason: EndReason
    exit_code: int | None = None


def call(gang: Standing) -> Call | None:
    """What the members still there are told; None: they go on."""
    for end in sorted(gang.ends, key=_place):
        if gang.engine is Engine.RAY and end.rank and end.reason is EndReason.EXITED:
            continue  # a helper's exit: what it means, rank 0 finds out
        if end.is_success and not (gang.engine is Engine.RAY and end.rank == 0):
            continue  # its part is done
        if gang.making_room or end.reason in YIELDED:
            return Call.BACK
        if end.reason is EndReason.LOST and gang.on_loss is OnLoss.REFORM:
            return Call.BACK
        return Call.END
    return None


def verdict(gang: Standing) -> Verdict | None:
    """What became of it; None while a member has not let go."""
    if len(gang.ends) < gang.nodes:
        return None
    ends = sorted(gang.ends, key=_place)
    first = next(end for end in ends if end.rank == 0)
    decisive = [first] if gang.engine is Engine.RAY else ends
    if all(end.is_success for end in decisive):
        return Verdict(0, first.reason, first.exit_code)
    cause = _first(ends, {EndReason.LOST}) or _first(ends, YIELDED)
    if cause is not None:
        return Verdict(cause.rank, cause.reason)
    own = _first(ends, {EndReason.NODE_FAILED}) or next(
        end for end in _judged(gang.engine, ends) if not end.is_success
    )
    if gang.making_room:
        return Verdict(own.rank, EndReason.PREEMPTED)
    return Verdict(own.rank, own.reason, own.exit_code)


def _judged(engine: Engine, ends: Sequence[MemberEnd]) -> Iterable[MemberEnd]:
    """Of a cluster, exits of its helpers count for nothing."""
    if engine is not Engine.RAY:
        return ends
    return (end for end in ends if end.rank == 0 or end.reason is not EndReason.EXITED)


def _first(ends: Sequence[MemberEnd], reasons: Iterable[EndReason]) -> MemberEnd | None:
    return next((end for end in ends if end.reason in reasons), None)


def _place(end: MemberEnd) -> int:
    return end.place


def marked(data: bytes, rank: int, *, in_line: bool) -> bytes:
    """A member's output with its rank before each line; `in_line`: what it printed last did not end one."""
    if not rank or not data:
        return data
    mark = b"[%d] " % rank
    body, last = data[:-1].replace(b"\n", b"\n" + mark), data[-1:]
    return (b"" if in_line else mark) + body + last
