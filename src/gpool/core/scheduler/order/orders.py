"""Who comes first. An order is a function from a candidate to a sort key, smallest first; it places nothing.

A candidate stands for all waiting tasks of one shape, seen by its oldest, or for a running one that may be preempted, seen
as if it waited. The planner asks again after every start, so an order may look at what the user holds by then. Two promises
are asked of an order: the same arguments give the same key, and a key never gets smaller when `queued_at`, `running`,
`served`, `attained`, `predicted`, the shares or the band grow. Ties go to the older task.

Every key begins with the band (`limits`): what a guarantee covers goes first, in whatever order. And in every order of the
house a task starts one day, whatever arrives after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gpool.core.ids import TaskId
from gpool.core.model import Instant, Shape, Span
from gpool.core.scheduler.order.levels import level_of, risen
from gpool.core.scheduler.order.limits import NO_LIMITS, WITHIN, GpuLimits, Holder, least_gpus
from gpool.core.scheduler.place.pricing import USUAL, Pricing

Key = tuple[int, ...]
_LINE_TARGET, _AGEING, _PATIENCE = Span(300_000), Span(5 * 60 * 1_000_000), Span(60 * 1_000_000)
_HOUR = Span(3600 * 1_000_000)
_PROTECTION, _PROMOTION, _URGENCY = Span(15 * 60 * 1_000_000), Span(3 * 24 * _HOUR), Span(2 * _HOUR)
_TURN, _ONE = Span(_HOUR // 6), 1000
NEAR_MILLI = 30
"""Of what two tenants had lately: who is nearer than that to another takes nothing from what has had its turn."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What an operator may choose."""

    order: str = "fair_share"
    max_line: int = 500  # leases in one line
    line_target: Span = _LINE_TARGET  # work that may stand in one line
    max_places_per_pass: int = 1000
    ageing: Span = _AGEING  # waiting this long is worth one point of priority
    patience: Span = _PATIENCE  # then a node is kept clear for a task that does not fit
    limits: GpuLimits = NO_LIMITS
    pricing: Pricing = USUAL  # what free room is worth, learnt from earlier arrivals
    weights: Mapping[Holder, int] = field(default_factory=dict)  # thousandths; 1000 where not set
    preemption: bool = True  # of tasks that allow it
    protection: Span = _PROTECTION  # not preempted again for so long; for others after a `turn`
    max_preemptions_per_pass: int = 200
    promotion: Span = _PROMOTION  # waiting this long is worth one level, and as much as being due
    urgency: Span = _URGENCY  # so long before its `by` a task goes before others of its user
    margin_milli: int = 100  # of two shares: nearer to each other they are equal, and stop nothing
    turn: Span = _TURN  # what ran this long may be stopped for those who had less


class Candidate(NamedTuple):
    """The next task of a shape, and how its user fares."""

    shape: Shape
    queued_at: Instant
    task: TaskId
    running: int  # allocations the user holds, those of this pass included
    served: int  # grows with each lease; the smallest was served least recently
    attained: Span = Span(0)  # what it has run already
    shares: tuple[int, int] = (0, 0)  # of its team (or user), of its user: see `fair_share`
    predicted: Span | None = None  # how long it will run, as far as can be told
    band: int = WITHIN  # or it is borrowed


Order = Callable[[Candidate, Instant, Policy], Key]


def fcfs(candidate: Candidate, now: Instant, policy: Policy) -> Key:  # noqa: ARG001 - an Order
    """First come, first served."""
    return candidate.band, candidate.queued_at, candidate.task


def round_robin(candidate: Candidate, now: Instant, policy: Policy) -> Key:  # noqa: ARG001 - an Order
    """Users in turn: who holds least, then who was served least recently, then by age."""
    return (
        candidate.band,
        candidate.running,
        candidate.served,
        candidate.queued_at,
        candidate.task,
    )


def priority(candidate: Candidate, now: Instant, policy: Policy) -> Key:  # noqa: ARG001 - an Order
    """The higher priority, but waiting counts: one point for every `policy.ageing`.

    `priority + waited / ageing` orders as `queued_at - priority * ageing` does: a point is a head start, so every
    task is at the front one day whatever arrives after it.
    """
    head_start = candidate.shape.priority * policy.ageing
    return candidate.band, candidate.queued_at - head_start, candidate.task


