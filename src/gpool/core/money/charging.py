"""Charge of a lease: metered time of its allocation, times a frozen price. Pure; integers only.

The unit of metering is the allocation, by the server's clock. Leases of one allocation run one after the other, so a
lease is charged from the later of its own start and the end of the lease before it. The charged times of an allocation
therefore never overlap, and their sum never exceeds its wall time, whatever an agent reports.

Example: an allocation of two GPUs at 0.30/h each costs 600,000 micro-credits an hour, with a minimum of 1,000.

    10:00:00  allocated   lease 1 starts 10:00:10, returns 10:00:14, 4 s   exact   666   charged 1000 (minimum)
    10:00:14              lease 2 claims 10:00:05, returns 10:00:20, 6 s   exact  1000   charged  666 (1666 - 1000)
    10:00:20              lease 3 starts 10:00:21, node lost 10:09:00      free          charged    0

Rounding: the total of an allocation is rounded down to a micro-credit, and a lease is charged the difference of the
totals after and before it. A million calls of a millisecond thus cost what they use, not a million roundings.

Money is set aside ahead of time: at every instant enough for `AHEAD` more (`set_aside`), and no total exceeds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from gpool.core.model import SECOND, EndReason, Instant, Phase, Span

HOUR = Span(3600 * SECOND)

AHEAD = Span(300 * SECOND)
"""Time for which money is set aside ahead; the reservation is extended when half of it is left."""

MILLION = 1_000_000
_NO_TIME = Span(0)


@dataclass(frozen=True, slots=True)
class FrozenPrice:
    """Price of an allocation, fixed when it is granted: later changes of the owner's do not apply to it."""

    rate_microcredits: int = 0  # per hour, of the whole allocation
    minimum_microcredits: int = 0  # of an allocation of which any time is charged


class ChargedPart(StrEnum):
    NOTHING = "nothing"
    TO_CHECKPOINT = "up to the last accepted checkpoint"
    TO_END = "up to the end"


class LeaseEnd(NamedTuple):
    """End of a lease as the server recorded it. `started_at`: None if no start was recorded."""

    started_at: Instant | None
    ended_at: Instant
    reason: EndReason
    phase: Phase
    checkpoint_at: Instant | None = None  # of the last checkpoint accepted from this lease
    is_reclaim: bool = False  # preempted for the node's owner, not for another task
    is_outvoted: bool = False  # its result differs from that of the quorum


_OWN_ENDS = frozenset(
    {
        EndReason.EXITED,
        EndReason.RETURNED,
        EndReason.RAISED,
        EndReason.TIMED_OUT,
        EndReason.CANCELLED,
        EndReason.OUT_OF_MEMORY,
        EndReason.BAD_OUTPUT,
        EndReason.OUT_OF_FUNDS,
    }
)
_FREE_ENDS = frozenset(
    {
        EndReason.BAD_INPUT,  # found before the start
        EndReason.LOSES_NODES,
        EndReason.SANDBOX_FAILED,
        EndReason.LOST,
        EndReason.HANDED_BACK,
        EndReason.NODE_FAILED,
        EndReason.NO_QUORUM,  # of a parent, which has no lease of its own
    }
)
_STARTED = frozenset({Phase.RUN, Phase.COLLECT})


def charged_part(
    reason: EndReason, phase: Phase, *, is_reclaim: bool = False, is_outvoted: bool = False
) -> ChargedPart:
    """Part of a lease's time that is charged, by why and in which phase it ended."""
    if phase not in _STARTED or is_outvoted or reason in _FREE_ENDS:
        return ChargedPart.NOTHING
    if reason is EndReason.PREEMPTED:
        return ChargedPart.NOTHING if is_reclaim else ChargedPart.TO_CHECKPOINT
    assert reason in _OWN_ENDS
    return ChargedPart.TO_END


class AllocationMeter(NamedTuple):
    """Charges of one allocation so far. `until`: end of its last lease; at first the time it was granted."""

    price: FrozenPrice
    until: Instant
    charged_time: Span = _NO_TIME
    charged_microcredits: int = 0


class LeaseCharge(NamedTuple):
    """`time`: charged time. `meter`: of the allocation after this lease."""

    time: Span
    microcredits: int
    meter: AllocationMeter


