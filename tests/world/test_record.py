"""The judge itself: what it must call a violation, and what it must not."""

from __future__ import annotations

import pytest

from gpool.core.model import GIB, Allocation, Gpu, Offer, Slice, TaskStatus
from gpool.testing.world.record import Record, Row

HALF = Allocation(0, 500, GIB, (Slice(0, 12 * GIB, 500),))
OFFER = Offer(2000, 8 * GIB, GIB, (Gpu(0, "u", "T4", "nvidia", 24 * GIB),))


def row(task: int, node: str, epoch: int) -> Row:
    leased = TaskStatus.LEASED
    return Row(task, 1, "s", leased, epoch, node, True, HALF, None, None, "", None)


def judged(rows: dict[int, Row], *, frozen: bool) -> list[str]:
    """Two tasks run on n; the second is said to be on the number its runner began with."""
    said: list[str] = []
    record = Record(lambda: 0, said.append)
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
    record = Record(lambda: 0, said.append)
    record.node("n", OFFER).frozen = frozen
    record.rows = {}
    record.attempt_began("n", 1, 1, whole)
    before = len(said)
    record.attempt_began("n", 2, 1, whole)
    assert any("by what runs there" in text for text in said[before:])
