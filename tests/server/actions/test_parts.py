"""The server's small parts: clock, ids, hub, settings, ticker."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gpool.core.model import Instant
from gpool.server.actions.tasks.repeated import WantedTasks
from gpool.server.actions.tasks.submit import submit
from gpool.server.clock import Ids, SystemClock
from gpool.server.scheduling.loops import LoopRunner
from gpool.server.settings import Settings
from gpool.server.store.identity_values import Caller
from gpool.server.store.protocol import Operation, Store
from gpool.server.wakeups import Hub, Wake
from gpool.wire.documents import TaskRequest
from tests.server.server_desk import Desk, StoppedClock

pytestmark = pytest.mark.anyio


@given(
    st.lists(st.tuples(st.integers(-5000, 5000), st.integers(1, 10_000)), max_size=50),
    st.integers(),
)
def test_ids_always_increase_and_never_repeat(steps: list[tuple[int, int]], seed: int) -> None:
    clock = StoppedClock()
    ids = Ids(clock, random.Random(seed))
    taken: list[int] = []
    for milliseconds, count in steps:
        clock.instant += milliseconds * 1000
        taken += [*ids.take(count)][:: max(1, count - 1)]
    assert all(a < b for a, b in pairwise(taken))
    assert all(0 < id_ < 1 << 63 for id_ in taken)


def test_the_clock_never_steps_back() -> None:
    clock = SystemClock()
    times = [clock.now() for _ in range(100)]
    assert times == sorted(times)


def test_a_clock_that_was_set_back_goes_on_until_the_hosts_has_caught_up() -> None:
    second, hour = 10**9, 3600 * 10**9
    wall, ticks = [10 * hour], [0]
    clock = SystemClock(lambda: wall[0], lambda: ticks[0])

    def after(seconds: int, *, set_back: int = 0) -> int:
        wall[0] += seconds * second - set_back
        ticks[0] += seconds * second
        return clock.now() * 1000

    assert after(5) == 10 * hour + 5 * second
    before = after(0)
    assert after(0, set_back=2 * hour) == before
    assert after(60) == before + 54 * second  # a dead node is noticed, a little late
    times = [after(600) for _ in range(130)]
    assert times == sorted(set(times))
    assert times[-1] == wall[0]
    wall[0] += hour
    assert clock.now() * 1000 == wall[0]  # forward it is followed


def test_settings_that_break_the_lease_law_are_refused() -> None:
    with pytest.raises(ValidationError, match="must be longer"):
        Settings(ttl_s=10, beat_s=8, margin_s=5)


async def test_a_wake_up_before_the_wait_is_not_missed() -> None:
    hub = Hub()
    with hub.subscription(1, 2) as changed:
        hub.publish([3])
        assert not await changed.wait(0)
        hub.publish(range(2, 5000))
        assert await changed.wait(60)
        assert not await changed.wait(0)
    hub.publish([1])
    assert hub.subscribers == {}


async def test_a_waiter_is_woken_by_its_topic() -> None:
    hub = Hub()
    with hub.subscription(7) as changed:
        waiting = asyncio.create_task(changed.wait(60))
        asyncio.get_running_loop().call_soon(hub.publish, (7,))
        assert await waiting


class Counting:
    """A loop that is called again while it works, and fails when told to."""

    name = "counting"
    every_s = 3600.0

    def __init__(self) -> None:
        self.wake = Wake()
        self.runs = 0
        self.calls: Iterator[int] = iter([3, 0])
        self.idle = asyncio.Event()
        self.fails = False

    async def run_once(self, now: Instant) -> None:
        self.runs += 1
        if self.fails:
            self.fails = False
            self.wake.call()
            raise RuntimeError("on purpose")
        for _ in range(next(self.calls, 0)):
            self.wake.call()
        self.idle.set()


async def test_many_calls_during_a_pass_are_exactly_one_more(desk: Desk) -> None:
    loop = Counting()
    ticker = LoopRunner(desk.server, loop)
    ticker.start()
    while loop.runs < 2:
        loop.idle.clear()
        await loop.idle.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    assert loop.runs == 2
    await ticker.stop()


async def test_a_loop_that_fails_goes_on_and_the_scheduler_looks_again(desk: Desk) -> None:
    loop = Counting()
    loop.every_s = 0.001
    loop.fails = True
    ticker = LoopRunner(desk.server, loop)
    assert not desk.server.picture.is_stale
    ticker.start()
    await loop.idle.wait()
    await ticker.stop()
    assert desk.server.picture.is_stale
    assert b'gpool_loop_faults_total{loop="counting"} 1.0' in desk.server.metrics.page()
    await desk.schedule()
    assert not desk.server.picture.is_stale


class Dallying:
    """A store that has committed and is slow to say so."""

    def __init__(self, real: Store) -> None:
        self._real = real
        self.committed = asyncio.Event()

    async def write(self, operation: Operation[Any]) -> Any:
        await self._real.write(operation)
        self.committed.set()
        await asyncio.Event().wait()

    async def read(self, operation: Operation[Any]) -> Any:
        return await self._real.read(operation)

    async def close(self) -> None:
        await self._real.close()


async def test_what_a_cancelled_caller_committed_is_found_again(desk: Desk) -> None:
    store = Dallying(desk.server.store)
    slow = replace(desk.server, store=store)
    user = await desk.server.credentials.who(desk.key)
    assert isinstance(user, Caller)
    submitting = asyncio.create_task(
        submit(slow, user, WantedTasks(TaskRequest(command=["true"])), None)
    )
    await store.committed.wait()
    submitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submitting
    assert desk.server.picture.is_stale
    assert desk.server.picture.state.queued_count == 0
    await desk.schedule()
    assert desk.server.picture.state.queued_count == 1
