"""Admission under load: the order of refusal, hysteresis, and a simulated server at many times its capacity."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count
from statistics import quantiles

from hypothesis import given, settings
from hypothesis import strategies as st

from gpool.server.overload.admission import (
    FALL_PER_S,
    FEW,
    MANY,
    MOST_PRESSURE,
    SHED,
    TICK_S,
    AdmissionController,
    AdmissionLimits,
    LoadClass,
    LoadSample,
)

LIMITS = AdmissionLimits(delay_s=0.4, concurrency=64)
DELAYS = st.floats(0, 10)
TICKS = st.lists(
    st.tuples(DELAYS, st.integers(0, 100), st.floats(TICK_S, 5), st.integers(0, 300)), max_size=30
)


def loaded(ticks: list[tuple[float, int, float, int]]) -> tuple[AdmissionController, float]:
    """A controller after ticks of (delay, requests, time since the last one, active requests), and the time."""
    controller, now_s = AdmissionController(LIMITS), 0.0
    for delay_s, requests, passed_s, active in ticks:
        for _ in range(requests):
            controller.admit(LoadClass.VITAL, now_s)
        controller.active = active
        now_s += passed_s
        controller.tick(LoadSample(write_s=delay_s), now_s)
    return controller, now_s


@given(TICKS, st.floats(0, 5), st.integers(0, 100))
def test_a_class_is_refused_only_if_all_classes_before_it_are_refused(
    ticks: list[tuple[float, int, float, int]], later_s: float, more: int
) -> None:
    controller, now_s = loaded(ticks)
    now_s += later_s
    for _ in range(more):
        controller.admit(LoadClass.VITAL, now_s)
    found = [deepcopy(controller).admit(kind, now_s) is not None for kind in SHED]
    last = max((rank for rank, shed in enumerate(found) if shed), default=0)
    assert all(found[:last])


@given(TICKS, st.floats(0, 100))
def test_vital_requests_are_never_refused(
    ticks: list[tuple[float, int, float, int]], later_s: float
) -> None:
    controller, now_s = loaded(ticks)
    for _ in range(2 * MANY):
        assert controller.admit(LoadClass.VITAL, now_s + later_s) is None


@given(TICKS)
def test_a_refusal_names_a_time_that_is_short_and_longest_for_listings(
    ticks: list[tuple[float, int, float, int]],
) -> None:
    controller, now_s = loaded(ticks)
    assert 0 <= controller.pressure <= MOST_PRESSURE
    times = [shed.retry_after_s for kind in SHED if (shed := controller.admit(kind, now_s))]
    assert all(1 <= seconds <= MOST_PRESSURE for seconds in times)
    assert times == sorted(times, reverse=True)


@given(TICKS, DELAYS)
def test_pressure_rises_above_half_the_limit_only_and_falls_below_a_quarter_only(
    ticks: list[tuple[float, int, float, int]], delay_s: float
) -> None:
    controller, now_s = loaded(ticks)
    before = controller.pressure
    controller.tick(LoadSample(lag_s=delay_s), now_s + TICK_S)
    if controller.pressure > before:
        assert delay_s >= LIMITS.delay_s / 2
    if controller.pressure < before:
        assert delay_s < LIMITS.delay_s / 4


@given(TICKS)
def test_after_a_calm_of_eight_seconds_everything_is_admitted(
    ticks: list[tuple[float, int, float, int]],
) -> None:
    controller, now_s = loaded(ticks)
    controller.active = 0
    for _ in range(1 + round(MOST_PRESSURE / FALL_PER_S / TICK_S)):
        now_s += TICK_S
        controller.tick(LoadSample(), now_s)
    assert controller.pressure == 0
    assert all(controller.admit(kind, now_s) is None for kind in SHED)


def test_one_long_turn_without_many_requests_refuses_nothing() -> None:
    controller = AdmissionController(LIMITS)
    controller.tick(LoadSample(), 0.0)
    assert controller.admit(LoadClass.LISTING, 3.0) is None  # the tick is overdue
    controller.tick(LoadSample(lag_s=2.9), 3.0)
    assert controller.admit(LoadClass.LISTING, 3.0) is None
    controller.tick(LoadSample(lag_s=2.9), 6.0)  # nor is a second one, with a single request
    for _ in range(FEW):
        assert controller.admit(LoadClass.LISTING, 6.0) is None
    controller.tick(LoadSample(lag_s=2.9), 9.0)  # but with a few
    assert controller.admit(LoadClass.LISTING, 9.0) is not None


def test_a_long_turn_with_many_requests_refuses_before_it_ends() -> None:
    controller = AdmissionController(LIMITS)
    controller.tick(LoadSample(), 0.0)
    for _ in range(MANY):
        assert controller.admit(LoadClass.LISTING, TICK_S) is None
    assert controller.admit(LoadClass.LISTING, TICK_S + 0.25) is not None
    assert controller.admit(LoadClass.EXPLAIN, TICK_S + 0.25) is None
    assert controller.admit(LoadClass.SUBMISSION, TICK_S + 0.5) is not None
    assert controller.admit(LoadClass.OTHER, TICK_S + 0.5) is None


def test_many_active_requests_refuse_the_next_in_the_order_of_the_classes() -> None:
    controller, seen = AdmissionController(LIMITS), []
    for active in (7, 8, 64, 128):
        controller.active = active
        seen.append(sum(controller.admit(kind, 0.0) is not None for kind in SHED))
    assert seen == [0, 2, 3, 4]


# ---- a server that works through turns, as an event loop does


@dataclass
class Turns:
    """A single-threaded server: in each turn it handles what arrived in the one before. Times in seconds."""

    load: float  # offered work, in times of the capacity
    cost_s: float = 0.005
    refusal_s: float = 0.0002
    controller: AdmissionController = field(default_factory=lambda: AdmissionController(LIMITS))
    now_s: float = 0.0
    delays_s: list[float] = field(default_factory=list)  # of admitted requests
    admitted: int = 0
    refused: int = 0

    def run(self, until_s: float) -> None:
        arrivals = count(1)
        arrived, tick_s = [self.now_s], self.now_s + TICK_S
        interval_s = self.cost_s / self.load
        kinds = (LoadClass.LISTING, LoadClass.SUBMISSION, LoadClass.EXPLAIN, LoadClass.SUBMISSION)
        next_s = self.now_s + interval_s
        while self.now_s < until_s:
            if self.now_s >= tick_s:
                self.controller.tick(LoadSample(lag_s=self.now_s - tick_s), self.now_s)
                tick_s = self.now_s + TICK_S
            for came_s in arrived:
                kind = kinds[next(arrivals) % 4]
                if self.controller.admit(kind, self.now_s) is None:
                    self.now_s += self.cost_s
                    self.admitted += 1
                    self.delays_s.append(self.now_s - came_s)
                else:
                    self.now_s += self.refusal_s
                    self.refused += 1
            arrived = []
            while next_s <= self.now_s:
                arrived.append(next_s)
                next_s += interval_s
            if not arrived:
                self.now_s = next_s


@settings(max_examples=8, deadline=None)
@given(load=st.floats(1.5, 6.0), cost_s=st.sampled_from([0.005, 0.02]))
def test_at_many_times_the_capacity_admitted_requests_stay_quick_and_most_of_the_capacity_is_used(
    load: float, cost_s: float
) -> None:
    turns = Turns(load, cost_s)
    turns.run(10.0)
    assert quantiles(turns.delays_s, n=100)[-1] < 1.0
    assert max(turns.delays_s) < 1.5
    assert turns.admitted * cost_s > 0.6 * 10.0
    turns.load = 0.5
    turns.run(20.0)
    turns.refused = 0
    turns.run(21.0)
    assert turns.refused == 0


def test_without_the_controller_the_same_load_makes_everyone_wait() -> None:
    """The control."""
    turns = Turns(5.0, controller=AdmissionController(AdmissionLimits(1e9, 1 << 30)))
    turns.run(10.0)
    assert quantiles(turns.delays_s, n=100)[-1] > 5.0
