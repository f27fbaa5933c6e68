"""Lines, runners, commands: lists of events in, lists of instructions out.

Past 400 lines because what a line may do is one table of cases; apart, one would not see which is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from gpool.agent.state_machine.instructions import (
    CallPrinted,
    CommandEnded,
    CommandPrinted,
    CommandStarted,
    EndCommand,
    EndRunner,
    ExitDaemon,
    OfferDetected,
    RunnerReady,
    Send,
    ShutdownAsked,
    StartCommand,
    StartRunner,
    Ticked,
)
from gpool.core.model import EndReason, Span
from gpool.wire.frames import (
    Beat,
    BeatSeen,
    Finished,
    HandedBack,
    LogChunk,
    OfferChanged,
    Recorded,
    Released,
    Reports,
    Started,
)
from tests.agent.state_machine.state_case import (
    OFFER,
    SECOND,
    Case,
    allocation,
    calls,
    command,
    frames,
    function,
    of,
)


@pytest.fixture
def case() -> Iterator[Case]:
    case = Case()
    case.welcome()
    yield case
    assert case.state.violations() == []


def ended(task: int, reason: EndReason = EndReason.EXITED, code: int = 0) -> CommandEnded:
    return CommandEnded(task, 1, reason, code, "", 9000)


def test_a_command_runs_and_its_end_is_reported(case: Case) -> None:
    spec = command()
    assert of(StartCommand, case.grant(spec, 1)) == [
        StartCommand(1, 1, spec, allocation(), owner=False, user=7)
    ]
    case.feed(CommandStarted(1, 1))
    case.feed(ended(1, code=3))
    assert case.take_reports() == [Finished(1, 1, EndReason.EXITED, 3, duration_us=9000)]


def test_commands_of_one_line_run_one_at_a_time(case: Case) -> None:
    assert [s.task for s in of(StartCommand, case.grant(command(), 1, 2, 3))] == [1]
    assert [s.task for s in of(StartCommand, case.feed(ended(1)))] == [2]
    assert [s.task for s in of(StartCommand, case.feed(ended(2)))] == [3]


def test_two_allocations_run_at_the_same_time(case: Case) -> None:
    assert of(StartCommand, case.grant(command(), 1, number=0))
    assert of(StartCommand, case.grant(command(), 2, number=1))


def test_a_start_is_only_said_of_what_runs_a_while(case: Case) -> None:
    case.grant(command(), 1)
    case.feed(CommandStarted(1, 1))
    case.pass_time(50_000)
    assert case.take_reports() == [Started(1, 1)]
    case.feed(ended(1))
    assert [type(item) for item in case.take_reports()] == [Finished]


def test_a_start_is_never_said_once_the_attempt_has_ended(case: Case) -> None:
    case.recording = False
    case.grant(command(), 1, number=0)
    case.grant(command(), 2, number=1)
    case.feed(ended(1))  # in flight: what follows gathers
    case.feed(CommandStarted(2, 1))
    case.feed(Ticked(), after=11_000)  # the start is due, the first batch still unrecorded
    case.feed(ended(2))
    case.pass_time(20_000)
    assert [type(item) for item in case.take_reports()] == [Finished, Finished]


def test_a_command_past_its_time_out_is_ended_and_reported(case: Case) -> None:
    case.grant(command(timeout=5 * SECOND), 1)
    case.feed(CommandStarted(1, 1))
    assert of(EndCommand, case.pass_time(6 * SECOND)) == [EndCommand(1, 1, EndReason.TIMED_OUT)]
    case.take_reports()
    case.feed(ended(1, EndReason.TIMED_OUT, 137))
    (finished,) = case.take_reports()
    assert isinstance(finished, Finished)
    assert finished.reason is EndReason.TIMED_OUT
    assert "5 s" in finished.error_text


def test_output_leaves_in_chunks_before_the_end(case: Case) -> None:
    case.grant(command(), 1)
    case.feed(CommandStarted(1, 1))
    case.feed(CommandPrinted(1, 1, 1, b"a" * 70_000))
    case.feed(CommandPrinted(1, 1, 2, b"oh"))
    case.feed(ended(1))
    *chunks, last = case.take_reports()
    assert [(c.sequence, c.stream, len(c.data)) for c in chunks if isinstance(c, LogChunk)] == [
        (0, 1, 65536),
        (1, 1, 70_000 - 65536),
        (2, 2, 2),
    ]
    assert isinstance(last, Finished)


def test_live_output_comes_within_a_fifth_of_a_second(case: Case) -> None:
    case.grant(command(), 1)
    case.feed(CommandStarted(1, 1))
    case.feed(CommandPrinted(1, 1, 1, b"a"))
    case.feed(CommandPrinted(1, 1, 1, b"b"))
    case.pass_time(200_000)
    assert LogChunk(1, 1, 0, 1, b"ab") in case.take_reports()


def test_head_and_tail_of_output_are_sent_and_the_gap_is_named_once(case: Case) -> None:
    case.grant(command(), 1)
    case.feed(CommandStarted(1, 1))
    for _ in range(20):
        case.feed(CommandPrinted(1, 1, 1, b"x" * 1024 * 1024))
    case.feed(ended(1))
    case.pass_time(SECOND)
    chunks = [c for c in case.take_reports() if isinstance(c, LogChunk)]
    assert sum(len(c.data) for c in chunks if c.stream == 1) == 13 * 1024 * 1024
    assert [c.stream for c in chunks].count(2) == 1


def test_calls_are_handed_to_a_runner_once_it_is_ready(case: Case) -> None:
    out = case.grant(function(), 1, 2)
    assert [s.runner for s in of(StartRunner, out)] == [1]
    assert calls(case.feed(RunnerReady(1))) == [1, 2]
    case.answered(1, 1, 2)
    assert [(i.task, i.reason) for i in case.take_reports() if isinstance(i, Finished)] == [
        (1, EndReason.RETURNED),
        (2, EndReason.RETURNED),
    ]


def test_a_window_grows_for_short_calls_and_shrinks_for_long_ones(case: Case) -> None:
    case.grant(function(), *range(1, 400))
    assert len(calls(case.feed(RunnerReady(1)))) == 8
    assert len(calls(case.answered(1, *range(1, 9)))) == 128
    assert calls(case.answered(1, *range(9, 60), duration_us=400_000)) == []


def test_an_idle_runner_is_used_again(case: Case) -> None:
    case.grant(function(), 1)
    case.feed(RunnerReady(1))
    case.answered(1, 1)
    out = case.grant(function("g"), 2)  # another function of the same user and environment
    assert of(StartRunner, out) == []
    assert calls(out) == [2]


def test_an_idle_runner_follows_its_user_to_another_allocation(case: Case) -> None:
    case.grant(function(), 1, number=0)
    case.feed(RunnerReady(1))
    case.answered(1, 1)
    assert calls(case.grant(function(), 2, number=3)) == [2]


def test_two_users_never_share_a_runner(case: Case) -> None:
    case.grant(function(), 1, user=7)
    case.feed(RunnerReady(1))
    case.answered(1, 1)
    out = case.grant(function(), 2, user=8)
    assert of(EndRunner, out) == [EndRunner(1)]
    assert of(StartRunner, out) == []  # not before the other is gone
    assert [s.user for s in of(StartRunner, case.runner_ended(1))] == [8]


def test_an_idle_runner_on_the_same_gpu_is_ended_before_another_starts(case: Case) -> None:
    case.grant(function(), 1, number=0, gpu=0)
    case.feed(RunnerReady(1))
    case.answered(1, 1)
    out = case.grant(command(), 2, number=1, gpu=0)
    assert of(EndRunner, out) == [EndRunner(1)]
    assert of(StartCommand, out) == []
    assert [s.task for s in of(StartCommand, case.runner_ended(1))] == [2]


def test_a_runner_starting_for_nobody_never_shares_its_gpu_with_the_next(case: Case) -> None:
    """World, seed 2001: the call was cancelled while its runner started, and its line's number was given away."""
    case.grant(function(), 1, number=2, gpu=0)
    case.stop(1)
    out = case.grant_lines((command(), 2, 1, 0), (command(), 3, 2, 0))
    assert of(EndRunner, out) == [EndRunner(1)]
    assert of(StartCommand, out) == []
    started = {each.task for each in of(StartCommand, case.runner_ended(1))}
    assert started == {2, 3}


