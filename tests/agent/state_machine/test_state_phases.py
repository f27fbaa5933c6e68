"""Phases: told when they last, covered by the time-out, whichever it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpool.agent.state_machine.instructions import (
    CommandEnded,
    CommandReached,
    CommandStarted,
    EndCommand,
    EndRunner,
    RunnerReached,
    RunnerReady,
    RunsLimited,
    StartRunner,
)
from gpool.core.model import EndReason, Phase, Span
from gpool.wire.frames import Finished, HandedBack, Reached, Started
from tests.agent.state_machine.state_case import SECOND, Case, command, function, of


@pytest.fixture
def case() -> Case:
    case = Case()
    case.welcome()
    return case


def kinds(case: Case, kind: type) -> list[object]:
    return [item for item in case.take_reports() if isinstance(item, kind)]


def test_a_phase_that_lasts_is_told_and_a_short_one_is_not(case: Case) -> None:
    case.grant(command(), 1)
    case.feed(CommandReached(1, 1, Phase.FETCH))
    case.pass_time(150_000)
    case.feed(CommandReached(1, 1, Phase.BUILD))
    case.pass_time(250_000)
    case.feed(CommandReached(1, 1, Phase.START))
    case.feed(CommandStarted(1, 1))
    case.pass_time(SECOND)
    told = [type(item) for item in case.reported]
    assert kinds(case, Reached) == [Reached(1, 1, Phase.BUILD)]
    assert told == [Reached, Started]
    case.feed(CommandReached(1, 1, Phase.COLLECT))
    case.pass_time(SECOND)
    assert case.take_reports() == [Reached(1, 1, Phase.COLLECT)]


def test_a_phase_is_not_told_after_a_later_one(case: Case) -> None:
    case.recording = False
    for task in range(10, 60):  # enough batches in flight that nothing more leaves
        case.grant(command(), task, number=task)
        case.feed(CommandStarted(task, 1))
        case.feed(CommandEnded(task, 1, EndReason.EXITED, 0, "", 5))
        case.pass_time(10_000)
    case.take_reports()
    case.grant(command(), 1)
    case.feed(CommandReached(1, 1, Phase.FETCH))
    case.pass_time(SECOND)
    case.feed(CommandStarted(1, 1))
    case.pass_time(SECOND)
    case.recording = True
    case.welcome()
    case.pass_time(SECOND)
    about = [type(item) for item in case.take_reports() if item.task == 1]
    assert about == [Started]


@pytest.mark.parametrize("phase", [Phase.FETCH, Phase.BUILD, Phase.START, Phase.COLLECT])
def test_a_time_out_counts_from_the_beginning_and_names_the_phase(case: Case, phase: Phase) -> None:
    case.grant(command(timeout=2 * SECOND), 1)
    if phase is Phase.COLLECT:
        case.feed(CommandStarted(1, 1))
    case.pass_time(SECOND)
    case.feed(CommandReached(1, 1, phase))
    out = case.pass_time(SECOND + 1000)
    assert of(EndCommand, out) == [EndCommand(1, 1, EndReason.TIMED_OUT)]
    case.feed(CommandEnded(1, 1, EndReason.TIMED_OUT, 137, "", 0))
    (end,) = kinds(case, Finished)
    assert isinstance(end, Finished)
    assert end.reason is EndReason.TIMED_OUT
    words = {"fetch": "fetched", "build": "built", "start": "started", "collect": "collected"}
    assert words[phase.value] in end.error_text
    assert "2 s" in end.error_text


def test_the_time_out_of_a_command_is_not_begun_anew_when_it_runs(case: Case) -> None:
    case.grant(command(timeout=2 * SECOND), 1)
    case.pass_time(1_500_000)
    case.feed(CommandStarted(1, 1))
    assert of(EndCommand, case.pass_time(600_000))


def test_a_call_times_out_while_its_runner_is_built_and_the_next_goes_on(case: Case) -> None:
    spec = replace(function(), timeout=Span(3 * SECOND))
    (start,) = of(StartRunner, case.grant(spec, 1))
    case.feed(RunnerReached(start.runner, Phase.BUILD))
    case.pass_time(SECOND)
    assert kinds(case, Reached) == [Reached(1, 1, Phase.BUILD)]
    case.pass_time(SECOND)
    case.grant(spec, 2)
    out = case.pass_time(1_500_000)
    assert not of(EndRunner, out), "somebody else waits for it"
    (end,) = kinds(case, Finished)
    assert isinstance(end, Finished)
    assert (end.task, end.reason) == (1, EndReason.TIMED_OUT)
    assert "built" in end.error_text
    case.feed(RunnerReady(start.runner))
    case.answered(start.runner, 2)
    assert [item.task for item in case.take_reports()] == [2]


def test_a_runner_nobody_waits_for_any_more_is_not_built_on(case: Case) -> None:
    spec = replace(function(), timeout=Span(SECOND))
    (start,) = of(StartRunner, case.grant(spec, 1))
    assert of(EndRunner, case.pass_time(2 * SECOND)) == [EndRunner(start.runner)]
    case.runner_ended(start.runner)
    assert case.state.holds == ()


def test_what_waits_behind_a_long_build_is_handed_back(case: Case) -> None:
    case.grant(function(), 1, 2, 3)
    case.pass_time(5 * SECOND)
    assert {item.task for item in kinds(case, HandedBack)} == {2, 3}  # type: ignore[attr-defined]


def test_starting_the_runner_counts_for_the_call_it_was_started_for_alone(case: Case) -> None:
    spec = replace(function(), timeout=Span(3 * SECOND))
    (start,) = of(StartRunner, case.grant(spec, 1, 2))
    case.pass_time(1_900_000)
    case.feed(RunnerReady(start.runner))
    case.pass_time(1_000_000)
    case.answered(start.runner, 1)
    out = case.pass_time(2_900_000)
    assert not of(EndRunner, out)
    assert of(EndRunner, case.pass_time(200_000))


def test_what_runs_longer_than_the_owner_lets_it_is_preempted(case: Case) -> None:
    case.feed(RunsLimited(5 * SECOND))
    case.grant(command(), 1)
    case.pass_time(3 * SECOND)
    case.feed(CommandStarted(1, 1))
    out = case.pass_time(4 * SECOND)
    assert not of(EndCommand, out)
    (end,) = of(EndCommand, case.pass_time(2 * SECOND))
    assert end.reason is EndReason.PREEMPTED
    assert end.grace_us == command().grace
    case.feed(RunsLimited(None))
    case.feed(CommandEnded(1, 1, EndReason.PREEMPTED, 137, "", 0))
    (told,) = kinds(case, Finished)
    assert "owner" in told.error_text  # type: ignore[attr-defined]
