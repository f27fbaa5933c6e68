"""Lease times go by what passes while the server runs, whatever is done to the time of day."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gpool.core.model import Instant
from gpool.server.clock import SystemClock
from gpool.server.scheduling.loops import ExpireNodes
from gpool.wire.frames import Hold
from tests.server.server_desk import Desk, open_desk

pytestmark = pytest.mark.anyio
SECOND_NS = 1_000_000_000
HOUR_S = 3600


class Machine:
    """Its time of day, and its own time, in seconds."""

    def __init__(self) -> None:
        self.wall_s, self.ticks_s = 1_790_000_000, 500
        self.clock = SystemClock(lambda: self.wall_s * SECOND_NS, lambda: self.ticks_s * SECOND_NS)

    def passes(self, seconds: int) -> None:
        self.wall_s += seconds
        self.ticks_s += seconds


class TimeOfDay:
    """The same without its own time, as it was before."""

    def __init__(self, machine: Machine) -> None:
        self._clock = machine.clock

    def now(self) -> Instant:
        return self._clock.now()


@asynccontextmanager
async def desk_at(data: Path, clock: Any) -> AsyncIterator[Desk]:
    desk = await open_desk(data, clock)
    async with desk.http:
        yield desk
    await desk.server.identity.close()
    await desk.server.store.close()


async def expire(desk: Desk) -> None:
    await ExpireNodes(desk.server).run_once(desk.server.now)


async def status(desk: Desk, task: str) -> str:
    found: str = (await desk.get(f"/v1/tasks/{task}")).json()["status"]
    return found


@pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S])
async def test_a_clock_that_is_set_takes_no_lease_away_and_keeps_none_for_ever(
    data: Path, step_s: int
) -> None:
    machine = Machine()
    async with desk_at(data, machine.clock) as desk:
        agent = await desk.agent()
        task = await desk.command()
        await desk.schedule()
        [lease] = agent.leases()
        machine.passes(20)
        machine.wall_s += step_s
        await expire(desk)
        assert await status(desk, task) == "leased"
        machine.passes(9)  # 29 of 30 seconds
        await agent.send_beat(Hold(lease.task, lease.epoch))
        machine.passes(29)
        await expire(desk)
        assert await status(desk, task) == "leased"
        assert not agent.channel.closed
        machine.passes(2)
        await expire(desk)
        assert await status(desk, task) == "queued", (
            "a silent node is given up in time all the same"
        )
        assert agent.channel.closed


async def test_by_the_time_of_day_alone_the_same_step_takes_the_lease_away(data: Path) -> None:
    """The control."""
    machine = Machine()
    async with desk_at(data, TimeOfDay(machine)) as desk:
        await desk.agent()
        task = await desk.command()
        await desk.schedule()
        machine.passes(20)
        machine.wall_s += HOUR_S
        await expire(desk)
        assert await status(desk, task) == "queued"


async def test_after_a_long_outage_every_node_has_a_whole_lease_time(data: Path) -> None:
    machine = Machine()
    async with desk_at(data, machine.clock) as desk:
        await desk.agent()
        task = await desk.command()
        await desk.schedule()
    later = Machine()
    later.wall_s, later.ticks_s = machine.wall_s + 10 * HOUR_S, 7  # it was started anew, too
    async with desk_at(data, later.clock) as desk:
        later.passes(29)
        await expire(desk)
        assert await status(desk, task) == "leased"
        later.passes(2)
        await expire(desk)
        assert await status(desk, task) == "queued"
