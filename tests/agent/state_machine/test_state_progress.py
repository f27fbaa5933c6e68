"""Progress of tasks on its way to the server: the newest one, at most one a second for each lease."""

from __future__ import annotations

import pytest

from gpool.agent.state_machine.instructions import (
    CommandEnded,
    CommandStarted,
    Disconnected,
    ProgressReported,
    RunnerReady,
)
from gpool.core.model import EndReason
from gpool.wire.frames import Finished, Progressed, ReportItem
from tests.agent.state_machine.state_case import SECOND, Case, command, function


@pytest.fixture
def case() -> Case:
    case = Case()
    case.welcome()
    case.grant(command(), 1)
    case.feed(CommandStarted(1, 1))
    case.pass_time(SECOND)
    case.take_reports()
    return case


def progressed(case: Case) -> list[ReportItem]:
    return [item for item in case.take_reports() if isinstance(item, Progressed)]


def test_the_first_progress_leaves_at_once_and_then_the_newest_each_second(case: Case) -> None:
    for number in range(100):
        case.feed(ProgressReported(1, 1, number, str(number)))
    assert progressed(case) == [Progressed(1, 1, 0, "0")]
    case.pass_time(SECOND)
    assert progressed(case) == [Progressed(1, 1, 99, "99")]
    case.pass_time(10 * SECOND)
    assert progressed(case) == []


def test_a_second_of_reports_is_a_second_of_each_task(case: Case) -> None:
    case.grant(function(), 2, number=1)
    case.feed(RunnerReady(1))
    case.feed(ProgressReported(1, 1, 5, "one"))
    case.feed(ProgressReported(2, 1, 6, "two"))
    assert progressed(case) == [Progressed(1, 1, 5, "one"), Progressed(2, 1, 6, "two")]


def test_progress_of_another_epoch_or_an_ended_task_is_dropped(case: Case) -> None:
    case.feed(ProgressReported(1, 2, 5, "stale"))
    case.feed(ProgressReported(1, 1, 1, "first"))
    case.feed(ProgressReported(1, 1, 2, "late"))
    case.feed(CommandEnded(1, 1, EndReason.EXITED, 0, "", 9))
    case.pass_time(2 * SECOND)
    first, ended = case.take_reports()
    assert first == Progressed(1, 1, 1, "first")
    assert isinstance(ended, Finished)


def test_without_a_connection_only_the_newest_is_kept(case: Case) -> None:
    case.feed(Disconnected())
    for number in range(5):
        case.feed(ProgressReported(1, 1, number, ""), after=SECOND)
    assert progressed(case) == []
    case.welcome()
    assert progressed(case) == [Progressed(1, 1, 4, "")]


def test_unrecorded_progress_is_replaced_not_gathered(case: Case) -> None:
    case.recording = False
    for number in range(10):
        case.feed(ProgressReported(1, 1, number, ""), after=SECOND)
    case.feed(Disconnected())
    case.take_reports()
    case.recording = True
    case.welcome()
    assert progressed(case) == [Progressed(1, 1, 9, "")]
