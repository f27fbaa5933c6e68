"""Throttling: guessers are slowed, owners are not, nobody is locked out, memory is bounded."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpool.core.model import SECOND, Instant, Span
from gpool.server.identity.throttle import (
    CLASS_RATES,
    NETWORKS_PER_SITE,
    RATES,
    Admitted,
    Attempt,
    Buckets,
    Rate,
    RouteClass,
    RouteLimits,
    SignInThrottle,
    Wait,
    network_of,
)

NOW = Instant(1_800_000_000 * SECOND)
LONGEST = max(r.every for r in (RATES.known, RATES.address, RATES.pair, RATES.name))
rates = st.builds(Rate, st.integers(1, 5), st.integers(1, 1000).map(Span))


def later(seconds: float) -> Instant:
    return Instant(NOW + int(seconds * SECOND))


def address(number: int) -> str:
    return f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"


# ---- buckets


@given(rates, st.lists(st.integers(0, 500), max_size=60))
def test_a_bucket_never_gives_more_than_its_burst_and_its_rate(rate: Rate, gaps: list[int]) -> None:
    buckets, now, given_at = Buckets(), NOW, []
    for gap in gaps:
        now = Instant(now + gap)
        if buckets.spend([("k", rate)], now) is None:
            given_at.append(now)
    for first, start in enumerate(given_at):
        for count, end in enumerate(given_at[first:], 1):
            assert count <= rate.burst + (end - start) // rate.every


@given(rates, st.lists(st.integers(0, 500), max_size=40))
def test_waiting_as_long_as_told_is_always_enough_and_never_longer_than_one_step(
    rate: Rate, gaps: list[int]
) -> None:
    buckets, now = Buckets(), NOW
    for gap in gaps:
        now = Instant(now + gap)
        wait = buckets.spend([("k", rate)], now)
        if wait is not None:
            assert 0 < wait.span <= rate.every
            now = Instant(now + wait.span)
            assert buckets.spend([("k", rate)], now) is None


def test_when_one_of_several_buckets_is_empty_nothing_is_taken_from_the_others() -> None:
    buckets, small, large = Buckets(), Rate(1, Span(100)), Rate(2, Span(100))
    assert buckets.spend([("small", small), ("large", large)], NOW) is None
    for _ in range(5):
        assert buckets.spend([("large", large), ("small", small)], NOW) is not None
    assert buckets.spent("large", large, NOW) == 1


def test_what_is_given_back_can_be_spent_again() -> None:
    buckets, rate = Buckets(), Rate(1, Span(100))
    for _ in range(10):
        assert buckets.spend([("k", rate)], NOW) is None
        buckets.give_back([("k", rate)])


def test_a_flood_of_strangers_never_makes_it_forget_who_failed_most() -> None:
    buckets, rate = Buckets(most=1000), Rate(10, Span(SECOND))
    for _ in range(10):
        buckets.spend([("guesser", rate)], NOW)
    for number in range(20_000):
        buckets.spend([(number, rate)], NOW)
        assert len(buckets) <= 1001
    assert buckets.spend([("guesser", rate)], NOW) is not None


def test_what_is_full_again_is_forgotten() -> None:
    buckets, rate = Buckets(most=10), Rate(10, Span(SECOND))
    for number in range(10):
        buckets.spend([(number, rate)], NOW)
    buckets.spend([("one more", rate)], later(60))
    assert len(buckets) == 1


@pytest.mark.parametrize(
    ("text", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:ffff:ffff:ffff", "2001:db8::/64"),
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("unix", "unix"),
    ],
)
def test_one_customers_addresses_count_as_one(text: str, network: str) -> None:
    assert network_of(text) == network


# ---- sign-in

guesses = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(["ada", "Ada", "bob"]), st.integers(0, 3000)),
    max_size=80,
)


def guess_wildly(throttle: SignInThrottle, name: str, count: int, now: Instant) -> int:
    """From as many addresses as guesses; how many were let through."""
    return sum(
        isinstance(throttle.attempt(Attempt(name, address(n)), now), Admitted) for n in range(count)
    )


def test_an_owner_at_a_known_address_gets_in_while_thousands_guess() -> None:
    throttle = SignInThrottle()
    first = throttle.attempt(Attempt("ada", "192.0.2.7"), NOW)
    assert isinstance(first, Admitted)
    throttle.succeeded(first, NOW)
    for minute in range(10):
        guess_wildly(throttle, "ada", 5000, later(minute))
        assert isinstance(throttle.attempt(Attempt("ada", "192.0.2.7"), later(minute)), Admitted)
    # The control: somebody nobody knows has to wait by now.
    assert isinstance(throttle.attempt(Attempt("ada", "192.0.2.8"), later(10)), Wait)


def test_an_owner_at_a_new_address_gets_in_while_a_few_addresses_guess_all_day() -> None:
    throttle = SignInThrottle()
    for second in range(0, 3600, 2):
        for guesser in range(10):
            throttle.attempt(Attempt("ada", address(guesser)), later(second))
        if second % 600 == 0:
            owner = throttle.attempt(Attempt("ada", f"192.0.2.{second // 600}"), later(second))
            assert isinstance(owner, Admitted)


def test_a_48_cannot_keep_an_owner_at_a_new_address_out() -> None:
    throttle = SignInThrottle()
    let_in = {"guesser": 0, "owner": 0}
    for second in range(0, 3600, 6):
        for guess in range(4):
            who = Attempt("ada", f"2001:db8:0:{second * 4 + guess:x}::1")
            let_in["guesser"] += isinstance(throttle.attempt(who, later(second)), Admitted)
        owner = Attempt("ada", f"198.51.{second // 256}.{second % 256}")
        let_in["owner"] += isinstance(throttle.attempt(owner, later(second)), Admitted)
    assert let_in["owner"] == 600
    most = RATES.fresh_site.burst + 1 + RATES.name.burst + 3600 * SECOND // RATES.name.every
    assert let_in["guesser"] <= most + 1


def test_as_many_unrelated_addresses_can() -> None:
    """The control: what a /48 was counted as before."""
    throttle, owner_waits = SignInThrottle(), 0
    for second in range(0, 3600, 6):
        guess_wildly(throttle, "ada", 0, later(second))
        for guess in range(4):
            throttle.attempt(Attempt("ada", address(second * 4 + guess)), later(second))
        owner = Attempt("ada", f"198.51.{second // 256}.{second % 256}")
        owner_waits += isinstance(throttle.attempt(owner, later(second)), Wait)
    assert owner_waits > 100


def test_a_48_has_the_rates_of_eight_networks() -> None:
    limits = RouteLimits()
    let_in = sum(
        limits.take_address(RouteClass.SIGN_IN, f"2001:db8:0:{net:x}::1", NOW) is None
        for net in range(2000)
    )
    assert let_in == NETWORKS_PER_SITE * CLASS_RATES[RouteClass.SIGN_IN].address.burst
    assert limits.take_address(RouteClass.SIGN_IN, "2001:db8:1::1", NOW) is None


def test_one_address_guesses_at_one_name_a_few_times_and_then_every_so_often() -> None:
    throttle = SignInThrottle()
    let_in = sum(
        isinstance(throttle.attempt(Attempt("ada", "192.0.2.7"), later(tick / 10)), Admitted)
        for tick in range(36_000)
    )
    assert let_in <= RATES.pair.burst + 3600 * SECOND // RATES.pair.every + 1
    assert let_in > 100  # slowed, not locked


def test_one_address_that_tries_many_names_is_slowed_too() -> None:
    throttle = SignInThrottle()
    let_in = sum(
        isinstance(throttle.attempt(Attempt(f"name{n}", "192.0.2.7"), NOW), Admitted)
        for n in range(1000)
    )
    assert let_in == RATES.address.burst


def test_guessing_at_one_name_from_everywhere_is_bounded() -> None:
    throttle, dice, let_in = SignInThrottle(), random.Random(1), 0
    for tick in range(20_000):
        who = Attempt("ada", address(dice.randrange(1 << 24)))
        let_in += isinstance(throttle.attempt(who, later(tick / 200)), Admitted)
    seconds = 100 * SECOND
    most = RATES.first_tries.burst + seconds // RATES.first_tries.every
    most += RATES.name.burst + seconds // RATES.name.every
    assert let_in <= most + 2


@settings(max_examples=50)
@given(guesses)
def test_nobody_is_ever_locked_out_the_wait_is_bounded_and_enough(
    strangers: list[tuple[int, str, int]],
) -> None:
    throttle, now = SignInThrottle(), NOW
    for number, name, gap in strangers:
        now = Instant(now + gap)
        found = throttle.attempt(Attempt(name, address(number)), now)
        if isinstance(found, Wait):
            assert found.span <= LONGEST
            now = Instant(now + found.span)
            # Having waited it may draw on the other bucket of its name; that one's wait is bounded too.
            for _ in range(2):
                again = throttle.attempt(Attempt(name, address(number)), now)
                if isinstance(again, Admitted):
                    break
                now = Instant(now + again.span)
            assert isinstance(again, Admitted)


def test_a_right_password_gives_back_only_what_it_cost() -> None:
    """So an account of one's own is no help in guessing at another."""
    throttle, let_in = SignInThrottle(), 0
    for _ in range(200):
        mine = throttle.attempt(Attempt("mallory", "192.0.2.7"), NOW)
        if isinstance(mine, Admitted):
            throttle.succeeded(mine, NOW)
        let_in += isinstance(throttle.attempt(Attempt("ada", "192.0.2.7"), NOW), Admitted)
    assert let_in == RATES.pair.burst


