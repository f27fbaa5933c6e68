"""A stopped process runs nothing; continued, it runs what became due in that order, and its time has jumped."""

from __future__ import annotations

import asyncio

from gpool.testing.simulation import new_loop
from gpool.testing.world.replicas.pausing import PausableLoop, PausableProcess

S = 1_000_000


def test_a_stopped_process_runs_nothing_until_it_is_continued() -> None:
    loop = new_loop(PausableLoop)
    assert isinstance(loop, PausableLoop)
    process = PausableProcess(loop, "server", lambda _: None)
    seen: list[tuple[str, int]] = []

    async def count(name: str) -> None:
        for _ in range(4):
            await asyncio.sleep(1)
            seen.append((name, loop.us // S))

    async def live() -> None:
        stopped = process.spawn(loop, count("stopped"))
        other = loop.create_task(count("other"))
        loop.after_us(1_500_000, process.pause)
        loop.after_us(3_500_000, process.resume)
        await asyncio.gather(stopped, other)

    loop.run_until_complete(live())
    loop.close()
    assert [at for name, at in seen if name == "other"] == [1, 2, 3, 4]
    assert [at for name, at in seen if name == "stopped"] == [1, 3, 4, 5]


def test_a_killed_process_is_not_continued() -> None:
    loop = new_loop(PausableLoop)
    assert isinstance(loop, PausableLoop)
    process = PausableProcess(loop, "server", lambda _: None)
    ran: list[str] = []

    async def work() -> None:
        await asyncio.sleep(1)
        ran.append("late")

    async def live() -> None:
        working = process.spawn(loop, work())
        loop.after_us(500_000, process.pause)
        loop.after_us(2_000_000, process.kill)
        await asyncio.gather(working, return_exceptions=True)

    loop.run_until_complete(live())
    loop.close()
    assert ran == []
