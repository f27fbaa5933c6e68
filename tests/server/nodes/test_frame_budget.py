"""What one node may send: generous to an honest agent, and an end to a flood."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpool.core.ids import NodeId
from gpool.core.model import MIB
from gpool.server.nodes.guards import (
    BLOCKED_S,
    BURST_BYTES,
    BURST_S,
    BYTES_PER_S,
    COST_OF_BEAT,
    COST_OF_OFFER,
    LONGEST_DEBT_S,
    FrameBudget,
    FrameBudgets,
    cost_of,
)
from gpool.wire.frames import PROTOCOL, Beat, Hello, Hold, OfferChanged, Released, Reports
from tests.server.server_desk import an_offer

RATE = 600.0


def test_an_agent_at_work_never_waits() -> None:
    """Eighteen thousand ends a second in frames of fifty, output beside them, and a beat now and then."""
    pace, now = FrameBudget(RATE, 0.0), 0.0
    ends = Reports(1, tuple(Released(number, 1) for number in range(50)))
    for turn in range(360 * 20):
        now = turn / 360
        assert pace.spend(cost_of(ends), 20_000, now) == 0
        if turn % 360 == 0:
            assert pace.spend(cost_of(Beat(turn, ())), 5_000, now) == 0


def test_an_agent_that_prints_without_end_waits_for_its_bytes_alone() -> None:
    pace, now, sent = FrameBudget(RATE, 0.0), 0.0, 0
    for _ in range(200):
        now += pace.spend(1.3, 4 * MIB, now)
        sent += 4 * MIB
    assert sent - BURST_BYTES <= now * BYTES_PER_S + 4 * MIB
    assert now <= sent / BYTES_PER_S


@given(
    st.lists(st.tuples(st.floats(0, 500), st.integers(0, 8 * MIB), st.floats(0, 2)), max_size=200)
)
def test_who_waits_as_told_never_sends_more_than_the_budget(
    sent: list[tuple[float, int, float]],
) -> None:
    pace, now, frames, size = FrameBudget(RATE, 0.0), 0.0, 0.0, 0
    for cost, weight, rest in sent:
        now += rest
        wait = pace.spend(cost, weight, now)
        assert wait <= LONGEST_DEBT_S
        now += wait
        frames, size = frames + cost, size + weight
        assert frames <= RATE * (now + BURST_S) * 1.0001 + 1
        assert size <= BYTES_PER_S * now * 1.0001 + BURST_BYTES + 1


def test_no_limit_is_no_limit() -> None:
    pace = FrameBudget(0.0, 0.0)
    assert not any(pace.spend(COST_OF_OFFER, 8 * MIB, 0.0) for _ in range(10_000))


def test_a_clock_that_stands_still_or_goes_back_gives_nothing() -> None:
    pace = FrameBudget(RATE, 10.0)
    for _ in range(1000):
        pace.spend(COST_OF_BEAT, 100, 10.0)
    assert pace.spend(0.0, 0, 5.0) == LONGEST_DEBT_S


def test_a_frame_costs_what_is_in_it() -> None:
    holds = tuple(Hold(number, 1) for number in range(2000))
    assert cost_of(Beat(1, holds)) == cost_of(Beat(1, ())) + 10
    items = tuple(Released(number, 1) for number in range(2000))
    assert cost_of(Reports(1, items)) == cost_of(Reports(1, ())) + 10


def test_a_node_that_flooded_is_shut_out_for_a_while_and_not_for_ever() -> None:
    pace = FrameBudget(RATE, 0.0)
    assert pace.blocked_for_s(0.0) == 0
    pace.block(10.0)
    assert pace.blocked_for_s(10.0) == BLOCKED_S
    assert not pace.is_full(10.0 + BLOCKED_S / 2)
    assert pace.blocked_for_s(10.0 + BLOCKED_S) == 0
    assert pace.is_full(10.0 + BLOCKED_S)


def test_a_node_that_comes_again_has_what_it_had() -> None:
    paces = FrameBudgets(RATE, most=3)
    spent = paces.of(NodeId(1), lambda: 0.0)
    while not spent.spend(COST_OF_BEAT, 100, 0.0):
        pass
    for number in range(2, 9):
        paces.of(NodeId(number), lambda: 0.0)
    assert paces.of(NodeId(1), lambda: 1.0) is spent
    assert len(paces) < 8, "those that are rested are forgotten"


def test_an_offer_costs_what_it_changes() -> None:
    """A node of eight GPUs changes all of them every second; one of a thousand new ones each time has to wait."""
    few, many = OfferChanged(an_offer(gpus=8)), OfferChanged(an_offer(gpus=1024))
    honest, flooding = FrameBudget(RATE, 0.0), FrameBudget(RATE, 0.0)
    for second in range(60):
        assert honest.spend(cost_of(few, 16), 4_000, float(second)) == 0
    now = sent = 0.0
    while now < 60:
        now += flooding.spend(cost_of(many, 2048), 400_000, now)
        sent += 1
    assert sent <= 6
    assert cost_of(many, 0) < cost_of(many, 2048) / 10  # the control: nothing changed
    assert cost_of(Hello(PROTOCOL, "boot", many.offer, 1, ()), 1024) > cost_of(many, 1024)
