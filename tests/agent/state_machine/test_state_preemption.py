"""Leases taken away for others, for the owner or for good: saved where they can be, requeued, never counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpool.agent.state_machine.instructions import (
    CommandCheckpointed,
    CommandEnded,
    CommandStarted,
    Connected,
    EndCommand,
    EndRunner,
    ExitDaemon,
    OfferDetected,
    ReclaimAsked,
    RunnerReady,
    Send,
    ShutdownAsked,
    StartCommand,
    StartRunner,
)
from gpool.core.model import EndReason, InputFile, OutputFile, Span, TaskSpec
from gpool.wire.frames import (
    Checkpointed,
    Finished,
    Grants,
    HandedBack,
    Hello,
    Hold,
    Lease,
    Line,
    OfferChanged,
    Released,
    Stop,
    StopReason,
    Welcome,
)
from tests.agent.state_machine.state_case import (
    OFFER,
    SECOND,
    Case,
    allocation,
    command,
    frames,
    function,
    of,
)

FILES = (OutputFile("state/n", "a" * 64, 3),)


@pytest.fixture
def case() -> Case:
    case = Case()
    case.welcome()
    return case


def saving(**changes: object) -> TaskSpec:
    return replace(command(), checkpoint="state/", grace=Span(7 * SECOND), **changes)  # type: ignore[arg-type]


def preempt(case: Case, *tasks: int, epoch: int = 1) -> list[object]:
    holds = tuple(Hold(task, epoch) for task in tasks)
    return case.arrive(Stop(holds, StopReason.PREEMPTED))  # type: ignore[return-value]


def running(case: Case, spec: TaskSpec, task: int = 1, **where: int) -> None:
    case.grant(spec, task, **where)  # type: ignore[arg-type]
    case.feed(CommandStarted(task, 1))
    case.pass_time(SECOND)
    case.take_reports()


def test_a_preempted_command_is_warned_saved_and_then_reported(case: Case) -> None:
    running(case, saving())
    (end,) = of(EndCommand, preempt(case, 1))  # type: ignore[arg-type]
    assert end == EndCommand(1, 1, EndReason.PREEMPTED, 7 * SECOND)
    assert case.take_reports() == []
    assert preempt(case, 1) == [], "asked twice, warned once"
    case.feed(CommandCheckpointed(1, 1, FILES))
    case.feed(CommandEnded(1, 1, EndReason.PREEMPTED, 137, "", 9))
    saved, ended = case.take_reports()
    assert saved == Checkpointed(1, 1, FILES)
    assert isinstance(ended, Finished)
    assert ended.reason is EndReason.PREEMPTED
    assert case.state.holds == ()


def test_one_that_exited_before_the_warning_has_its_own_end(case: Case) -> None:
    running(case, saving())
    preempt(case, 1)
    case.feed(CommandEnded(1, 1, EndReason.EXITED, 0, "", 9))
    (ended,) = case.take_reports()
    assert isinstance(ended, Finished)
    assert (ended.reason, ended.exit_code) == (EndReason.EXITED, 0)


def test_what_waits_in_line_is_handed_back_and_a_stop_before_its_grant_too(case: Case) -> None:
    running(case, saving())
    case.grant(saving(), 2)
    preempt(case, 2, 3)
    assert case.take_reports() == [HandedBack(2, 1), HandedBack(3, 1)]
    assert not of(StartCommand, case.grant(saving(), 3, number=4))


def test_a_preempted_call_ends_its_runner_and_those_behind_it_are_handed_back(case: Case) -> None:
    (start,) = of(StartRunner, case.grant(function(), 1, 2, 3))
    case.feed(RunnerReady(start.runner))
    assert of(EndRunner, preempt(case, 1, 2, 3))  # type: ignore[arg-type]
    case.runner_ended(start.runner)
    first, *rest = case.take_reports()
    assert isinstance(first, Finished)
    assert first.reason is EndReason.PREEMPTED
    assert rest == [HandedBack(2, 1), HandedBack(3, 1)]


def test_an_answer_that_came_before_the_runner_died_counts(case: Case) -> None:
    (start,) = of(StartRunner, case.grant(function(), 1))
    case.feed(RunnerReady(start.runner))
    preempt(case, 1)
    case.answered(start.runner, 1)
    case.runner_ended(start.runner)
    (ended,) = case.take_reports()
    assert isinstance(ended, Finished)
    assert ended.reason is EndReason.RETURNED


@pytest.mark.parametrize("how", ["cancel", "drop", "let go"])
def test_a_farewell_is_called_off_when_the_lease_is_gone(case: Case, how: str) -> None:
    running(case, saving())
    preempt(case, 1)
    if how == "cancel":
        out = case.stop(1)
    elif how == "drop":
        out = case.welcome(drop=(Hold(1, 1),))
    else:
        out = case.pass_time(60 * SECOND)
    (end,) = of(EndCommand, out)
    assert end.grace_us == 0
    assert end.reason in (EndReason.CANCELLED, EndReason.LOST)
    case.take_reports()
    case.feed(CommandEnded(1, 1, end.reason, 137, "", 0))
    told = [type(item) for item in case.take_reports()]
    assert told == {"cancel": [Released], "drop": [], "let go": [Finished]}[how]


def test_a_checkpoint_of_a_lease_that_is_gone_is_not_told(case: Case) -> None:
    running(case, saving())
    case.feed(CommandCheckpointed(1, 2, FILES))
    case.welcome(drop=(Hold(1, 1),))
    case.feed(CommandCheckpointed(1, 1, FILES))
    assert [i for i in case.take_reports() if isinstance(i, Checkpointed)] == []


def test_the_next_attempt_begins_with_the_checkpoint_of_its_lease(case: Case) -> None:
    files = (InputFile("state/n", "a" * 64, 3),)
    line = Line(allocation(), 7, False, 1, (Lease(1, 2, checkpoint=files),))
    (start,) = of(StartCommand, case.arrive(Grants(0, ((1, saving()),), (line,))))
    assert start.checkpoint == files


def test_an_owner_who_wants_a_gpu_back_gets_that_one(case: Case) -> None:
    running(case, saving(), 1, number=1, gpu=0)
    running(case, saving(), 2, number=2, gpu=1)
    running(case, saving(), 3, number=3)
    (start,) = of(StartRunner, case.grant(function(), 4, number=4, gpu=0))
    case.feed(RunnerReady(start.runner))
    out = case.feed(ReclaimAsked(frozenset({0}), "its owner took the GPU back"))
    assert [end.task for end in of(EndCommand, out)] == [1]
    assert of(EndRunner, out) == [EndRunner(start.runner)]
    case.runner_ended(start.runner)
    case.feed(CommandEnded(1, 1, EndReason.PREEMPTED, 137, "", 0))
    ends = [item for item in case.take_reports() if isinstance(item, Finished)]
    assert {(end.task, end.reason, end.error_text) for end in ends} == {
        (task, EndReason.PREEMPTED, "its owner took the GPU back") for task in (1, 4)
    }
    out = case.feed(ReclaimAsked(None, "back"))
    assert {end.task for end in of(EndCommand, out)} == {2, 3}


def test_a_closed_machine_says_so_and_takes_nothing_that_was_under_way(case: Case) -> None:
    closed = replace(OFFER, closed="it runs on battery")
    assert frames(OfferChanged, case.feed(OfferDetected(closed))) == [OfferChanged(closed)]
    assert not of(StartCommand, case.grant(command(), 1))
    assert case.take_reports() == [HandedBack(1, 1)]
    case.feed(OfferDetected(OFFER))
    assert of(StartCommand, case.grant(command(), 1, epoch=2))


def test_an_offer_that_changed_between_hello_and_welcome_is_said() -> None:
    """World, seed 17: the owner lent the machine again in that moment, and nobody ever knew."""
    case = Case()
    hello = case.feed(Connected())[0]
    assert isinstance(hello, Send)
    assert isinstance(hello.frame, Hello)
    closed = replace(OFFER, closed="in use")
    assert case.feed(OfferDetected(closed)) == []
    out = case.arrive(Welcome(1, hello.frame.beat, 30 * SECOND, 5 * SECOND, 8 * SECOND, ()))
    assert frames(OfferChanged, out) == [OfferChanged(closed)]
    assert case.feed(OfferDetected(closed)) == []


def test_a_stopping_agent_waits_longer_for_a_checkpoint_and_not_for_ever(case: Case) -> None:
    running(case, saving())
    (end,) = of(EndCommand, case.feed(ShutdownAsked()))
    assert end == EndCommand(1, 1, EndReason.PREEMPTED, 5 * SECOND)
    assert not of(ExitDaemon, case.pass_time(11 * SECOND))
    assert of(ExitDaemon, case.pass_time(2 * SECOND))


def test_a_stopping_agent_does_not_warn_what_keeps_no_checkpoint(case: Case) -> None:
    running(case, command())
    (end,) = of(EndCommand, case.feed(ShutdownAsked()))
    assert end.grace_us == 0
    assert of(ExitDaemon, case.pass_time(4 * SECOND))


def test_a_command_that_times_out_is_saved_once(case: Case) -> None:
    running(case, saving(timeout=Span(3 * SECOND)))
    (end,) = of(EndCommand, case.pass_time(5 * SECOND))
    assert end == EndCommand(1, 1, EndReason.TIMED_OUT)
    assert preempt(case, 1) == []
    case.feed(CommandCheckpointed(1, 1, FILES))
    case.feed(CommandEnded(1, 1, EndReason.TIMED_OUT, 137, "", 0))
    saved, ended = case.take_reports()
    assert isinstance(saved, Checkpointed)
    assert isinstance(ended, Finished)
    assert ended.reason is EndReason.TIMED_OUT
