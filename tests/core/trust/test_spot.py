"""Spot checks: rates, the choice, standing of nodes, vesting and its consequences."""

from __future__ import annotations

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import Instant
from gpool.core.trust.randomness import PPM
from gpool.core.trust.spot import (
    DEFAULT_SPOT,
    PassedChecks,
    ReliabilityKey,
    after_failure,
    check_rate,
    is_chosen,
    may_start,
    passed_checks,
)
from gpool.core.trust.standing import (
    BAN,
    FAILED,
    LIMIT,
    PASSED,
    Standing,
    banned,
    checked,
    compared,
    owner_caught,
    started,
)
from gpool.core.trust.vesting import (
    Consequences,
    Unsettled,
    audit_order,
    consequences,
    has_vested,
    stake,
)

SECRET = b"secret of the server"
CLEAN = Standing()
NOW = Instant(10**15)


def alone(passed: int) -> PassedChecks:
    """Checks of a node with one key."""
    return PassedChecks(passed, passed)


def test_everything_is_checked_during_probation_and_while_suspect() -> None:
    last = DEFAULT_SPOT.probation - 1
    assert check_rate(DEFAULT_SPOT, CLEAN, alone(last), price=1, stake=10_000) == PPM
    suspect = checked(CLEAN, is_passed=False)
    assert check_rate(DEFAULT_SPOT, suspect, alone(500), price=1, stake=10_000) == PPM


def test_the_rate_falls_with_passed_checks_to_the_floor() -> None:
    rates = [check_rate(DEFAULT_SPOT, CLEAN, alone(passed), 1, 10_000) for passed in range(1, 200)]
    assert rates == sorted(rates, reverse=True)
    assert rates[DEFAULT_SPOT.probation - 1] == PPM * 14 // 64
    assert rates[-1] == DEFAULT_SPOT.floor_ppm


def test_a_result_worth_more_than_the_stake_is_always_checked() -> None:
    assert check_rate(DEFAULT_SPOT, CLEAN, alone(500), price=10, stake=10) == PPM
    assert check_rate(DEFAULT_SPOT, CLEAN, alone(500), price=0, stake=0) == PPM
    assert check_rate(DEFAULT_SPOT, CLEAN, alone(500), price=20, stake=500) == PPM * 4 // 100


def test_a_lie_never_gains_on_average_from_one_check() -> None:
    for passed in (8, 20, 100, 10_000):
        for price, at_stake in ((1, 2), (7, 300), (50, 1000)):
            rate = check_rate(DEFAULT_SPOT, CLEAN, alone(passed), price, at_stake)
            assert rate * at_stake >= (price - 1) * PPM


def test_the_choice_is_that_of_the_rate_and_needs_the_secret() -> None:
    tasks = [TaskId(number) for number in range(20_000)]
    chosen = {task for task in tasks if is_chosen(SECRET, task, 1, b"commitment", 20_000)}
    again = {task for task in tasks if is_chosen(SECRET, task, 1, b"commitment", 20_000)}
    guessed = {task for task in tasks if is_chosen(b"a guess", task, 1, b"commitment", 20_000)}
    assert chosen == again
    assert 320 < len(chosen) < 480
    assert len(chosen & guessed) < 30
    assert not any(is_chosen(SECRET, task, 1, b"", 0) for task in tasks[:100])
    assert all(is_chosen(SECRET, task, 1, b"", PPM) for task in tasks[:100])


def test_a_new_node_gets_its_first_tasks_spaced_out() -> None:
    began = started(CLEAN, NOW)
    assert may_start(DEFAULT_SPOT, CLEAN, PassedChecks(), NOW)
    assert not may_start(
        DEFAULT_SPOT, began, PassedChecks(), Instant(NOW + DEFAULT_SPOT.spacing - 1)
    )
    assert may_start(DEFAULT_SPOT, began, PassedChecks(), Instant(NOW + DEFAULT_SPOT.spacing))
    assert may_start(DEFAULT_SPOT, began, alone(DEFAULT_SPOT.probation), NOW)


