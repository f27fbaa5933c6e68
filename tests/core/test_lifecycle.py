"""The one table of moves."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.core import lifecycle
from gpool.core.lifecycle import IllegalMove, Move, after, end_move
from gpool.core.model import FINAL, EndReason, TaskStatus

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_not_stale() -> None:
    """Run `make docs`, or `python -m gpool.core.lifecycle > docs/lifecycle.md`."""
    assert (DOCS / "lifecycle.md").read_text() == lifecycle.as_markdown()


@given(st.lists(st.sampled_from(Move), max_size=8))
def test_no_move_ever_leaves_a_final_status(moves: list[Move]) -> None:
    status = TaskStatus.QUEUED
    for move in moves:
        try:
            status = after(status, [move])
        except IllegalMove:
            assert (status, move) not in lifecycle.TABLE
        else:
            assert status in TaskStatus
        if status in FINAL:
            with pytest.raises(IllegalMove, match="task 7"):
                after(status, [move], "task 7")


def test_every_status_is_reached_and_every_open_one_can_end() -> None:
    reached = {TaskStatus.QUEUED, *lifecycle.TABLE.values()}
    assert reached == set(TaskStatus)
    for status in set(TaskStatus) - FINAL:
        ends = {to for (source, _), to in lifecycle.TABLE.items() if source is status}
        assert TaskStatus.CANCELLED in ends


def test_a_guarded_write_compares_with_every_source() -> None:
    assert lifecycle.sources(Move.GRANTED) == {TaskStatus.QUEUED}
    assert lifecycle.sources(Move.SUCCEEDED) == {TaskStatus.RUNNING}


@pytest.mark.parametrize(
    ("reason", "exit_code", "tries_left", "losses", "move"),
    [
        (EndReason.EXITED, 0, True, 0, Move.SUCCEEDED),
        (EndReason.EXITED, 7, False, 0, Move.FAILED),
        (EndReason.EXITED, 7, True, 0, Move.RETRIED),
        (EndReason.RETURNED, None, False, 0, Move.SUCCEEDED),
        (EndReason.RAISED, None, False, 0, Move.FAILED),
        (EndReason.TIMED_OUT, None, True, 0, Move.RETRIED),
        (EndReason.CANCELLED, None, True, 0, Move.CANCELLED),
        (EndReason.LOST, None, False, 1, Move.REQUEUED),
        (EndReason.LOST, None, False, 3, Move.GAVE_UP),
        (EndReason.HANDED_BACK, None, False, 9, Move.REQUEUED),
        (EndReason.PREEMPTED, None, False, 9, Move.REQUEUED),
        (EndReason.LOSES_NODES, None, True, 3, Move.GAVE_UP),
    ],
)
def test_an_end_is_the_move_its_reason_says(
    reason: EndReason, exit_code: int | None, tries_left: bool, losses: int, move: Move
) -> None:
    assert end_move(reason, exit_code, tries_left=tries_left, losses=losses) is move


@given(st.sampled_from(EndReason), st.integers(-1, 255), st.booleans(), st.integers(0, 5))
def test_every_end_is_always_a_legal_move_of_a_running_task(
    reason: EndReason, exit_code: int, tries_left: bool, losses: int
) -> None:
    after(TaskStatus.RUNNING, [end_move(reason, exit_code, tries_left=tries_left, losses=losses)])