def test_a_runner_idle_for_a_minute_is_ended(case: Case) -> None:
    case.grant(function(), 1)
    case.feed(RunnerReady(1))
    case.answered(1, 1)
    case.recording = True
    out = case.pass_time(20 * SECOND)
    assert of(EndRunner, out) == []
    assert of(EndRunner, case.pass_time(41 * SECOND)) == [EndRunner(1)]


def test_another_environment_waits_for_the_outstanding_calls(case: Case) -> None:
    case.grant(function(), 1)
    case.feed(RunnerReady(1))
    out = case.grant(function(environment="other"), 2)
    assert out == []
    assert of(EndRunner, case.answered(1, 1)) == [EndRunner(1)]
    assert [s.spec.environment for s in of(StartRunner, case.runner_ended(1))] == ["other"]


def test_a_call_past_its_time_out_ends_the_runner_and_the_rest_goes_on(case: Case) -> None:
    case.grant(function(timeout=Span(SECOND)), 1, 2)
    case.feed(RunnerReady(1))
    assert of(EndRunner, case.pass_time(SECOND)) == [EndRunner(1)]
    case.take_reports()
    out = case.runner_ended(1)
    assert [(f.task, f.reason) for f in case.take_reports()] == [(1, EndReason.TIMED_OUT)]  # type: ignore[union-attr]
    assert [s.runner for s in of(StartRunner, out)] == [2]
    assert calls(case.feed(RunnerReady(2))) == [2]


