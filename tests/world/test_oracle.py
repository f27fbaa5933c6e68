"""The judge itself: what it must call a violation, and what it must not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpool.core.model import GIB, Allocation, Gpu, Offer, Slice, TaskStatus
from gpool.testing.world.oracle import MemberSnapshot, Oracle, TaskSnapshot

HALF = Allocation(0, 500, GIB, (Slice(0, 12 * GIB, 500),))
OFFER = Offer(2000, 8 * GIB, GIB, (Gpu(0, "u", "T4", "nvidia", 24 * GIB),))


def row(task: int, node: str, epoch: int) -> TaskSnapshot:
    leased = TaskStatus.LEASED
    return TaskSnapshot(task, 1, "s", leased, epoch, node, True, HALF, None, None, "", None)


def judged(rows: dict[int, TaskSnapshot], *, frozen: bool) -> list[str]:
    """Two tasks run on n; the second is said to be on the number its runner began with."""
    said: list[str] = []
    record = Oracle(lambda: 0, said.append)
    record.node("n", OFFER).frozen = frozen
    record.rows = rows
    record.attempt_began("n", 1, 1, HALF)
    record.attempt_began("n", 2, 1, HALF)
    return said


def test_two_current_tasks_of_one_allocation_are_a_violation() -> None:
    found = judged({1: row(1, "n", 1), 2: row(2, "n", 1)}, frozen=False)
    assert any("two tasks of one allocation" in text for text in found)


def test_a_task_whose_lease_went_elsewhere_during_a_freeze_has_no_known_allocation() -> None:
    """Seed 4766 of the first session's World: the runner had moved from one line to another before the freeze."""
    assert judged({1: row(1, "n", 1), 2: row(2, "other", 2)}, frozen=True) == []


@pytest.mark.parametrize("frozen", [True, False])
def test_a_gpu_is_never_given_twice_not_even_during_a_freeze(frozen: bool) -> None:
    whole = Allocation(0, 500, GIB, (Slice(0, 24 * GIB, 1000),))
    said: list[str] = []
    record = Oracle(lambda: 0, said.append)
    record.node("n", OFFER).frozen = frozen
    record.rows = {}
    record.attempt_began("n", 1, 1, whole)
    before = len(said)
    record.attempt_began("n", 2, 1, whole)
    assert any("by what runs there" in text for text in said[before:])


# ---- gangs


def member(rank: int, node: str, *, holding: bool = True) -> MemberSnapshot:
    return MemberSnapshot(rank, node, holding, HALF)


def gang(*members: MemberSnapshot, epoch: int = 1, holding: bool = True) -> TaskSnapshot:
    status = TaskStatus.LEASED if holding else TaskStatus.QUEUED
    return TaskSnapshot(
        7, 1, "g", status, epoch, None, holding, None, None, None, "", None, 0, members
    )


QUEUED = gang(epoch=0, holding=False)


def told(*commits: TaskSnapshot, sites: tuple[str, ...] = ("s", "s", "s")) -> list[str]:
    """What is said of a gang of two that went through these rows."""
    said: list[str] = []
    record = a_record(said, sites)
    for row in (QUEUED, *commits):
        record.absorb({7: row})
    return said


def a_record(said: list[str], sites: tuple[str, ...] = ("s", "s", "s")) -> Oracle:
    record = Oracle(lambda: 10**9, said.append)
    record.asked["g"], record.wanted["g"] = 1, 2
    for number, site in enumerate(sites):
        record.node(f"n{number}", replace(OFFER, site=site))
    return record


def test_a_whole_gang_is_no_violation() -> None:
    assert told(gang(member(0, "n0"), member(1, "n1"))) == []


@pytest.mark.parametrize(
    "row",
    [
        gang(member(0, "n0")),
        gang(member(0, "n0"), member(1, "n0")),
        gang(member(0, "n0"), member(2, "n1")),
        gang(member(0, "n0"), member(1, "n1"), member(2, "n2")),
    ],
)
def test_a_gang_of_other_than_its_nodes_is_a_violation(row: TaskSnapshot) -> None:
    assert any("partial gang" in text for text in told(row))


def test_a_gang_on_two_sites_is_a_violation() -> None:
    found = told(gang(member(0, "n0"), member(1, "n1")), sites=("s", "t", "s"))
    assert any("partial gang" in text for text in found)


def test_a_member_that_holds_while_its_gang_does_not_is_a_violation() -> None:
    row = gang(member(0, "n0"), member(1, "n1", holding=False), holding=False)
    assert any("members of a gang hold" in text for text in told(row))


def test_members_of_one_epoch_run_together_and_those_of_two_never() -> None:
    said: list[str] = []
    record = a_record(said)
    record.absorb({7: QUEUED})
    record.absorb({7: gang(member(0, "n0"), member(1, "n1"))})
    record.attempt_began("n0", 7, 1, HALF)
    record.attempt_began("n1", 7, 1, HALF)
    assert said == []
    record.attempt_ended("n0", 7, 1)
    record.rows = {7: gang(member(0, "n0"), member(1, "n2"), epoch=2)}
    record.attempt_began("n0", 7, 2, HALF)
    assert any("n1 runs its epoch 1" in text for text in said)


def test_a_member_whose_end_is_written_before_it_is_dead_is_a_violation() -> None:
    said: list[str] = []
    record = a_record(said)
    record.absorb({7: QUEUED})
    record.absorb({7: gang(member(0, "n0"), member(1, "n1"))})
    record.attempt_began("n0", 7, 1, HALF)
    record.absorb({7: gang(member(0, "n0", holding=False), member(1, "n1"))})
    assert any("still runs" in text for text in said)
