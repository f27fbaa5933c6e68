"""What the agent does about single GPUs: readings go with the heartbeats, a closed one takes nothing, a wanted one is freed soon."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.agent.state_machine.gpu_readings import ReadingAverages, by_task, simulated_readings
from gpool.agent.state_machine.instructions import (
    CommandStarted,
    EndCommand,
    OfferDetected,
    ReadingsTaken,
    ReclaimAsked,
    StartCommand,
    Ticked,
)
from gpool.agent.state_machine.lease_control import RECLAIM_GRACE_US
from gpool.core.model import EndReason, Gpu, Slice, Span
from gpool.wire.frames import (
    Beat,
    GpuReading,
    HandedBack,
    Hold,
    Stop,
    StopReason,
    TaskReading,
    decode_from_agent,
    encode,
)
from tests.agent.state_machine.state_case import BEAT, OFFER, SECOND, Case, command, frames

GPUS = tuple(Gpu(n, f"g{n}", "H200", "nvidia", 1 << 30) for n in range(2))


@pytest.fixture
def case() -> Case:
    case = Case()
    case.welcome()
    case.feed(OfferDetected(replace(OFFER, gpus=GPUS)))
    return case


def test_readings_ride_with_the_next_beat_and_only_that(case: Case) -> None:
    case.feed(ReadingsTaken((GpuReading(0, 10, 5, 100_000, 40),)))
    case.feed(ReadingsTaken((GpuReading(0, 30, 3, 300_000, 50),)))
    (beat,) = frames(Beat, case.feed(Ticked(), BEAT))
    assert beat.readings == (GpuReading(0, 20, 5, 200_000, 50),)
    (beat,) = frames(Beat, case.feed(Ticked(), BEAT))
    assert beat.readings == ()


def test_a_task_alone_on_its_gpu_is_told_with_it(case: Case) -> None:
    case.grant(command(), 5, gpu=1)
    case.feed(CommandStarted(5, 1))
    case.feed(ReadingsTaken((GpuReading(0, 1), GpuReading(1, 97, 4, 600_000, 70))))
    (beat,) = frames(Beat, case.feed(Ticked(), BEAT))
    assert beat.tasks == (TaskReading(5, 1, 97, 4, 600_000, 70),)


SIMULATED = tuple(replace(gpu, simulated=True) for gpu in GPUS)


def test_a_simulated_gpu_is_busy_while_a_task_runs_on_it(case: Case) -> None:
    case.feed(OfferDetected(replace(OFFER, gpus=SIMULATED)))
    (beat,) = frames(Beat, case.feed(Ticked(), BEAT))
    idle = [(one.utilisation_percent, one.memory_bytes) for one in beat.readings]
    assert idle == [(0, 0), (0, 0)]
    case.grant(command(), 5, gpu=1)
    case.feed(CommandStarted(5, 1))
    (beat,) = frames(Beat, case.feed(Ticked(), BEAT))
    first, second = beat.readings
    assert (first.gpu, first.utilisation_percent) == (0, 0)
    assert second.utilisation_percent is not None
    assert 50 <= second.utilisation_percent <= 100
    (task,) = beat.tasks
    assert (task.task, task.utilisation_percent) == (5, second.utilisation_percent)


@given(
    st.dictionaries(
        st.tuples(st.integers(1, 1 << 60), st.integers(1, 9)),
        st.tuples(
            st.builds(Slice, st.integers(0, 1), st.integers(0, 1 << 30), st.integers(0, 1000))
        ),
        max_size=6,
    ),
    st.integers(0, 1 << 50),
)
def test_readings_of_simulated_gpus_are_plausible_and_repeatable(
    running: dict[tuple[int, int], tuple[Slice, ...]], now: int
) -> None:
    found = simulated_readings((*SIMULATED, replace(GPUS[0], index=7)), running, now)
    assert found == simulated_readings(SIMULATED, running, now)
    for one in found:
        assert 0 <= (one.utilisation_percent or 0) <= 100
        assert 0 <= (one.memory_bytes or 0) <= 1 << 30
        assert 20 <= (one.temperature_c or 0) <= 90


def test_what_tasks_share_is_not_told_of_either() -> None:
    half = (Slice(0, 1, 500),)
    shared = by_task((GpuReading(0, 50),), {(1, 1): half, (2, 1): half})
    assert shared == ()


def test_a_beat_of_an_older_agent_is_still_a_beat() -> None:
    told = decode_from_agent(encode(Beat(3, ())))
    assert told == Beat(3, (), (), ())
    assert decode_from_agent(b"\x93\xa4Beat\x03\x90") == told


def test_a_grant_on_a_closed_gpu_is_handed_back_and_others_are_taken(case: Case) -> None:
    closed = replace(GPUS[0], closed="its owner wants it")
    case.feed(OfferDetected(replace(OFFER, gpus=(closed, GPUS[1]))))
    out = case.grant(command(), 1, number=0, gpu=0)
    assert [one for one in out if isinstance(one, StartCommand)] == []
    out = case.grant(command(), 2, number=1, gpu=1)
    assert [one.task for one in out if isinstance(one, StartCommand)] == [2]
    case.feed(Ticked(), SECOND)
    assert HandedBack(1, 1) in case.reported


def test_a_reclaimed_gpu_ends_its_task_only_and_within_seconds(case: Case) -> None:
    for task in (1, 2):
        case.grant(command(), task, number=task, gpu=task - 1)
        case.feed(CommandStarted(task, 1))
    out = case.feed(ReclaimAsked(frozenset({0}), "its owner took the GPU back"))
    ends = [one for one in out if isinstance(one, EndCommand)]
    assert ends == [EndCommand(1, 1, EndReason.PREEMPTED, RECLAIM_GRACE_US)]
    assert RECLAIM_GRACE_US <= 3 * SECOND


def test_a_gpu_taken_back_through_the_server_is_freed_as_soon(case: Case) -> None:
    case.grant(command(), 1, gpu=0)
    case.feed(CommandStarted(1, 1))
    out = case.arrive(Stop((Hold(1, 1),), StopReason.RECLAIMED))
    assert EndCommand(1, 1, EndReason.PREEMPTED, RECLAIM_GRACE_US) in out
    again = case.arrive(Stop((Hold(1, 1),), StopReason.PREEMPTED))
    assert [one for one in again if isinstance(one, EndCommand)] == []


def test_a_task_that_saves_keeps_its_whole_grace(case: Case) -> None:
    spec = replace(command(), checkpoint="state/", grace=Span(9 * SECOND))
    case.grant(spec, 1, gpu=0)
    case.feed(CommandStarted(1, 1))
    out = case.feed(ReclaimAsked(frozenset({0}), "why"))
    assert EndCommand(1, 1, EndReason.PREEMPTED, 9 * SECOND) in out


numbers = st.none() | st.integers(0, 100)
readings = st.builds(GpuReading, st.integers(0, 3), numbers, numbers, numbers, numbers)


@given(st.lists(readings, max_size=20))
def test_gathering_never_tells_of_a_gpu_twice_nor_beyond_what_was_read(
    told: list[GpuReading],
) -> None:
    gathering = ReadingAverages()
    gathering.add(told)
    taken = gathering.take()
    assert [one.gpu for one in taken] == sorted({one.gpu for one in told})
    for one in taken:
        for name in ("utilisation_percent", "memory_bytes", "power_mw", "temperature_c"):
            seen = [getattr(r, name) for r in told if r.gpu == one.gpu]
            known = [value for value in seen if value is not None]
            value = getattr(one, name)
            assert (value is None) == (not known)
            assert value is None or min(known) <= value <= max(known)
    assert gathering.take() == ()