def test_a_call_s_time_counts_from_its_predecessor_s_answer(case: Case) -> None:
    case.grant(function(timeout=Span(SECOND)), 1, 2)
    case.feed(RunnerReady(1))
    case.pass_time(900_000)
    case.answered(1, 1)
    assert of(EndRunner, case.pass_time(900_000)) == []
    assert of(EndRunner, case.pass_time(200_000)) == [EndRunner(1)]


@pytest.mark.parametrize(
    ("reason", "code", "reported", "said"),
    [
        (EndReason.EXITED, 139, EndReason.EXITED, "exit code 139"),
        (EndReason.OUT_OF_MEMORY, 137, EndReason.OUT_OF_MEMORY, "memory"),
        (EndReason.SANDBOX_FAILED, 1, EndReason.SANDBOX_FAILED, "sandbox"),
    ],
)
def test_a_runner_s_death_is_charged_to_the_call_that_ran(
    case: Case, reason: EndReason, code: int, reported: EndReason, said: str
) -> None:
    case.grant(function(), 1, 2)
    case.feed(RunnerReady(1))
    out = case.runner_ended(1, reason, code)
    (finished,) = case.take_reports()
    assert isinstance(finished, Finished)
    assert (finished.task, finished.reason, finished.exit_code) == (1, reported, code)
    assert said in finished.error_text
    assert of(StartRunner, out)
    assert calls(case.feed(RunnerReady(2))) == [2]


def test_a_runner_that_retires_charges_nobody(case: Case) -> None:
    case.grant(function(), 1, 2)
    case.feed(RunnerReady(1))
    case.answered(1, 1)
    case.take_reports()
    for runner in (1, 2, 3):  # however often: it never ran
        case.runner_ended(runner, EndReason.EXITED, 137, retired=True)
        assert case.take_reports() == []
        assert calls(case.feed(RunnerReady(runner + 1))) == [2]


@pytest.mark.parametrize(("code", "told"), [(0, 1), (137, 137)])
def test_a_function_whose_process_ends_quietly_has_failed_and_is_never_run_again(
    case: Case, code: int, told: int
) -> None:
    case.grant(function(), 1)
    case.feed(RunnerReady(1))
    case.runner_ended(1, EndReason.EXITED, code)
    (finished,) = case.take_reports()
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.exit_code) == (EndReason.EXITED, told)


def test_a_runner_that_never_starts_is_given_up_after_three_tries(case: Case) -> None:
    out = case.grant(function(), 1, 2, 3)
    for runner in (1, 2, 3):
        assert [s.runner for s in of(StartRunner, out)] == [runner]
        out = case.runner_ended(runner, EndReason.SANDBOX_FAILED, 1)
    assert of(StartRunner, out) == []
    first, *others = case.take_reports()
    assert isinstance(first, Finished)
    assert first.reason is EndReason.SANDBOX_FAILED
    assert others == [HandedBack(2, 1), HandedBack(3, 1)]


def test_a_stopped_command_is_killed_and_then_released(case: Case) -> None:
    case.grant(command(), 1)
    case.feed(CommandStarted(1, 1))
    assert of(EndCommand, case.stop(1)) == [EndCommand(1, 1, EndReason.CANCELLED)]
    assert case.take_reports() == []
    case.feed(ended(1, EndReason.CANCELLED, 137))
    assert case.take_reports() == [Released(1, 1)]


