"""The bench's own arithmetic: what tenants had in an hour, and what nobody could have avoided."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench.fairness import Options, Pool, Tenant, Work, shares
from bench.fairness_hours import (
    HOUR,
    SLICE,
    Carried,
    Measured,
    Piece,
    by_hour,
    of_turns,
    of_whole_pieces,
    summary,
    worst,
)

from gpool.core.ids import TaskId
from gpool.core.model import Shape
from gpool.core.scheduler.order.orders import Policy

HALVES = {1: 0.5, 2: 0.5}


def test_where_nothing_runs_everything_can_be_had() -> None:
    assert Carried((), {1: 1, 2: 8}, 2).floor(HALVES) == 0


def test_what_runs_for_all_of_the_hour_cannot_be_given_to_others() -> None:
    """Twelve of sixteen GPUs where eight are due."""
    pieces = [Piece(1, node, 6, 2 * HOUR) for node in (1, 2)]
    assert Carried(pieces, {1: 6, 2: 1}, 2).floor(HALVES) == pytest.approx(0.5)


def test_one_gpu_in_use_keeps_a_large_piece_off_its_node() -> None:
    """Each node has one small task until the middle of the hour: half of the hour is left for both nodes."""
    pieces = [Piece(1, node, 1, HOUR // 2) for node in (1, 2)]
    carried = Carried(pieces, {1: 1, 2: 8}, 2)
    assert carried.room_for(8) == 16 * HOUR // 2
    assert carried.floor(HALVES) == 0
    late = Carried([Piece(1, node, 1, 3 * HOUR // 4) for node in (1, 2)], {1: 1, 2: 8}, 2)
    assert late.floor(HALVES) == pytest.approx(0.5)


@pytest.mark.parametrize("seed", range(3))
def test_no_hour_is_ever_fairer_than_its_floor(seed: int) -> None:
    pool = Pool(2, Policy(), seed)
    pool.join(Tenant(1, Work(1, 50)))
    pool.run(HOUR // 4)
    pool.join(Tenant(2, Work(8, 30)))
    found = shares("late", pool, Options(2, seed)).measured[0]
    for number, floor in enumerate(found.floors):
        slices, due = found.slices[6 * number : 6 * number + 6], pool.lent[0] * HOUR
        had = [sum(each[team][0] for each in slices) / due / found.fair[team] for team in (1, 2)]
        assert floor is not None
        assert max(abs(each - 1) for each in had) >= floor - 1e-6


def test_the_warm_up_is_shown_and_only_the_sum_leaves_it_out() -> None:
    """An hour of which one has all, then an hour of halves."""
    lent = (1000, 1000, 1000)
    one, half = 1000 * HOUR // 6, 500 * HOUR // 6
    first = [{1: (one, 0, 0), 2: (0, 0, 0)}] * 6
    second = [{1: (half, 0, 0), 2: (half, 0, 0)}] * 6
    found = Measured("x", 1, HALVES, [*first, *second], lent, (None, None), 1)
    assert [row["worst_pct"] for row in by_hour([found])] == [100.0, 0.0]
    told = summary([found])
    assert told["worst_pct"] == 0
    assert told["worst_with_warm_up_pct"] == 100
    assert told["team_hours_beyond_5_pct"] == 0


def test_what_sizes_allow_is_the_rounding_of_whole_pieces_or_of_turns() -> None:
    """A share of 12.8 GPUs is 1.6 pieces of eight: two are 25 % too many; of six turns 1.6 pieces are 9.6."""
    fifths = dict.fromkeys(range(1, 6), 0.2)
    assert of_whole_pieces(fifths, dict.fromkeys(fifths, 8), 64_000) == pytest.approx(0.25)
    assert of_turns(fifths, dict.fromkeys(fifths, 8), 64_000, SLICE) == pytest.approx(0.4 / 9.6)


PIECES = {
    "three teams with pieces of 8 in 32 GPUs": (4, (8, 8, 8), 0.05, 20),
    "three with single GPUs in 16": (2, (1, 1, 1), 0.05, 20),
    "three with pieces of 8, 4 and 1 in 32": (4, (8, 4, 1), 0.06, 30),
}


@pytest.mark.parametrize("name", PIECES)
def test_pieces_that_do_not_divide_are_had_by_turns_and_every_hour_is_even(name: str) -> None:
    """Held for good they would be a quarter of a share off, or an eighth."""
    nodes, pieces, off, most = PIECES[name]
    pool = Pool(nodes, Policy(), 7)
    pool.tick = SLICE // 10
    for team, gpus in enumerate(pieces, 1):
        pool.join(Tenant(team, Work(gpus, 600, preemptible=True)))
    found = shares(name, pool, Options(3, 7)).measured[0]
    assert abs(worst(found.hours)) <= off
    assert pool.between <= most * 3  # and not by taking from each other all the time


class Anew(Pool):
    """What is stopped keeps nothing and begins anew; no more comes than was there first."""

    def submit(self, tenant: Tenant, shape: Shape) -> None:
        if self.tasks < 4:
            super().submit(tenant, replace(shape, checkpoint_every=None))

    def stop(self, task: TaskId) -> None:
        length = self.of[task][2]
        super().stop(task)
        self.of[task] = (*self.of[task][:2], length)


@pytest.mark.parametrize("minutes", [15, 50])
def test_what_is_longer_than_a_turn_and_keeps_nothing_ends_all_the_same(minutes: int) -> None:
    """Two take turns on one node, each with two tasks. By turns of ten minutes none would ever end."""
    pool = Anew(1, Policy(), 7)
    pool.tick = SLICE // 10
    for team in (1, 2):
        pool.join(Tenant(team, Work(8, minutes, preemptible=True), waiting=2))
    pool.run(12 * HOUR)
    assert pool.tasks == 4
    assert not pool.of
