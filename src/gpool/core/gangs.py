"""Outcome of a gang from the ends of its members. Pure.

A gang is one task with one end. The end is decided only after the last member has released its
lease: when a node dies, the programs of its peers fail within milliseconds, long before the
node's heartbeat is missed, so the cause is known only from all ends together. Precedence: success;
else a lost member; else a preempted or returned member; else a member that its node could not
start; else the first other end. `call` frees the nodes earlier: after the first end that stops the
gang from continuing, the remaining members are told to stop. Its answer never changes, because ends
are numbered in the order they were committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpool.core.model import EndReason, Engine, OnLoss

YIELDED = frozenset({EndReason.PREEMPTED, EndReason.HANDED_BACK})
"""Ends through no fault of the task."""


@dataclass(frozen=True, slots=True)
class MemberEnd:
    """End of one member; `place` is its position among the ends of its gang: 1, 2, …"""

    rank: int
    place: int
    reason: EndReason
    exit_code: int | None = None

    @property
    def is_success(self) -> bool:
        """Exit code 0, or a function's value."""
        exited = self.reason is EndReason.EXITED and self.exit_code == 0
        return exited or self.reason is EndReason.RETURNED


@dataclass(frozen=True, slots=True)
class GangStanding:
    """Size and policy of a gang, and the ends of the members that have released their leases."""

    nodes: int
    engine: Engine
    on_loss: OnLoss
    ends: tuple[MemberEnd, ...] = ()  # unordered
    making_room: bool = False  # the whole gang was preempted before any member's end


class GangOrder(StrEnum):
    """Order to the members that still run."""

    END = "end"  # the gang has ended
    BACK = "back"  # the gang is requeued: save checkpoints first


@dataclass(frozen=True, slots=True)
class GangVerdict:
    """Outcome of the gang as the end of one attempt; `rank` is the member that caused it."""

    rank: int
    reason: EndReason
    exit_code: int | None = None


def call(gang: GangStanding) -> GangOrder | None:
    """Return the order to the members that still run; None: continue."""
    for end in sorted(gang.ends, key=_place):
        if gang.engine is Engine.RAY and end.rank and end.reason is EndReason.EXITED:
            continue  # exit of a Ray worker: rank 0 decides
        if end.is_success and not (gang.engine is Engine.RAY and end.rank == 0):
            continue  # this member is done
        if gang.making_room or end.reason in YIELDED:
            return GangOrder.BACK
        if end.reason is EndReason.LOST and gang.on_loss is OnLoss.REFORM:
            return GangOrder.BACK
        return GangOrder.END
    return None


def verdict(gang: GangStanding) -> GangVerdict | None:
    """Return the outcome; None while a member holds its lease."""
    if len(gang.ends) < gang.nodes:
        return None
    ends = sorted(gang.ends, key=_place)
    first = next(end for end in ends if end.rank == 0)
    decisive = [first] if gang.engine is Engine.RAY else ends
    if all(end.is_success for end in decisive):
        return GangVerdict(0, first.reason, first.exit_code)
    cause = _first(ends, {EndReason.LOST}) or _first(ends, YIELDED)
    if cause is not None:
        return GangVerdict(cause.rank, cause.reason)
    own = _first(ends, {EndReason.NODE_FAILED}) or next(
        end for end in _judged(gang.engine, ends) if not end.is_success
    )
    if gang.making_room:
        return GangVerdict(own.rank, EndReason.PREEMPTED)
    return GangVerdict(own.rank, own.reason, own.exit_code)


def _judged(engine: Engine, ends: Sequence[MemberEnd]) -> Iterable[MemberEnd]:
    if engine is not Engine.RAY:
        return ends
    return (end for end in ends if end.rank == 0 or end.reason is not EndReason.EXITED)


def _first(ends: Sequence[MemberEnd], reasons: Iterable[EndReason]) -> MemberEnd | None:
    return next((end for end in ends if end.reason in reasons), None)


def _place(end: MemberEnd) -> int:
    return end.place


def marked(data: bytes, rank: int, *, in_line: bool) -> bytes:
    """Prefix each line of a member's output with its rank; `in_line`: the previous chunk ended mid-line."""
    if not rank or not data:
        return data
    mark = b"[%d] " % rank
    body, last = data[:-1].replace(b"\n", b"\n" + mark), data[-1:]
    return (b"" if in_line else mark) + body + last