def test_a_further_environment_of_a_known_node_has_a_short_probation() -> None:
    known = ReliabilityKey(NodeId(1), "H100", "torch")
    further = ReliabilityKey(NodeId(1), "H100", "jax")
    counts = {known: 40, further: DEFAULT_SPOT.short_probation - 1}
    passed = passed_checks(counts, further)
    assert passed == PassedChecks(DEFAULT_SPOT.short_probation - 1, 41)
    assert may_start(DEFAULT_SPOT, started(CLEAN, NOW), passed, NOW)
    assert check_rate(DEFAULT_SPOT, CLEAN, passed, 1, 1000) == PPM
    counts[further] += 1
    assert check_rate(DEFAULT_SPOT, CLEAN, passed_checks(counts, further), 1, 1000) < PPM // 50
    assert passed_checks({}, known) == PassedChecks(0, 0)


def test_a_failed_check_returns_the_rate_to_that_after_probation() -> None:
    assert after_failure(DEFAULT_SPOT, 500) == DEFAULT_SPOT.probation
    assert after_failure(DEFAULT_SPOT, 3) == 3


def test_one_failed_check_is_cleared_by_an_audit_and_three_are_caught() -> None:
    one = checked(CLEAN, is_passed=False)
    assert one.is_suspect
    assert not one.is_caught
    cleared = one
    for _ in range(-(-FAILED // PASSED)):
        assert cleared.is_suspect
        cleared = checked(cleared, is_passed=True)
    assert cleared == CLEAN
    assert checked(checked(one, is_passed=False), is_passed=False).is_caught


def test_honest_work_in_the_past_does_not_pay_for_lies() -> None:
    patient = CLEAN
    for _ in range(10_000):
        patient = checked(patient, is_passed=True)
    assert patient == CLEAN


def test_two_failures_are_caught_within_few_checks_only() -> None:
    soon = later = checked(CLEAN, is_passed=False)
    for _ in range(18):
        soon = checked(soon, is_passed=True)
    for _ in range(19):
        later = checked(later, is_passed=True)
    assert checked(soon, is_passed=False).is_caught
    assert not checked(later, is_passed=False).is_caught


def test_failures_as_a_sibling_count_for_themselves() -> None:
    sibling = compared(CLEAN, is_passed=False)
    assert not sibling.is_suspect
    assert not sibling.is_caught
    assert checked(sibling, is_passed=True).as_sibling == FAILED
    assert compared(sibling, is_passed=True).as_sibling == FAILED - PASSED
    assert compared(sibling, is_passed=False).is_caught


def test_a_ban_doubles_with_each_offence_and_ends_in_probation() -> None:
    once = banned(Standing(suspicion=LIMIT, last_start=NOW), NOW)
    assert once == Standing(offences=1, banned_until=Instant(NOW + BAN))
    assert not may_start(DEFAULT_SPOT, once, alone(500), Instant(NOW + BAN - 1))
    assert may_start(DEFAULT_SPOT, once, PassedChecks(), Instant(NOW + BAN))
    assert banned(once, NOW).banned_until == NOW + 2 * BAN
    many = Standing(offences=1000)
    assert banned(many, NOW).banned_until == NOW + 64 * BAN


def test_other_nodes_of_a_caught_owner_are_suspect() -> None:
    assert owner_caught(CLEAN).is_suspect
    assert not owner_caught(CLEAN).is_caught
    assert owner_caught(Standing(suspicion=LIMIT)).suspicion == LIMIT


def unsettled(task: int, *, is_checked: bool = False, can_rerun: bool = True) -> Unsettled:
    return Unsettled(TaskId(task), 10 * task, NOW, is_checked, can_rerun)


def test_earnings_vest_after_the_window() -> None:
    window = DEFAULT_SPOT.window
    assert not has_vested(NOW, window, Instant(NOW + window - 1))
    assert has_vested(NOW, window, Instant(NOW + window))


def test_a_caught_node_loses_its_stake_and_unchecked_results_are_withdrawn() -> None:
    results = [unsettled(1), unsettled(2, is_checked=True), unsettled(3, can_rerun=False)]
    assert stake(results) == 60
    assert consequences(results) == Consequences(60, (TaskId(1),), (TaskId(3),))
    assert consequences([]) == Consequences(0, (), ())


def test_an_audit_checks_unchecked_results_in_an_order_that_needs_the_secret() -> None:
    results = [unsettled(number, is_checked=number % 5 == 0) for number in range(50)]
    order = audit_order(SECRET, results)
    assert sorted(order) == [number for number in range(50) if number % 5]
    assert order == audit_order(SECRET, reversed(results))
    assert order != audit_order(b"a guess", results)
