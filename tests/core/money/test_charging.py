"""Charges of leases: never more than the allocation's wall time, the reservation, or the last checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.lifecycle import NO_FAULT, SUCCESSES
from gpool.core.model import SECOND, EndReason, Instant, Phase, Span
from gpool.core.money.charging import (
    AHEAD,
    HOUR,
    AllocationMeter,
    ChargedPart,
    FrozenPrice,
    LeaseEnd,
    as_markdown,
    charge,
    charged_part,
    covered_time,
    must_extend,
    set_aside,
    split,
    total_charge,
)

STARTED = (Phase.RUN, Phase.COLLECT)
PLENTY = 1 << 80
INSTANTS = st.integers(0, 10**12).map(Instant)
PRICES = st.builds(FrozenPrice, st.integers(0, 10**13), st.integers(0, 10**9))
RATES = st.builds(FrozenPrice, st.integers(0, 10**13))


@dataclass(frozen=True, slots=True)
class Reported:
    """What an agent reports of a lease; the server's clock says when the report arrived."""

    after: int  # since the report before
    started: int | None  # claimed, anywhere
    checkpoint: int | None
    reason: EndReason
    phase: Phase
    is_reclaim: bool
    is_outvoted: bool


REPORTS = st.lists(
    st.builds(
        Reported,
        st.integers(0, 10**11),
        st.none() | st.integers(-(10**12), 10**13),
        st.none() | st.integers(-(10**12), 10**13),
        st.sampled_from(EndReason),
        st.sampled_from(Phase),
        st.booleans(),
        st.booleans(),
    ),
    max_size=20,
)


def ends(granted_at: int, reports: list[Reported]) -> list[LeaseEnd]:
    found, now = [], granted_at
    for one in reports:
        now += one.after
        found.append(
            LeaseEnd(
                None if one.started is None else Instant(one.started),
                Instant(now),
                one.reason,
                one.phase,
                None if one.checkpoint is None else Instant(one.checkpoint),
                one.is_reclaim,
                one.is_outvoted,
            )
        )
    return found


def run(at: Instant, duration: int, reason: EndReason = EndReason.EXITED) -> LeaseEnd:
    return LeaseEnd(at, Instant(at + duration), reason, Phase.RUN)


# ---- the whole allocation


@given(INSTANTS, RATES, REPORTS)
def test_an_allocation_never_costs_more_than_its_wall_time(
    granted_at: Instant, price: FrozenPrice, reports: list[Reported]
) -> None:
    meter, total, time = AllocationMeter(price, granted_at), 0, 0
    for end in ends(granted_at, reports):
        charged = charge(meter, end, PLENTY)
        assert charged.microcredits >= 0
        assert charged.time >= 0
        total, time, meter = total + charged.microcredits, time + charged.time, charged.meter
        wall = end.ended_at - granted_at
        assert time <= wall
        assert total <= price.rate_microcredits * wall // HOUR
    assert total == meter.charged_microcredits == total_charge(price, meter.charged_time)


@given(INSTANTS, PRICES, REPORTS)
def test_the_minimum_is_charged_once_per_allocation_and_only_if_any_time_is(
    granted_at: Instant, price: FrozenPrice, reports: list[Reported]
) -> None:
    meter, total = AllocationMeter(price, granted_at), 0
    for end in ends(granted_at, reports):
        charged = charge(meter, end, PLENTY)
        total, meter = total + charged.microcredits, charged.meter
    exact = price.rate_microcredits * meter.charged_time // HOUR
    assert total == (max(price.minimum_microcredits, exact) if meter.charged_time else 0)


