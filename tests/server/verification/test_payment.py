"""Payment of siblings: charges are held until the verdict, paid to those that agreed, returned otherwise."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gpool.server.scheduling.charging import ChargeTasks
from gpool.wire.frames import Started
from tests.server.actions.test_market import lent
from tests.server.server_desk import Desk, StoppedClock, open_desk
from tests.server.verification import test_comparators as comparators
from tests.server.verification.lenders import BOTH, TRUTH, Lenders, silence, value
from tests.server.verification.lenders import data as number_data
from tests.server.verification.test_checks import owner, submit

pytestmark = pytest.mark.anyio
PRICE = 3_600_000  # micro-credits an hour: 1,000 a second and GPU
GIVEN = 100_000_000


@pytest.fixture
async def desk(data: Path) -> AsyncIterator[Desk]:
    made = await open_desk(data, StoppedClock(), prices=True, fee_ppm=0)
    async with made.http:
        yield made
    await made.server.store.close()


async def funded(desk: Desk) -> dict[str, str]:
    headers = await desk.person("consumer", *BOTH)
    id_ = (await desk.get("/v1/me", headers=headers)).json()["id"]
    body = {"to": id_, "amount_microcredits": GIVEN}
    assert (await desk.post("/v1/admin/ledger/grants", body)).status_code == 201
    return headers


async def books(desk: Desk, who: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = (await desk.get("/v1/ledger", headers=who)).json()
    return found


class Clockwork:
    """Runs that take ten seconds each, one after the other, and the loop that moves the money."""

    def __init__(self, desk: Desk, pool: Lenders) -> None:
        self._desk, self._pool = desk, pool
        self._charging = ChargeTasks(desk.server, desk.server.scheduler.prices)

    async def round(self) -> None:
        pool, desk = self._pool, self._desk
        answers = {lender.name: lender.answer for lender in pool.everyone}
        before = {lender.name: lender.seen for lender in pool.everyone}
        for lender in pool.everyone:
            lender.answer = silence
        await pool.tick()
        started = [
            (lender, lease)
            for lender in pool.everyone
            for lease in lender.ran[before[lender.name] :]
        ]
        for lender, lease in started:
            await lender.agent.report(Started(lease.task, lease.epoch))
            desk.clock.advance(10)
            ended = answers[lender.name](lender, lease)
            if ended is not None:
                await lender.agent.report(ended)
        for lender in pool.everyone:
            lender.answer = answers[lender.name]
        await self._charging.run_once(desk.server.now)


async def test_siblings_that_agreed_are_paid_and_the_liar_is_not(desk: Desk) -> None:
    pool = Lenders(desk)
    consumer = await funded(desk)
    offered = {"gpus": lent(PRICE).gpus, "price_microcredits": PRICE}
    await pool.join("n0", value(number_data(1)), **offered)
    await pool.join("n1", value(TRUTH), **offered)
    clockwork = Clockwork(desk, pool)
    tasks = await pool.submit(consumer, 8, gpu="1")
    await clockwork.round()  # two owners: the liar is one of each pair
    for number in range(2, 7):
        await pool.join(f"n{number}", value(TRUTH), **offered)
    for _ in range(30):
        await clockwork.round()
    ran = {lender.name: len(lender.ran) for lender in pool.everyone}
    assert ran["n0"] > 0
    found = [await pool.task(task, consumer) for task in tasks]
    assert {each["status"] for each in found} == {"succeeded"}
    paid = sum(each["verification"]["agreed"] for each in found) * 10_000
    assert sum(each["cost_microcredits"] for each in found) == paid
    shown = await books(desk, consumer)
    assert shown["pending_microcredits"] == 0
    assert GIVEN - shown["balance_microcredits"] == paid
    assert (await desk.get("/v1/admin/ledger/check")).json()["sound"] is True


async def test_a_worker_whose_result_fails_its_check_is_not_paid(desk: Desk) -> None:
    pool = Lenders(desk)
    consumer = await funded(desk)
    offered = {"gpus": lent(PRICE).gpus, "price_microcredits": PRICE}
    liar = await pool.join("liar", owner(works=number_data(1)), **offered)
    clockwork = Clockwork(desk, pool)
    [task] = await submit(pool, consumer, gpu="1")
    await clockwork.round()
    for number in range(5):
        await pool.join(f"n{number}", owner(), **offered)
    for _ in range(10):
        await clockwork.round()
    found = await pool.task(task, consumer)
    assert found["status"] == "succeeded"
    assert len(liar.ran) == 1
    assert found["verification"]["agreed"] == 4
    assert found["cost_microcredits"] == 4 * 10_000  # two checks refused the lie; a worker, a check
    shown = await books(desk, consumer)
    assert shown["pending_microcredits"] == 0
    assert GIVEN - shown["balance_microcredits"] == 4 * 10_000
    assert (await books(desk, liar.headers))["balance_microcredits"] == 0
    assert (await desk.get("/v1/admin/ledger/check")).json()["sound"] is True


@pytest.mark.parametrize("comparing", [comparators.compares, comparators.raises])
async def test_comparers_are_paid_with_the_siblings_and_nobody_without_a_comparison(
    desk: Desk, comparing: comparators.Comparing
) -> None:
    pool = Lenders(desk)
    consumer = await funded(desk)
    offered = {"gpus": lent(PRICE).gpus, "price_microcredits": PRICE}
    for number in range(4):
        answer = comparators.owner(comparators.near(number), comparing)
        await pool.join(f"n{number}", answer, **offered)
    clockwork = Clockwork(desk, pool)
    [task] = await comparators.submit(pool, consumer, gpu="1")
    for _ in range(6):
        await clockwork.round()
    found = await pool.task(task, consumer)
    assert [len(lender.ran) for lender in pool.everyone] == [1, 1, 1, 1]
    is_accepted = comparing is comparators.compares
    assert found["verification"]["outcome"] == ("accepted" if is_accepted else "not_compared")
    shown = await books(desk, consumer)
    assert shown["pending_microcredits"] == 0
    assert GIVEN - shown["balance_microcredits"] == (4 * 10_000 if is_accepted else 0)
    assert (await desk.get("/v1/admin/ledger/check")).json()["sound"] is True
