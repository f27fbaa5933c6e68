"""A task's secrets on a node: variables of its sandbox, part of a runner's key by hash, and in no repr."""

from __future__ import annotations

from dataclasses import replace

from gpool.agent.state_machine.instructions import (
    FrameArrived,
    Instruction,
    StartCommand,
    StartRunner,
)
from gpool.agent.state_machine.lease_queues import GrantTerms
from gpool.core.model import TaskSpec
from gpool.wire.frames import Grants, HandedBack, Lease, Line, Secret, decode_from_server, encode
from tests.agent.state_machine.state_case import Case, allocation, command, function, of

VALUE = "a secret value"


def a_case() -> Case:
    case = Case()
    case.welcome()
    return case


def granted(
    case: Case, spec: TaskSpec, number: int, task: int, secrets: tuple[Secret, ...]
) -> list[Instruction]:
    line = Line(allocation(number), 7, False, number, (Lease(task, 1, b"args"),))
    frame = Grants(1, ((number, spec),), (line,), secrets)
    arrived = decode_from_server(encode(frame))
    assert arrived == frame
    assert VALUE not in repr(arrived)
    return case.feed(FrameArrived(arrived))


def test_a_command_gets_its_secrets_and_no_repr_shows_them() -> None:
    case = a_case()
    spec = replace(command(), secrets=("TOKEN",))
    [start] = of(StartCommand, granted(case, spec, 1, 1, (Secret(1, "TOKEN", VALUE),)))
    assert start.secrets == (("TOKEN", VALUE),)
    assert VALUE not in repr(start)


def test_a_task_never_runs_without_its_secrets() -> None:
    case = a_case()
    spec = replace(command(), secrets=("TOKEN", "OTHER"))
    out = granted(case, spec, 1, 1, (Secret(1, "TOKEN", VALUE),))
    assert of(StartCommand, out) == []
    case.pass_time(1_000_000)
    assert HandedBack(1, 1) in case.reported


def test_calls_with_other_secrets_never_share_a_runner() -> None:
    spec = replace(function(), secrets=("TOKEN",))
    keys = {
        GrantTerms(allocation(), 7, False, spec, (("TOKEN", value),)).key
        for value in ("first", "second", "first")
    }
    assert len(keys) == 2
    assert not any("first" in repr(key) or "second" in repr(key) for key in keys)
    assert GrantTerms(allocation(), 7, False, function()).key.secrets == ""


def test_a_runner_gets_the_secrets_of_its_first_call() -> None:
    case = a_case()
    spec = replace(function(), secrets=("TOKEN",))
    [start] = of(StartRunner, granted(case, spec, 1, 1, (Secret(1, "TOKEN", VALUE),)))
    assert start.secrets == (("TOKEN", VALUE),)
