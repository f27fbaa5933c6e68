"""Law 3 and the channel: the agent lets go first, reports survive reconnects, repetition is harmless."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpool.agent.state_machine.instructions import (
    CommandEnded,
    CommandPrinted,
    CommandStarted,
    Connected,
    Disconnected,
    EndCommand,
    EndRunner,
    Event,
    FrameArrived,
    RunnerReady,
    StartCommand,
    Ticked,
)
from gpool.core.model import EndReason
from gpool.wire.frames import (
    Beat,
    BeatSeen,
    Finished,
    Grants,
    HandedBack,
    Hello,
    Hold,
    Lease,
    Line,
    Recorded,
    Reports,
    Welcome,
)
from tests.agent.state_machine.state_case import (
    BEAT,
    MARGIN,
    SECOND,
    TTL,
    Case,
    allocation,
    command,
    frames,
    function,
    of,
)

TERM = TTL - MARGIN


@pytest.fixture
def case() -> Iterator[Case]:
    case = Case()
    case.welcome()
    yield case
    assert case.state.violations() == []


def test_the_hello_states_everything_held(case: Case) -> None:
    case.grant(command(), 1, 2)
    case.recording = False
    case.feed(CommandEnded(1, 1, EndReason.EXITED, 0, "", 1))
    case.feed(Disconnected())
    (hello,) = frames(Hello, case.feed(Connected()))
    assert hello.holds == (Hold(2, 1), Hold(1, 1))  # the end of 1 is not yet recorded


def test_beats_follow_the_server_s_rhythm(case: Case) -> None:
    beats = frames(Beat, case.pass_time(3 * BEAT + SECOND))
    assert [beat.number for beat in beats] == [2, 3, 4]


def test_unconfirmed_leases_are_let_go_before_the_server_gives_them_away(case: Case) -> None:
    case.grant(command(), 1, 2)
    case.grant(function(), 3, number=1)
    case.feed(RunnerReady(1))
    assert of(EndCommand, case.pass_time(TERM - SECOND)) == []
    out = case.pass_time(2 * SECOND)
    assert of(EndCommand, out) == [EndCommand(1, 1, EndReason.LOST)]
    assert of(EndRunner, out) == [EndRunner(1)]
    assert case.state.holds == (Hold(1, 1), Hold(3, 1))  # until their sandboxes are gone


def test_what_was_let_go_is_reported_as_lost_once_it_is_gone(case: Case) -> None:
    case.grant(command(), 1, 2)
    case.feed(CommandStarted(1, 1))
    case.take_reports()
    case.feed(Ticked(), after=TERM)
    case.pass_time(SECOND)
    assert case.take_reports() == [HandedBack(2, 1)]
    case.feed(CommandEnded(1, 1, EndReason.LOST, 137, "", 1))
    case.pass_time(SECOND)
    (finished,) = case.take_reports()
    assert isinstance(finished, Finished)
    assert (finished.task, finished.epoch, finished.reason) == (1, 1, EndReason.LOST)


def test_nothing_else_of_what_was_let_go_is_reported(case: Case) -> None:
    case.grant(command(), 1)
    case.feed(CommandStarted(1, 1))
    case.feed(CommandPrinted(1, 1, 1, b"hello"))
    case.take_reports()
    case.feed(Ticked(), after=TERM)
    case.feed(CommandPrinted(1, 1, 1, b"late"))
    case.feed(CommandEnded(1, 1, EndReason.EXITED, 0, "", 1))
    case.pass_time(SECOND)
    assert _reasons(case) == [EndReason.LOST]


def _reasons(case: Case) -> list[EndReason]:
    """Of the ends reported; nothing but ends may be."""
    reports = case.take_reports()
    assert all(isinstance(report, Finished) for report in reports)
    return [report.reason for report in reports if isinstance(report, Finished)]


@pytest.mark.parametrize(
    "event",
    [
        FrameArrived(BeatSeen(1)),
        FrameArrived(Recorded(0)),
        CommandPrinted(1, 1, 1, b"x"),
        CommandEnded(1, 1, EndReason.EXITED, 0, "", 1),
        Disconnected(),
        Ticked(),
    ],
    ids=lambda event: type(event).__name__,
)
def test_the_first_event_after_a_freeze_lets_go_first(case: Case, event: Event) -> None:
    case.grant(command(), 1)
    case.feed(CommandStarted(1, 1))
    out = case.feed(event, after=TERM)
    assert out[0] == EndCommand(1, 1, EndReason.LOST)
    case.pass_time(SECOND)
    assert _reasons(case) in ([], [EndReason.LOST])


def test_time_counts_from_the_sending_of_the_confirmed_beat(case: Case) -> None:
    case.grant(command(), 1)
    case.feed(CommandStarted(1, 1))
    (beat,) = frames(Beat, case.pass_time(BEAT + SECOND))
    sent_at = 1001 + BEAT  # the hello went at 1001, the beat one rhythm later
    case.pass_time(4 * SECOND)
    case.arrive(BeatSeen(beat.number))  # five seconds on its way
    out = case.pass_time(sent_at + TERM - case.now - 1)
    assert of(EndCommand, out) == []
    assert of(EndCommand, case.pass_time(2)) != []


def test_confirmed_beats_keep_leases_for_ever(case: Case) -> None:
    case.grant(command(), 1)
    case.feed(CommandStarted(1, 1))
    for _ in range(20):
        (beat,) = frames(Beat, case.pass_time(BEAT))
        case.arrive(BeatSeen(beat.number), after=0)
    assert case.state.holds == (Hold(1, 1),)


def test_a_new_grant_on_an_allocation_waits_until_the_old_sandbox_is_gone(case: Case) -> None:
    case.grant(command(), 1)
    (beat,) = frames(Beat, case.feed(Ticked(), after=TERM))
    assert beat.holds == (Hold(1, 1),)  # it is still being ended
    case.arrive(BeatSeen(beat.number))
    assert of(StartCommand, case.grant(command(), 2)) == []
    out = case.feed(CommandEnded(1, 1, EndReason.LOST, 137, "", 1))
    assert [s.task for s in of(StartCommand, out)] == [2]


def test_a_grant_that_comes_after_its_lease_time_is_handed_back(case: Case) -> None:
    case.now += TERM
    assert of(StartCommand, case.grant(command(), 1)) == []
    assert case.take_reports() == [HandedBack(1, 1)]


def test_a_late_copy_of_a_grant_let_go_is_ignored(case: Case) -> None:
    case.grant(command(), 1)
    case.feed(Ticked(), after=TERM)
    case.feed(CommandEnded(1, 1, EndReason.LOST, 137, "", 1))
    case.welcome()
    assert case.grant(command(), 1) == []


def test_reports_are_kept_until_recorded_and_sent_again_as_one(case: Case) -> None:
    case.recording = False
    for task in (1, 2, 3):
        case.grant(command(), task, number=task)
    for task in (1, 2, 3):
        case.feed(CommandEnded(task, 1, EndReason.EXITED, 0, "", 1), after=10_000)
    case.pass_time(20_000)
    case.feed(Disconnected())
    (reports,) = frames(Reports, case.welcome())
    assert [item.task for item in reports.items] == [1, 2, 3]
    case.arrive(Recorded(reports.sequence))
    case.feed(Disconnected())
    assert frames(Reports, case.welcome()) == []


def test_an_end_before_the_deadline_is_still_reported_after_it(case: Case) -> None:
    case.grant(command(), 1)
    case.feed(Disconnected())
    case.feed(CommandEnded(1, 1, EndReason.EXITED, 0, "", 1))
    case.feed(Ticked(), after=2 * TTL)
    (reports,) = frames(Reports, case.welcome())
    assert isinstance(reports.items[0], Finished)


def test_what_the_server_drops_is_killed_and_never_reported(case: Case) -> None:
    case.grant(command(), 1, 2)
    case.feed(Disconnected())
    out = case.welcome(drop=(Hold(1, 1), Hold(2, 1)))
    assert of(EndCommand, out) == [EndCommand(1, 1, EndReason.LOST)]
    case.feed(CommandEnded(1, 1, EndReason.LOST, 137, "", 1))
    assert case.take_reports() == []


def test_a_refused_report_ends_its_lease(case: Case) -> None:
    case.grant(command(), 1)
    assert of(EndCommand, case.arrive(Recorded(0, (Hold(1, 1),)))) != []


def test_batches_size_themselves_while_one_is_in_flight(case: Case) -> None:
    case.recording = False
    for task in range(1, 6):
        case.grant(command(), task, number=task)
    out = case.feed(CommandEnded(1, 1, EndReason.EXITED, 0, "", 1))
    assert len(frames(Reports, out)) == 1
    for task in range(2, 6):
        out = case.feed(CommandEnded(task, 1, EndReason.EXITED, 0, "", 1))
        assert frames(Reports, out) == []
    (batch,) = frames(Reports, case.arrive(Recorded(1)))
    assert [item.task for item in batch.items] == [2, 3, 4, 5]


def test_a_batch_leaves_after_a_few_milliseconds_at_the_latest(case: Case) -> None:
    case.recording = False
    for task in (1, 2):
        case.grant(command(), task, number=task)
        case.feed(CommandEnded(task, 1, EndReason.EXITED, 0, "", 1))
    (batch,) = frames(Reports, case.pass_time(5_000))
    assert [item.task for item in batch.items] == [2]


def test_nothing_is_said_before_the_welcome(case: Case) -> None:
    case.grant(command(), 1)
    case.feed(Disconnected())
    case.feed(Connected())
    out = case.feed(CommandEnded(1, 1, EndReason.EXITED, 0, "", 1))
    assert frames(Reports, out) == []
    out = case.arrive(Welcome(1, 2, TTL, MARGIN, BEAT, ()))
    assert len(frames(Reports, out)) == 1


def test_a_lease_whose_spec_is_not_known_is_handed_back(case: Case) -> None:
    case.grant(command(), 1)
    case.feed(CommandEnded(1, 1, EndReason.EXITED, 0, "", 1))
    case.take_reports()
    case.feed(Disconnected())
    case.welcome()
    case.arrive(Grants(0, (), (Line(allocation(), 7, False, 99, (Lease(2, 1),)),)))
    assert case.take_reports() == [HandedBack(2, 1)]


def test_unrecorded_output_of_what_was_let_go_is_never_sent_again(case: Case) -> None:
    case.recording = False
    case.grant(command(), 1)
    case.feed(CommandStarted(1, 1))
    case.feed(CommandPrinted(1, 1, 1, b"hello"))
    case.pass_time(SECOND)
    assert case.take_reports()
    case.feed(Disconnected())
    case.feed(Ticked(), after=TERM)
    assert frames(Reports, case.welcome()) == []
