"""Life of a meter: how long its reservation lasts, how ends of one report divide its time, a task's own cap. Pure.

Example: an allocation at 0.60/h is granted at 10:00:00 with 0.05 set aside: enough until 10:05:00. It is looked at
again when half of `AHEAD` is left, at 10:02:30. A lease has ended there at 10:02:00 with 0.02 charged; another runs.

    10:02:30   charged 0.02 (2:00), not metered 0:30    wanted: 0.02 + 0.005 + 0.05, in total 0.075

The old pending transfer pays 0.02 to the owner and returns 0.03; the next one sets 0.055 aside. So at any time one pending
transfer belongs to a meter, and an owner waits for the money of a long task for minutes, not days.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpool.core.model import Instant, Span
from gpool.core.money.charging import AHEAD, MILLION, AllocationMeter, covered_time, total_charge

FAR = Instant(1 << 62)
"""After every other instant."""


def metered_age(meter: AllocationMeter, now: Instant) -> Span:
    """Longest time that may be charged if a lease ends now: charged so far, and all since the last end."""
    return Span(meter.charged_time + max(0, now - meter.until))


def wanted_total(meter: AllocationMeter, now: Instant) -> int:
    """Micro-credits to have reserved in total, charges included, until `AHEAD` from now; at least 1 more than charged."""
    total = total_charge(meter.price, Span(metered_age(meter, now) + AHEAD))
    return max(total, meter.charged_microcredits + 1)


def runs_out_at(meter: AllocationMeter, reserved_microcredits: int) -> Instant:
    """Last instant up to which the reservation covers every charge."""
    covered = covered_time(meter.price, reserved_microcredits)
    return FAR if covered is None else Instant(meter.until + covered - meter.charged_time)


def renew_at(meter: AllocationMeter, reserved_microcredits: int) -> Instant:
    """When less than half of `AHEAD` is left (`charging.must_extend`)."""
    out = runs_out_at(meter, reserved_microcredits)
    return out if out == FAR else Instant(out - AHEAD // 2)


def reaches_cap_at(meter: AllocationMeter, started_at: Instant, left_microcredits: int) -> Instant:
    """Last instant at which a lease that runs since then costs at most what is left of its task's `max_cost`."""
    covered = covered_time(meter.price, meter.charged_microcredits + left_microcredits)
    if covered is None:
        return FAR
    return Instant(max(meter.until, started_at) + max(0, covered - meter.charged_time))


def divided_ends(until: Instant, at: Instant, durations: Sequence[Span]) -> list[Instant]:
    """Ends of leases that were reported together at `at`, in order: each ran as long as its node claims before the next one.

    Claims only divide the time since `until` between leases of one payer; no end is after `at`.
    """
    found = [at]
    for duration in reversed(durations[1:]):
        found.append(Instant(max(min(until, at), found[-1] - max(0, duration))))
    return found[::-1]


def fee_between(before: int, after: int, fee_ppm: int) -> int:
    """The pool's part of a charge that raised an allocation's total: fees of its charges add up to that of the total."""
    return after * fee_ppm // MILLION - before * fee_ppm // MILLION