def shortest(candidate: Candidate, now: Instant, policy: Policy) -> Key:
    """The least GPU time to come as predicted; what nothing is known of counts as an hour.

    What has waited for `policy.promotion` goes before all others, the oldest first.
    """
    if now - candidate.queued_at >= policy.promotion:
        return candidate.band, 0, candidate.queued_at, candidate.task
    predicted = _HOUR if candidate.predicted is None else candidate.predicted
    size = max(least_gpus(candidate.shape), 1000) * candidate.shape.requirements.nodes
    return candidate.band, 1, predicted * size // 1000, candidate.queued_at, candidate.task


def fair_share(candidate: Candidate, now: Instant, policy: Policy) -> Key:
    """Teams by their share, their users by theirs; a user's own: what is due soon, then by level and age.

    Priority is a head start in age, among a user's own tasks and where all shares are equal; it takes nothing from others.
    What has waited for `policy.promotion` counts as due.
    """
    shape, attained = candidate.shape, candidate.attained
    waited = now - candidate.queued_at - attained
    level = risen(level_of(attained), waited, policy.promotion)
    is_due = waited >= policy.promotion or (
        shape.by is not None and shape.by - now <= policy.urgency
    )
    head_start = shape.priority * policy.ageing
    since = candidate.queued_at - head_start
    return candidate.band, *candidate.shares, 0 if is_due else 1, level, since, candidate.task


ORDERS: Mapping[str, Order] = {
    "fcfs": fcfs,
    "round_robin": round_robin,
    "priority": priority,
    "shortest": shortest,
    "fair_share": fair_share,
}
"""The orders of the house. The server adds those of the entry point group `gpool.orders` and passes the whole table."""

DECISIVE: Mapping[str, int] = {"round_robin": 1, "priority": 1, "fair_share": 6}
"""How many numbers of a key after the band are worth preempting for; orders that are not named never preempt.

The rest, mere age, decides who starts first but stops nobody: a task of the same standing would be stopped next.
"""


class Standing(NamedTuple):
    """Both sides of an exchange, each seen as if the one that runs did not."""

    key: Key  # of the one that waits
    gained: tuple[int, int]  # the shares of its people once it runs
    other: Key  # of the one that runs
    ran: Span  # how long that has run, since it last began
    had: tuple[int, int] = (0, 0)  # what the people of the one that waits had lately
    others_had: tuple[int, int] = (0, 0)
    holds: tuple[int, int] = (0, 0)  # what they hold now
    others_hold: tuple[int, int] = (0, 0)
    evens: tuple[bool, bool] = (False, False)  # they hold no more than the others after it either


def outranks(both: Standing, policy: Policy) -> bool:
    """Whether the one that runs may be stopped for the one that waits.

    A guarantee is worth it, then what the order says. Between tenants, and between the users of one, shares count for more
    than their last digit: they have to differ by more than `margin_milli` both ways, so that people who are that near to
    their share take nothing from each other. Even then it is worth it only if those who lose are ahead still after the
    exchange, which therefore nobody wants to undo. Pieces that do not divide into shares are had by turns instead: what has
    had its turn goes to those who had less lately and hold less now, and is theirs for a turn; where none had less, to those
    who have less, or hold no more after the exchange either: who comes new has had as much as the others, and holds nothing.
    """
    mine, theirs = both.key, both.other
    if mine[0] != theirs[0]:
        return mine[0] < theirs[0]
    if policy.order != "fair_share":
        decisive = 1 + DECISIVE.get(policy.order, 0)
        return mine[1:decisive] < theirs[1:decisive]
    for place in (0, 1):  # tenants, then the users of one
        less, more, margin = mine[1 + place], theirs[1 + place], policy.margin_milli
        if less != more:
            is_ahead_still = _exceeds(more, both.gained[place], margin)
            if is_ahead_still or both.ran < policy.turn:
                return is_ahead_still
            had, others = both.had[place], both.others_had[place]
            if _exceeds(others, had, NEAR_MILLI) and both.holds[place] < both.others_hold[place]:
                return True
            return others >= had and (both.evens[place] or _exceeds(more, less, margin))
    return mine[3:] < theirs[3:]


def _exceeds(more: int, less: int, margin_milli: int) -> bool:
    """One cannot be within the margin above, and the other within it below, what both should have."""
    return more * (_ONE - margin_milli) > less * (_ONE + margin_milli)
