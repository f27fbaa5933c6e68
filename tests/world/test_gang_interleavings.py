"""Gangs, singles, failures and preemptions in any order: the judge of `bench.gangs` finds nothing, and sees what is broken."""

from __future__ import annotations

import pytest
from bench.gang_flaws import FLAWS
from bench.gang_ground import OFFERS, Ground
from bench.gang_judge import Broken, Judge
from bench.gang_pool import Pool

from bench.gangs import run
from gpool.core.model import GIB, Allocation, Slice

WHOLE = "[100,1,[[0,25769803776,1000]]]"


def test_no_interleaving_breaks_a_promise() -> None:
    tally = run(range(300))
    assert not tally.found, tally.said
    assert tally.gangs > 500
    assert tally.leases > 1000


def test_a_plan_is_written_under_the_term_it_was_made_in() -> None:
    """Interleaving 18064: a pass waited for its preemptions to be written, and another took a new picture meanwhile."""
    tally = run(range(18064, 18065))
    assert not tally.found, tally.said


@pytest.mark.parametrize("flaw", FLAWS)
def test_what_is_broken_on_purpose_is_found(flaw: str) -> None:
    assert run(range(400), flaw, until_found=True).found


def test_an_interleaving_is_its_number() -> None:
    """It neither knows what ran before it nor leaves anything behind."""
    ground = Ground()

    def story(seed: int) -> tuple[list[str], int, int]:
        pool = Pool(ground, seed)
        pool.run()
        return pool.told, pool.steps, pool.leases

    try:
        first = story(7)
        story(8)
        assert story(7) == first
    finally:
        ground.close()


# ---- the judge itself


def a_judge(**wanted: int) -> Judge:
    judge = Judge(OFFERS)
    judge.wanted = {int(task[1:]): nodes for task, nodes in wanted.items()}
    return judge


def test_half_a_gang_is_seen() -> None:
    tasks = [(1, 1, "leased", 1, None, None, None)]
    members = [(1, 1, 0, 1, 0, WHOLE, 1)]
    with pytest.raises(Broken, match="partial_gang"):
        a_judge(t1=2).check((tasks, members), None)


def test_a_gang_on_two_sites_is_seen() -> None:
    tasks = [(1, 1, "leased", 1, None, None, None)]
    members = [(1, 1, 0, 1, 0, WHOLE, 1), (1, 1, 1, 4, 0, WHOLE, 1)]
    with pytest.raises(Broken, match="sites"):
        a_judge(t1=2).check((tasks, members), None)


def test_a_member_that_holds_on_after_its_gang_is_seen() -> None:
    with pytest.raises(Broken, match="members of task 1 hold"):
        a_judge(t1=2).check(([], [(1, 1, 0, 1, 0, WHOLE, 1)]), None)


def test_a_slice_given_twice_is_seen() -> None:
    tasks = [(1, 1, "leased", 1, None, None, None), (2, 1, "leased", 1, 2, 1, WHOLE)]
    members = [(1, 1, 0, 1, 0, WHOLE, 1), (1, 1, 1, 2, 0, WHOLE, 1)]
    with pytest.raises(Broken, match="double_booked"):
        a_judge(t1=2, t2=1).check((tasks, members), None)


def test_a_place_given_away_while_it_runs_is_seen() -> None:
    judge = a_judge(t1=1)
    judge.starts(1, 1, 1, Allocation(0, 100, GIB, (Slice(0, GIB, 500),)))
    with pytest.raises(Broken, match="given_away"):
        judge.check(([(1, 1, "queued", 0, None, None, None)], []), None)


def test_two_epochs_at_once_are_seen() -> None:
    judge = a_judge(t1=2)
    judge.starts(1, 1, 1, Allocation(0, 100, GIB))
    judge.starts(2, 1, 1, Allocation(0, 100, GIB))  # another member
    with pytest.raises(Broken, match="two_epochs"):
        judge.starts(3, 1, 2, Allocation(0, 100, GIB))
