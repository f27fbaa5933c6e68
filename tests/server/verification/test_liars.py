"""Pools with lying nodes: independent liars, a restart between answers, both databases."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from gpool.server.app import close_server
from gpool.server.verification.loop import VerifyResults
from gpool.wire.frames import Hold
from tests.server.server_desk import Desk, StoppedClock, open_desk
from tests.server.verification.lenders import BOTH, TRUTH, Lender, Lenders, silence, value
from tests.server.verification.lenders import data as number_data

pytestmark = pytest.mark.anyio
LENDERS = 20


async def results_of(
    desk: Desk, pool: Lenders, tasks: list[str], who: dict[str, str]
) -> list[bytes]:
    found = []
    for task in tasks:
        if (await pool.task(task, who))["status"] == "succeeded":
            answer = await desk.get(f"/v1/tasks/{task}/result", headers=who)
            found.append(base64.b64decode(answer.json()["value"]))
    return found


@pytest.mark.parametrize("verify", [2, 3])
async def test_no_lie_of_independent_liars_is_accepted(
    data: Path, database: dict[str, Any], verify: int
) -> None:
    """A fifth of the nodes lies, each in its own way."""
    desk = await open_desk(data, StoppedClock(), **database)
    pool = Lenders(desk)
    consumer = await desk.person("consumer", *BOTH)
    for number in range(LENDERS):
        is_liar = number % 5 == 0
        await pool.join(f"lender-{number}", value(number_data(number)) if is_liar else value(TRUTH))
    tasks = await pool.submit(consumer, 40, verify=verify)
    await pool.run(16)
    found = await results_of(desk, pool, tasks, consumer)
    assert set(found) == {TRUTH}
    assert len(found) >= 33  # a few have no quorum
    liars = [lender for number, lender in enumerate(pool.everyone) if number % 5 == 0]
    assert all(lender.ran for lender in liars)  # they were drawn
    await desk.http.aclose()
    await close_server(desk.server)


async def test_a_server_that_restarts_between_two_answers_decides_as_before(
    data: Path, database: dict[str, Any]
) -> None:
    clock = StoppedClock()
    desk = await open_desk(data, clock, **database)
    pool = Lenders(desk)
    consumer = await desk.person("consumer", *BOTH)
    for name in ("ada", "bob"):
        await pool.join(name, silence)
    [task] = await pool.submit(consumer)
    await pool.tick()
    first, second = pool.everyone
    await first.agent.report(value(TRUTH)(first, first.ran[0]))
    await desk.http.aclose()
    await close_server(desk.server)
    desk = await open_desk(data, clock, **database)
    again = Lenders(desk)
    for lender in (first, second):
        agent = lender.agent.again(desk.server)
        holds = [lease for lease in lender.ran if lender is second]
        await agent.connect(*[Hold(lease.task, lease.epoch) for lease in holds])
        again.everyone.append(Lender(lender.name, lender.headers, agent, value(TRUTH)))
    await desk.schedule()
    await VerifyResults(desk.server).run_once(desk.server.now)
    assert (await again.task(task, consumer))["verification"]["answered"] == 1
    await again.everyone[1].agent.report(value(TRUTH)(second, second.ran[0]))
    await again.run(2)
    assert (await again.task(task, consumer))["status"] == "succeeded"
    await desk.http.aclose()
    await close_server(desk.server)