def test_a_stopped_lease_in_line_is_released_at_once(case: Case) -> None:
    case.grant(command(), 1, 2)
    case.stop(2)
    assert case.take_reports() == [Released(2, 1)]
    assert of(StartCommand, case.feed(ended(1))) == []


def test_a_stopped_call_that_runs_ends_its_runner_and_the_others_go_on(case: Case) -> None:
    case.grant(function(), 1, 2, 3)
    case.feed(RunnerReady(1))
    assert of(EndRunner, case.stop(1, 3)) == [EndRunner(1)]
    case.runner_ended(1)
    assert case.take_reports() == [Released(1, 1), Released(3, 1)]
    assert calls(case.feed(RunnerReady(2))) == [2]


def test_a_stopped_call_behind_the_running_one_ends_the_runner_when_it_is_next(case: Case) -> None:
    case.grant(function(), 1, 2, 3)
    case.feed(RunnerReady(1))
    assert case.stop(2) == []
    assert of(EndRunner, case.answered(1, 1)) == [EndRunner(1)]
    case.runner_ended(1)
    assert case.take_reports()[1:] == [Released(2, 1)]
    assert calls(case.feed(RunnerReady(2))) == [3]


def test_a_stopped_call_that_answered_all_the_same_is_released(case: Case) -> None:
    case.grant(function(), 1, 2)
    case.feed(RunnerReady(1))
    case.stop(2)
    case.answered(1, 1, 2)
    assert case.take_reports()[1:] == [Released(2, 1)]


def test_a_stop_that_overtakes_its_grant_wins(case: Case) -> None:
    case.stop(1)
    assert case.take_reports() == [Released(1, 1)]
    assert case.grant(command(), 1) == []


def test_what_stands_behind_a_long_command_is_handed_back(case: Case) -> None:
    case.grant(command(), 1, 2, 3)
    case.feed(CommandStarted(1, 1))
    case.pass_time(3 * SECOND)
    assert case.take_reports() == [Started(1, 1), HandedBack(2, 1), HandedBack(3, 1)]


def test_calls_in_line_behind_a_long_one_are_handed_back_but_not_those_a_runner_has(
    case: Case,
) -> None:
    case.grant(function(), *range(1, 12))
    assert calls(case.feed(RunnerReady(1))) == [1, 2, 3, 4, 5, 6, 7, 8]
    case.pass_time(3 * SECOND)
    assert case.take_reports() == [Started(1, 1), *(HandedBack(task, 1) for task in (9, 10, 11))]
    assert of(EndRunner, case.answered(1, 1)) == []


def test_a_granted_lease_named_twice_runs_once(case: Case) -> None:
    assert len(of(StartCommand, case.grant(command(), 1))) == 1
    assert case.grant(command(), 1) == []
    case.feed(ended(1))
    assert case.grant(command(), 1) == []


def test_a_newer_lease_of_a_running_task_ends_the_older_first(case: Case) -> None:
    case.grant(command(), 1)
    out = case.grant(command(), 1, epoch=2)
    assert of(EndCommand, out) == [EndCommand(1, 1, EndReason.LOST)]
    assert of(StartCommand, out) == []
    out = case.feed(ended(1, EndReason.LOST, 137))
    assert [(s.task, s.epoch) for s in of(StartCommand, out)] == [(1, 2)]
    assert case.take_reports() == []


def test_a_newer_lease_of_a_waiting_task_takes_its_place(case: Case) -> None:
    case.grant(command(), 1, 2)
    case.grant(command(), 2, epoch=2, number=1)
    assert case.take_reports() == []
    assert of(StartCommand, case.feed(ended(1))) == []


def test_output_of_a_call_precedes_its_value(case: Case) -> None:
    case.grant(function(), 1)
    case.feed(RunnerReady(1))
    case.feed(CallPrinted(1, 1, 1, 1, b"one "))
    case.answered(1, 1, output=((1, b"two"),))
    chunk, finished = case.take_reports()
    assert chunk == LogChunk(1, 1, 0, 1, b"one two")
    assert isinstance(finished, Finished)


