"""A member of a gang on its agent: one ordinary lease, started with what it is told of the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpool.agent.state_machine.instructions import (
    CommandEnded,
    CommandStarted,
    EndCommand,
    Instruction,
    ReclaimAsked,
    StartCommand,
)
from gpool.core.model import EndReason, Engine, Requirements, TaskSpec
from gpool.wire.frames import Finished, Grants, HandedBack, Lease, Line, Released, Rendezvous
from tests.agent.state_machine.state_case import SECOND, Case, allocation, command, of

TOLD = Rendezvous(1, (("192.0.2.1", 47101), ("192.0.2.2", 47105)), b"s" * 32)


def member() -> TaskSpec:
    return replace(command(), requirements=Requirements(nodes=2), engine=Engine.TORCHRUN)


@pytest.fixture
def case() -> Case:
    case = Case()
    case.welcome()
    return case


def granted(case: Case, gang: Rendezvous | None) -> list[Instruction]:
    line = Line(allocation(), 1, False, 1, (Lease(7, 1),), gang)
    return case.arrive(Grants(0, ((1, member()),), (line,)))


def test_a_member_is_started_with_its_rendezvous(case: Case) -> None:
    [start] = of(StartCommand, granted(case, TOLD))
    assert start.gang == TOLD
    assert "sss" not in repr(start)


def test_a_member_that_was_told_of_no_others_is_never_started(case: Case) -> None:
    out = granted(case, None)
    assert of(StartCommand, out) == []
    case.pass_time(SECOND)
    assert HandedBack(7, 1) in case.reported


def test_a_stopped_member_is_released_once_it_is_gone(case: Case) -> None:
    granted(case, TOLD)
    case.feed(CommandStarted(7, 1))
    [end] = of(EndCommand, case.stop(7))
    assert end.reason is EndReason.CANCELLED
    case.feed(CommandEnded(7, 1, EndReason.CANCELLED, 137, "", 5))
    case.pass_time(SECOND)
    assert Released(7, 1) in case.reported


def test_a_member_whose_node_gives_it_up_says_so_even_when_it_is_then_stopped(case: Case) -> None:
    """The others fail when it goes: only this report tells the server that nobody is at fault."""
    granted(case, TOLD)
    case.feed(CommandStarted(7, 1))
    case.feed(ReclaimAsked(None, "its owner is back"))
    [end] = of(EndCommand, case.stop(7))
    assert end.reason is EndReason.CANCELLED  # at once
    case.feed(CommandEnded(7, 1, EndReason.CANCELLED, 137, "", 5))
    case.pass_time(SECOND)
    [finished] = [one for one in case.reported if isinstance(one, Finished)]
    assert (finished.task, finished.reason) == (7, EndReason.PREEMPTED)
    assert Released(7, 1) not in case.reported
