"""Meters over their life: reservations, caps of tasks, ends that are reported together; bundles of transfers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpool.core.model import SECOND, Instant, Span
from gpool.core.money.charging import (
    AHEAD,
    AllocationMeter,
    FrozenPrice,
    must_extend,
    split,
    total_charge,
)
from gpool.core.money.ledger import LedgerAccount, LedgerView, PendingTransfer, apply_bundles
from gpool.core.money.metering import (
    FAR,
    divided_ends,
    fee_between,
    metered_age,
    reaches_cap_at,
    renew_at,
    runs_out_at,
    wanted_total,
)
from gpool.core.money.transfers import (
    AccountKind,
    LedgerAccountId,
    Reserve,
    TransferId,
    TransferOutcome,
    Void,
)

NOW = Instant(1_700_000_000 * SECOND)
prices = st.builds(FrozenPrice, st.integers(0, 10**9), st.integers(0, 10**6))
times = st.integers(0, 10**11)


@st.composite
def meters(draw: st.DrawFn) -> AllocationMeter:
    price = draw(prices)
    time = Span(draw(times))
    return AllocationMeter(price, NOW, time, total_charge(price, time))


@given(meters(), times)
def test_the_wanted_total_covers_every_charge_until_ahead(
    meter: AllocationMeter, later: int
) -> None:
    now = Instant(NOW + later)
    total = wanted_total(meter, now)
    assert total > meter.charged_microcredits
    assert runs_out_at(meter, total) >= now + AHEAD
    assert total_charge(meter.price, Span(metered_age(meter, now) + AHEAD)) <= total


@given(meters(), st.integers(0, 10**12), times)
def test_a_meter_is_renewed_when_less_than_half_is_left(
    meter: AllocationMeter, more: int, later: int
) -> None:
    reserved, now = meter.charged_microcredits + more, Instant(NOW + later)
    is_due = renew_at(meter, reserved) < now
    assert is_due == must_extend(meter.price, metered_age(meter, now), reserved) or (
        renew_at(meter, reserved) == now
    )


@given(meters(), times, st.integers(0, 10**9))
def test_a_lease_that_ends_by_its_cap_costs_at_most_what_is_left(
    meter: AllocationMeter, waits: int, left: int
) -> None:
    started = Instant(NOW + waits)
    end = reaches_cap_at(meter, started, left)
    if end == FAR:
        assert not meter.price.rate_microcredits
        return
    after = total_charge(meter.price, Span(meter.charged_time + end - started))
    assert end == started or after - meter.charged_microcredits <= left


@given(st.lists(st.integers(-5, 10**7), min_size=1, max_size=8), st.integers(0, 10**7))
def test_ends_reported_together_are_ordered_within_the_time_since_the_last_end(
    durations: list[int], since: int
) -> None:
    at = Instant(NOW + since)
    ends = divided_ends(NOW, at, [Span(each) for each in durations])
    assert ends == sorted(ends)
    assert ends[-1] == at
    assert ends[0] >= NOW
    assert len(ends) == len(durations)


@given(st.lists(st.integers(0, 1000), min_size=1), st.integers(0, 1_000_000))
def test_fees_of_charges_add_up_to_that_of_their_total(charges: list[int], ppm: int) -> None:
    total = fees = 0
    for each in charges:
        fees += fee_between(total, total + each, ppm)
        total += each
    assert fees == split(total, ppm).fee_microcredits


PAYER, PENDING = LedgerAccountId(10), LedgerAccountId(11)
MOVED, NO_FUNDS = TransferOutcome.MOVED, TransferOutcome.NO_FUNDS


def books(balance: int, *pending: int) -> LedgerView:
    accounts = (
        LedgerAccount(PAYER, AccountKind.USER, balance),
        LedgerAccount(PENDING, AccountKind.PENDING, sum(pending)),
    )
    return LedgerView(
        {each.id: each for each in accounts},
        {
            TransferId(f"p{number}"): PendingTransfer(
                TransferId(f"p{number}"), PAYER, PENDING, amount, 1, NOW
            )
            for number, amount in enumerate(pending)
        },
    )


def rolled(number: int, amount: int) -> list[Void | Reserve]:
    return [
        Void(TransferId(f"v{number}"), TransferId(f"p{number}")),
        Reserve(TransferId(f"r{number}"), PAYER, PENDING, amount, NOW),
    ]


def test_a_bundle_moves_whole_or_not_at_all() -> None:
    changes, outcomes = apply_bundles(books(0, 100), [rolled(0, 101)], NOW)
    assert outcomes == (NO_FUNDS,)
    assert (changes.transfers, changes.entries) == ((), ())
    changes, outcomes = apply_bundles(books(1, 100), [rolled(0, 101)], NOW)
    assert outcomes == (MOVED,)
    assert [each.id for each in changes.transfers] == ["v0", "r0"]


def test_a_bundle_cannot_use_the_money_of_a_refused_one() -> None:
    """The first returns 100 and asks for 500; the second would need what the first returned."""
    bundles = [rolled(0, 500), rolled(1, 150)]
    changes, outcomes = apply_bundles(books(0, 100, 100), bundles, NOW)
    assert outcomes == (NO_FUNDS, NO_FUNDS)
    assert changes.transfers == ()
    _, outcomes = apply_bundles(books(50, 100, 100), bundles, NOW)
    assert outcomes == (NO_FUNDS, MOVED)