def test_a_call_that_could_not_be_handed_over_is_answered_out_of_turn(case: Case) -> None:
    case.grant(function(), 1, 2)
    case.feed(RunnerReady(1))
    case.answered(1, 2, raised=True, reason=EndReason.BAD_INPUT)
    case.answered(1, 1)
    assert [(i.task, i.reason) for i in case.take_reports() if isinstance(i, Finished)] == [
        (2, EndReason.BAD_INPUT),
        (1, EndReason.RETURNED),
    ]


def test_a_stopping_agent_hands_back_what_waits_and_ends_what_runs(case: Case) -> None:
    case.grant(command(), 1, 2, number=0)
    case.grant(function(), 3, 4, number=1)
    case.feed(RunnerReady(1))
    out = case.feed(ShutdownAsked())
    assert of(EndCommand, out) == [EndCommand(1, 1, EndReason.PREEMPTED)]
    assert of(EndRunner, out) == [EndRunner(1)]
    assert case.take_reports() == [HandedBack(2, 1)]
    case.runner_ended(1)
    assert of(ExitDaemon, case.feed(ended(1, EndReason.PREEMPTED, 137))) == [ExitDaemon()]
    reports = {i.task: i for i in case.take_reports()}
    assert isinstance(reports[1], Finished)
    assert reports[1].reason is EndReason.PREEMPTED
    assert reports[4] == HandedBack(4, 1)


def test_a_stopping_agent_withdraws_its_offer_before_it_returns_leases(case: Case) -> None:
    """Else the server would grant the freed slots to the same node again."""
    case.grant(command(), 1, 2)
    case.recording = False
    sent = [each.frame for each in of(Send, case.feed(ShutdownAsked()))]
    assert [type(frame) for frame in sent] == [OfferChanged, Beat, Reports]
    changed, beat, _ = sent
    assert isinstance(changed, OfferChanged)
    assert changed.leaving
    assert changed.offer.closed
    assert isinstance(beat, Beat)
    again = case.feed(OfferDetected(OFFER))
    assert of(Send, again) == [], "a survey does not offer the machine again"


def test_an_idle_agent_exits_when_no_lease_can_be_on_its_way(case: Case) -> None:
    case.recording = False
    out = case.feed(ShutdownAsked())
    assert of(ExitDaemon, out) == []
    granted = case.grant(command(), 1)  # before the server read the withdrawal
    [reports] = frames(Reports, granted)
    assert reports.items == (HandedBack(1, 1),)
    [beat] = frames(Beat, out)
    assert of(ExitDaemon, case.arrive(BeatSeen(beat.number))) == []
    assert of(ExitDaemon, case.arrive(Recorded(reports.sequence))) == [ExitDaemon()]


def test_a_stopping_agent_takes_nothing_new(case: Case) -> None:
    case.feed(ShutdownAsked())
    case.grant(command(), 1)
    assert case.take_reports() == [HandedBack(1, 1)]


def test_a_stopping_agent_leaves_within_seconds_whatever_hangs(case: Case) -> None:
    case.grant(command(), 1)
    case.feed(ShutdownAsked())
    assert of(ExitDaemon, case.pass_time(4 * SECOND)) == [ExitDaemon()]


def test_large_values_never_fill_a_frame_past_its_limit(case: Case) -> None:
    case.grant(function(), *range(1, 301))
    case.feed(RunnerReady(1))
    case.recording = False
    out = case.answered(1, *range(1, 9), value=b"v" * 60_000)
    for first in range(9, 301, 64):
        out += case.answered(1, *range(first, min(first + 64, 301)), value=b"v" * 60_000)
    out += case.pass_time(SECOND)
    for frame in frames(Reports, out):
        assert sum(len(i.value) for i in frame.items if isinstance(i, Finished)) < 5 << 20


def test_a_call_is_never_sent_twice_to_one_runner(case: Case) -> None:
    case.grant(function(), *range(1, 50))
    seen = calls(case.feed(RunnerReady(1)))
    while len(seen) < 49:
        seen += calls(case.answered(1, *seen))
    assert sorted(seen) == list(range(1, 50))


def test_functions_with_other_preloads_never_share_a_runner(case: Case) -> None:
    """With a preload each function has a process of its own; a live runner without one has not."""
    plain = function()
    (first,) = of(StartRunner, case.grant(plain, 1))
    case.feed(RunnerReady(first.runner))
    assert of(StartRunner, case.grant(replace(plain, preload=("numpy",)), 2, number=1))