@given(INSTANTS, PRICES, REPORTS, st.integers(1, AHEAD // 2))
def test_no_charge_exceeds_a_reservation_that_is_extended_in_time(
    granted_at: Instant, price: FrozenPrice, reports: list[Reported], late: int
) -> None:
    """Extended whenever less than half is left, checked every `late`: the charges are complete and covered."""
    meter, reserved = AllocationMeter(price, granted_at), set_aside(price, Span(0))
    for end in ends(granted_at, reports):
        age = Span(end.ended_at - granted_at)
        covered = covered_time(price, reserved)
        if covered is not None and covered < age + late:  # as the checks until then would have
            reserved = set_aside(price, age)
        charged = charge(meter, end, reserved)
        assert charged.meter.charged_microcredits <= reserved
        assert charged == charge(meter, end, PLENTY)  # nothing was cut off
        meter = charged.meter


@given(INSTANTS, PRICES, REPORTS, st.integers(0, 10**12))
def test_no_charge_exceeds_a_reservation_that_was_not_extended(
    granted_at: Instant, price: FrozenPrice, reports: list[Reported], reserved: int
) -> None:
    meter, total = AllocationMeter(price, granted_at), 0
    for end in ends(granted_at, reports):
        charged = charge(meter, end, reserved)
        assert charged.microcredits >= 0
        total, meter = total + charged.microcredits, charged.meter
    assert total <= reserved


@given(PRICES, st.integers(0, 10**12).map(Span))
def test_a_reservation_covers_its_whole_time_and_is_extended_halfway(
    price: FrozenPrice, age: Span
) -> None:
    reserved = set_aside(price, age)
    covered = covered_time(price, reserved)
    assert not must_extend(price, age, reserved)
    if covered is None:
        assert not price.rate_microcredits
        return
    assert covered >= age + AHEAD
    assert total_charge(price, covered) <= reserved < total_charge(price, Span(covered + 1))
    assert must_extend(price, Span(covered - AHEAD // 2 + 1), reserved)


@given(INSTANTS, PRICES, st.integers(0, 10**11), st.integers(0, 10**11), st.integers(0, 10**9))
def test_a_longer_run_or_a_higher_price_never_costs_less(
    at: Instant, price: FrozenPrice, time: int, more: int, dearer: int
) -> None:
    cost = charge(AllocationMeter(price, at), run(at, time), PLENTY).microcredits
    assert charge(AllocationMeter(price, at), run(at, time + more), PLENTY).microcredits >= cost
    higher = FrozenPrice(price.rate_microcredits + dearer, price.minimum_microcredits)
    assert charge(AllocationMeter(higher, at), run(at, time), PLENTY).microcredits >= cost


def test_a_million_short_calls_cost_what_they_use() -> None:
    price = FrozenPrice(310_000)
    meter, now, total = AllocationMeter(price, Instant(0)), 0, 0
    for _ in range(20_000):
        charged = charge(meter, run(Instant(now), 1000), PLENTY)
        meter, now, total = charged.meter, now + 1000, total + charged.microcredits
    assert total == 310_000 * 20 // 3600 == 1722
    assert (
        charge(AllocationMeter(price, Instant(0)), run(Instant(0), 1000), PLENTY).microcredits == 0
    )


def test_the_example_of_the_module() -> None:
    price, second = FrozenPrice(600_000, 1000), SECOND
    meter, charged = AllocationMeter(price, Instant(0)), []
    for start, end, reason in (
        (10, 14, EndReason.RETURNED),
        (5, 20, EndReason.RETURNED),
        (21, 540, EndReason.LOST),
    ):
        found = charge(
            meter,
            LeaseEnd(Instant(start * second), Instant(end * second), reason, Phase.RUN),
            PLENTY,
        )
        charged.append(found.microcredits)
        meter = found.meter
    assert charged == [1000, 666, 0]


# ---- what is charged


def test_every_reason_and_phase_has_its_part() -> None:
    for reason in EndReason:
        for phase in Phase:
            part = charged_part(reason, phase)
            if phase not in STARTED:
                assert part is ChargedPart.NOTHING
            if reason in SUCCESSES and phase in STARTED:
                assert part is ChargedPart.TO_END
            if reason in NO_FAULT:
                assert part is not ChargedPart.TO_END
            assert charged_part(reason, phase, is_outvoted=True) is ChargedPart.NOTHING


@pytest.mark.parametrize(
    "reason",
    [
        EndReason.LOST,
        EndReason.LOSES_NODES,
        EndReason.NODE_FAILED,
        EndReason.SANDBOX_FAILED,
        EndReason.HANDED_BACK,
    ],
)
def test_a_fault_of_the_node_costs_nothing(reason: EndReason) -> None:
    meter = AllocationMeter(FrozenPrice(10**9, 500), Instant(0))
    assert charge(meter, run(Instant(0), HOUR, reason), PLENTY).microcredits == 0


def test_preempted_work_costs_up_to_its_last_checkpoint_and_reclaimed_work_nothing() -> None:
    meter = AllocationMeter(FrozenPrice(3600), Instant(0))

    def cost(checkpoint: int | None, is_reclaim: bool = False) -> int:
        end = LeaseEnd(
            Instant(0),
            Instant(100 * SECOND),
            EndReason.PREEMPTED,
            Phase.RUN,
            None if checkpoint is None else Instant(checkpoint * SECOND),
            is_reclaim,
        )
        return charge(meter, end, PLENTY).microcredits

    assert cost(60) == 60
    assert cost(200) == 100  # an agent cannot date a checkpoint past the end
    assert cost(None) == 0
    assert cost(60, is_reclaim=True) == 0


@given(st.integers(0, 10**15), st.integers(0, 1_000_000))
def test_owner_and_fee_together_get_the_charge(amount: int, fee_ppm: int) -> None:
    parts = split(amount, fee_ppm)
    assert parts.owner_microcredits + parts.fee_microcredits == amount
    assert parts.fee_microcredits * 1_000_000 <= amount * fee_ppm
    assert parts.owner_microcredits >= 0
    assert split(amount, 0).fee_microcredits == 0


def test_the_page_of_charges_is_fresh() -> None:
    page = Path(__file__).parents[3] / "docs" / "charges.md"
    assert page.read_text(encoding="utf-8") == as_markdown()
