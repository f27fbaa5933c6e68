"""Virtual time: nothing is waited for, nothing outside is touched, nothing turns for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from gpool.testing.simulation import (
    Deadlock,
    Dice,
    Livelock,
    OutsideSimulation,
    SimulatedProcess,
    VirtualLoop,
    new_loop,
)


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = new_loop()
    yield made
    made.close()


def test_a_day_passes_in_no_time(loop: VirtualLoop) -> None:
    loop.run_until_complete(asyncio.sleep(86_400))
    assert loop.us == 86_400_000_000


def test_timers_fire_in_the_order_of_their_times(loop: VirtualLoop) -> None:
    fired: list[str] = []
    loop.after_us(3, fired.append, "third")
    loop.after_us(1, fired.append, "first")
    loop.after_us(2, fired.append, "second")
    loop.run_until_complete(asyncio.sleep(1))
    assert fired == ["first", "second", "third"]


def test_waiting_for_what_never_comes_is_told(loop: VirtualLoop) -> None:
    with pytest.raises(Deadlock):
        loop.run_until_complete(loop.create_future())


def test_turning_round_while_no_time_passes_is_told(loop: VirtualLoop) -> None:
    def again() -> None:
        loop.call_soon(again)

    again()
    with pytest.raises(Livelock):
        loop.run_until_complete(loop.create_future())


def test_threads_are_refused(loop: VirtualLoop) -> None:
    with pytest.raises(OutsideSimulation):
        loop.run_until_complete(asyncio.to_thread(int))


def test_a_process_dies_with_every_task_it_started(loop: VirtualLoop) -> None:
    told: list[str] = []

    async def child() -> None:
        await asyncio.sleep(5)
        told.append("never")

    async def parent() -> None:
        await asyncio.gather(child(), child())

    async def story() -> None:
        process = SimulatedProcess("p", lambda task: told.append(str(task.exception())))
        process.spawn(loop, parent())
        await asyncio.sleep(1)
        assert len(process.tasks) == 3
        process.kill()
        await asyncio.sleep(10)
        assert process.tasks == []

    loop.run_until_complete(story())
    assert told == []


def test_a_branch_of_the_dice_is_not_moved_by_another() -> None:
    plain, busy = Dice("seed"), Dice("seed")
    busy.branch("a").random()
    busy.random()
    assert plain.branch("b").random() == busy.branch("b").random()