def test_a_known_address_is_forgotten_in_time() -> None:
    throttle = SignInThrottle()
    found = throttle.attempt(Attempt("ada", "192.0.2.7"), NOW)
    assert isinstance(found, Admitted)
    throttle.succeeded(found, NOW)
    after = Instant(NOW + RATES.remembered + SECOND)
    guess_wildly(throttle, "ada", 2000, after)
    assert isinstance(throttle.attempt(Attempt("ada", "192.0.2.7"), after), Wait)


# ---- classes of routes


def test_every_class_of_routes_has_rates() -> None:
    assert set(CLASS_RATES) == set(RouteClass)


def test_one_account_that_floods_never_slows_another() -> None:
    limits = RouteLimits()
    for _ in range(20_000):
        limits.take_account(RouteClass.READ, 1, NOW)
    assert limits.take_account(RouteClass.READ, 1, NOW) is not None
    assert limits.take_account(RouteClass.READ, 2, NOW) is None
    assert limits.take_account(RouteClass.CHANGE, 1, NOW) is None


def test_one_address_that_floods_never_slows_another_or_an_account() -> None:
    limits = RouteLimits()
    for _ in range(3000):
        limits.take_address(RouteClass.READ, "192.0.2.7", NOW)
    assert limits.take_address(RouteClass.READ, "192.0.2.7", NOW) is not None
    assert limits.take_address(RouteClass.READ, "192.0.2.8", NOW) is None
    assert limits.take_account(RouteClass.READ, 1, NOW) is None


def test_retry_after_is_whole_seconds_and_enough() -> None:
    assert Wait(Span(1)).seconds == 1
    assert Wait(Span(SECOND)).seconds == 1
    assert Wait(Span(SECOND + 1)).seconds == 2