def charge(meter: AllocationMeter, end: LeaseEnd, reserved_microcredits: int) -> LeaseCharge:
    """Charge the next lease that ended on an allocation.

    `reserved_microcredits`: set aside for the whole allocation, of which earlier leases have used their charges.
    """
    time = _charged_time(meter.until, end)
    until = Instant(max(meter.until, end.ended_at))
    if not time:
        still = AllocationMeter(meter.price, until, meter.charged_time, meter.charged_microcredits)
        return LeaseCharge(_NO_TIME, 0, still)
    charged_time = Span(meter.charged_time + time)
    total = max(
        meter.charged_microcredits,
        min(total_charge(meter.price, charged_time), reserved_microcredits),
    )
    after = AllocationMeter(meter.price, until, charged_time, total)
    return LeaseCharge(time, total - meter.charged_microcredits, after)


def _charged_time(before: Instant, end: LeaseEnd) -> Span:
    """`before`: end of the previous lease on the allocation."""
    part = charged_part(
        end.reason, end.phase, is_reclaim=end.is_reclaim, is_outvoted=end.is_outvoted
    )
    if part is ChargedPart.NOTHING or end.started_at is None:
        return _NO_TIME
    last = end.ended_at
    if part is ChargedPart.TO_CHECKPOINT:
        if end.checkpoint_at is None:
            return _NO_TIME
        last = min(last, end.checkpoint_at)
    return Span(max(0, last - max(before, end.started_at)))


def total_charge(price: FrozenPrice, time: Span) -> int:
    """Charge for this much time on one allocation, rounded down; at least the minimum if there is any."""
    if time <= 0:
        return 0
    return max(price.minimum_microcredits, price.rate_microcredits * time // HOUR)


def set_aside(price: FrozenPrice, age: Span) -> int:
    """Money to have reserved for an allocation of this age: enough for its charges until `AHEAD` later."""
    return total_charge(price, Span(age + AHEAD))


def covered_time(price: FrozenPrice, reserved_microcredits: int) -> Span | None:
    """Age of the allocation up to which the reservation covers every charge; None: any age."""
    if reserved_microcredits < price.minimum_microcredits:
        return _NO_TIME
    if not price.rate_microcredits:
        return None
    return Span(((reserved_microcredits + 1) * HOUR - 1) // price.rate_microcredits)


def must_extend(price: FrozenPrice, age: Span, reserved_microcredits: int) -> bool:
    """Whether less than half of `AHEAD` is left of the reservation."""
    covered = covered_time(price, reserved_microcredits)
    return covered is not None and covered - age < AHEAD // 2


@dataclass(frozen=True, slots=True)
class SplitCharge:
    owner_microcredits: int
    fee_microcredits: int


def split(microcredits: int, fee_ppm: int) -> SplitCharge:
    """Split a charge into the owner's part and the pool's fee, in millionths of it, rounded down."""
    fee = microcredits * fee_ppm // MILLION
    return SplitCharge(microcredits - fee, fee)


_RECLAIM_ROW = "preempted (reclaimed by the node's owner)"
_OUTVOTED_ROW = "any, of a result that the quorum rejects"


def as_markdown() -> str:
    """docs/charges.md, generated: `python -m gpool.core.money.charging > docs/charges.md`."""
    rows = {reason.value: [charged_part(reason, phase) for phase in Phase] for reason in EndReason}
    preempted, exited = EndReason.PREEMPTED, EndReason.EXITED
    rows[_RECLAIM_ROW] = [charged_part(preempted, each, is_reclaim=True) for each in Phase]
    rows[_OUTVOTED_ROW] = [charged_part(exited, each, is_outvoted=True) for each in Phase]
    lines = [
        "# Charged time by end reason and phase",
        "",
        "Generated from `gpool.core.money.charging` (`make docs`); a test fails when it is stale.",
        "",
        "The charged time of a lease, by the reason of its end and the phase in which it ended.",
        "It begins at the later of the lease's own start and the end of the lease before it on the",
        "same allocation ([decision 0047](decisions/0047-prices-and-charges.md)).",
        "Tasks are charged if the operator set `GPOOL_SERVER_PRICES` ([prices](guides/prices.md)).",
        "",
        f"| end reason | {' | '.join(phase.value for phase in Phase)} |",
        f"|---|{'---|' * len(Phase)}",
    ]
    lines += [f"| {name} | {' | '.join(parts)} |" for name, parts in rows.items()]
    lines += [
        "",
        "Fetching inputs, building the environment and starting the sandbox cost nothing.",
        "The time is that of the server's clock. A total is rounded down to a micro-credit per",
        "allocation, and is at least the owner's minimum charge if any of its time is charged.",
        f"Money is set aside for {AHEAD // SECOND // 60} minutes ahead; no charge exceeds it.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(as_markdown(), end="")  # noqa: T201 - standard output is the page
