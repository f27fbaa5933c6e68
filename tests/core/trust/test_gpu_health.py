"""Rules of health: what is never so, whatever a card says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.gpu_health import (
    DEADLY,
    HOT_FOR_US,
    QUIET_AFTER_XID_US,
    SECOND_US,
    TASKS_OWN,
    Condition,
    Health,
    Symptoms,
    examine,
)

maybe_number = st.none() | st.integers(-50, 2000)
symptoms = st.builds(
    Symptoms,
    temperature_c=maybe_number,
    slowdown_c=st.none() | st.integers(60, 100),
    shutdown_c=st.none() | st.integers(80, 110),
    power_mw=st.none() | st.integers(0, 2_000_000),
    power_limit_mw=st.none() | st.integers(0, 1_000_000),
    throttled=st.frozensets(st.sampled_from(["thermal", "power", "brake"])),
    ecc_uncorrected=st.none() | st.integers(0, 5),
    remap_pending=st.booleans(),
    remap_failed=st.booleans(),
    xids=st.lists(st.integers(0, 200), max_size=4).map(tuple),
    hung_us=st.integers(0, 60 * SECOND_US),
    lost=st.booleans(),
)
looks = st.lists(st.tuples(symptoms, st.integers(1, 120 * SECOND_US)), max_size=8)


def after(told: list[tuple[Symptoms, int]]) -> tuple[Condition, int]:
    condition, now = Condition(), 0
    for one, passed in told:
        now += passed
        condition = examine(one, condition, now)
    return condition, now


@given(looks)
def test_a_card_is_never_ailing_without_a_reason_nor_healthy_with_one(
    told: list[tuple[Symptoms, int]],
) -> None:
    condition, _ = after(told)
    assert (condition.health is Health.HEALTHY) == (not condition.reason)


@given(looks, symptoms)
def test_the_condition_is_always_that_of_its_worst_cause(
    told: list[tuple[Symptoms, int]], last: Symptoms
) -> None:
    before, now = after(told)
    condition = examine(last, before, now + 1)
    weights = [cause.health.weight for cause in condition.causes]
    assert condition.health.weight == max(weights, default=0)
    assert len({cause.name for cause in condition.causes}) == len(condition.causes)


@given(looks)
def test_a_card_always_recovers_once_nothing_has_been_wrong_for_long_enough(
    told: list[tuple[Symptoms, int]],
) -> None:
    condition, now = after(told)
    condition = examine(Symptoms(), condition, now + QUIET_AFTER_XID_US)
    assert condition == Condition()


@given(looks, symptoms)
def test_a_further_symptom_never_makes_a_card_healthier(
    told: list[tuple[Symptoms, int]], last: Symptoms
) -> None:
    before, now = after(told)
    better = examine(last, before, now + 1)
    for worse in (
        Symptoms(**{**_fields(last), "lost": True}),
        Symptoms(**{**_fields(last), "xids": (*last.xids, 79)}),
        Symptoms(**{**_fields(last), "hung_us": 60 * SECOND_US}),
    ):
        assert examine(worse, before, now + 1).health.weight >= better.health.weight


def _fields(one: Symptoms) -> dict[str, object]:
    return {name: getattr(one, name) for name in Symptoms.__slots__}


@pytest.mark.parametrize("code", sorted(TASKS_OWN))
def test_what_a_task_does_wrong_is_never_held_against_the_card(code: int) -> None:
    assert examine(Symptoms(xids=(code,)), Condition(), 0) == Condition()


@pytest.mark.parametrize("code", sorted(DEADLY))
def test_a_deadly_error_quarantines_and_names_itself(code: int) -> None:
    condition = examine(Symptoms(xids=(code,)), Condition(), 0)
    assert condition.health is Health.QUARANTINED
    assert f"XID {code}" in condition.reason


@pytest.mark.parametrize(
    ("seen", "health"),
    [
        (Symptoms(temperature_c=60, slowdown_c=87), Health.HEALTHY),
        (Symptoms(temperature_c=88, slowdown_c=87, shutdown_c=92), Health.DEGRADED),
        (Symptoms(temperature_c=92, slowdown_c=87, shutdown_c=92), Health.QUARANTINED),
        (Symptoms(ecc_uncorrected=0), Health.HEALTHY),
        (Symptoms(ecc_uncorrected=1), Health.QUARANTINED),
        (Symptoms(remap_pending=True), Health.DEGRADED),
        (Symptoms(remap_failed=True), Health.QUARANTINED),
        (Symptoms(hung_us=9 * SECOND_US), Health.HEALTHY),
        (Symptoms(hung_us=10 * SECOND_US), Health.QUARANTINED),
        (Symptoms(throttled=frozenset({"power"})), Health.HEALTHY),
        (Symptoms(throttled=frozenset({"thermal"})), Health.DEGRADED),
        (Symptoms(power_mw=900_000, power_limit_mw=700_000), Health.DEGRADED),
        (Symptoms(xids=(999,)), Health.DEGRADED),
        (Symptoms(lost=True), Health.QUARANTINED),
    ],
)
def test_each_symptom_has_its_weight(seen: Symptoms, health: Health) -> None:
    assert examine(seen, Condition(), 0).health is health


def test_a_card_that_stays_hot_is_quarantined_and_one_at_the_edge_does_not_flicker() -> None:
    hot = Symptoms(temperature_c=88, slowdown_c=87)
    edge = Symptoms(temperature_c=84, slowdown_c=87)
    condition = examine(hot, Condition(), 0)
    assert condition.health is Health.DEGRADED
    condition = examine(edge, condition, HOT_FOR_US)
    assert condition.health is Health.QUARANTINED
    condition = examine(Symptoms(temperature_c=80, slowdown_c=87), condition, HOT_FOR_US + 1)
    assert condition.health is Health.QUARANTINED
    condition = examine(Symptoms(temperature_c=80, slowdown_c=87), condition, 2 * HOT_FOR_US)
    assert condition == Condition()
