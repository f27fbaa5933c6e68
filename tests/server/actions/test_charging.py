"""Charged tasks on a real server: no start without funds, cost in documents, stops at `max_cost`, warnings of budgets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from gpool.core.model import Permission
from gpool.server.scheduling.charging import ChargeTasks
from gpool.server.scheduling.picture import StatePicture
from gpool.wire.frames import HandedBack, Started, Stop, StopReason
from tests.server.actions.test_market import lent, quoted
from tests.server.server_desk import Agent, Desk, StoppedClock, exited, open_desk

pytestmark = pytest.mark.anyio

PRICE = 3_600_000  # micro-credits an hour: 1,000 a second and GPU
FIRST = 300_000  # for five minutes
Headers = dict[str, str]
LOOPS: WeakKeyDictionary[StatePicture, ChargeTasks] = WeakKeyDictionary()


@pytest.fixture
async def desk(data: Path) -> AsyncIterator[Desk]:
    made = await open_desk(data, StoppedClock(), prices=True, fee_ppm=100_000)
    async with made.http:
        yield made
    await made.server.store.close()


async def person(desk: Desk) -> tuple[Headers, str]:
    headers = await desk.person("bob", Permission.CONSUMER)
    return headers, (await desk.get("/v1/me", headers=headers)).json()["id"]


async def give(desk: Desk, to: str, amount: int) -> None:
    body = {"to": to, "amount_microcredits": amount}
    assert (await desk.post("/v1/admin/ledger/grants", body)).status_code == 201


async def charged(desk: Desk, seconds: float = 0) -> None:
    """Let time pass and the loop run."""
    desk.clock.advance(seconds)
    loop = LOOPS.setdefault(
        desk.server.picture, ChargeTasks(desk.server, desk.server.scheduler.prices)
    )
    await loop.run_once(desk.server.now)


async def shown(desk: Desk, task: str, who: Headers) -> dict[str, Any]:
    found: dict[str, Any] = (await desk.get(f"/v1/tasks/{task}", headers=who)).json()
    return found


async def started(desk: Desk, agent: Agent) -> Any:
    assert await desk.schedule() == 1
    lease = agent.leases()[-1]
    await agent.report(Started(lease.task, lease.epoch))
    return lease


async def test_a_task_without_funds_waits_with_the_figures_and_starts_after_a_grant(
    desk: Desk,
) -> None:
    bob, id_ = await person(desk)
    agent = await desk.agent("n1", lent(PRICE))
    await give(desk, id_, 120_000)
    quote = await quoted(desk, bob, gpu="1")
    assert "No funds: balance 0.12, needs 0.30" in quote["sentence"]
    task = await desk.command(bob, gpu="1")
    assert await desk.schedule() == 0
    assert await desk.schedule() == 0  # it is not planned again
    assert desk.server.picture.state.queued_count == 0
    why = (await desk.get(f"/v1/tasks/{task}/explain", headers=bob)).json()
    assert why["code"] == "no_funds"
    assert "balance 0.12, needs 0.30 for the first 5 minutes" in why["sentence"]
    await charged(desk)
    assert desk.server.picture.state.queued_count == 0
    await give(desk, id_, 200_000)
    await charged(desk)
    lease = await started(desk, agent)
    desk.clock.advance(10)
    during = await shown(desk, task, bob)
    assert (during["cost_microcredits"], during["reserved_microcredits"]) == (0, FIRST)
    await agent.report(exited(lease))
    await charged(desk)
    after = await shown(desk, task, bob)
    assert (after["cost_microcredits"], after["reserved_microcredits"]) == (10_000, 0)
    books = (await desk.get("/v1/ledger", headers=bob)).json()
    assert (books["balance_microcredits"], books["pending_microcredits"]) == (310_000, 0)
    earned = (await desk.get("/v1/ledger")).json()["earned_microcredits"]
    assert earned == 9_000
    assert (await desk.get("/v1/admin/ledger/check")).json()["sound"] is True


async def test_a_budget_refuses_and_its_warning_is_recorded(desk: Desk) -> None:
    bob, id_ = await person(desk)
    agent = await desk.agent("n1", lent(PRICE))
    await give(desk, id_, 10 * FIRST)
    cap = {"cap_microcredits": FIRST + 10_000}
    assert (await desk.http.put("/v1/budget", json=cap, headers=bob)).status_code == 200
    await desk.command(bob, gpu="1")
    await started(desk, agent)
    await charged(desk)
    newest = (await desk.get("/v1/audit?limit=1")).json()["items"][0]
    assert (newest["action"], newest["facts"]["level"]) == ("budget.warning", "warning")
    second = await desk.command(bob, gpu="1")
    assert await desk.schedule() == 0
    why = (await desk.get(f"/v1/tasks/{second}/explain", headers=bob)).json()
    assert why["code"] == "over_budget"
    assert "0.30 of 0.31 spent" in why["sentence"]


async def test_a_task_is_warned_before_its_max_cost_and_ends(desk: Desk) -> None:
    bob, id_ = await person(desk)
    agent = await desk.agent("n1", lent(PRICE))
    await give(desk, id_, 10 * FIRST)
    task = await desk.command(bob, gpu="1", max_cost="0.06", grace_s=5)
    lease = await started(desk, agent)
    await charged(desk, 50)
    assert agent.frames(Stop) == []
    await charged(desk, 4)  # 60 s are paid for, less the grace period
    (stop,) = agent.frames(Stop)
    assert stop.reason is StopReason.PREEMPTED
    await charged(desk, 1)
    assert len(agent.frames(Stop)) == 1
    desk.clock.advance(60)
    await agent.report(HandedBack(lease.task, lease.epoch))
    found = await shown(desk, task, bob)
    assert (found["status"], found["reason"]) == ("failed", "out_of_funds")
    assert (found["cost_microcredits"], found["max_cost_microcredits"]) == (60_000, 60_000)
    assert "max_cost" in found["error_text"]


async def test_a_task_whose_funds_run_out_is_stopped_and_never_charged_more(desk: Desk) -> None:
    bob, id_ = await person(desk)
    agent = await desk.agent("n1", lent(PRICE))
    await give(desk, id_, FIRST)
    task = await desk.command(bob, gpu="1", grace_s=5)
    lease = await started(desk, agent)
    await charged(desk, 200)
    assert agent.frames(Stop) == []
    await charged(desk, 90)
    assert len(agent.frames(Stop)) == 1
    desk.clock.advance(500)
    await agent.report(HandedBack(lease.task, lease.epoch))
    found = await shown(desk, task, bob)
    assert (found["reason"], found["cost_microcredits"]) == ("out_of_funds", FIRST)
    await charged(desk)
    assert (await desk.get("/v1/ledger", headers=bob)).json()["balance_microcredits"] == 0


async def test_a_long_task_is_extended_and_its_owner_is_paid_at_the_end_of_each_lease(
    desk: Desk,
) -> None:
    bob, id_ = await person(desk)
    agent = await desk.agent("n1", lent(PRICE))
    await give(desk, id_, 10 * FIRST)
    task = await desk.command(bob, gpu="1")
    lease = await started(desk, agent)
    for _ in range(10):
        await charged(desk, 60)
    assert (await shown(desk, task, bob))["reserved_microcredits"] > 600_000
    await agent.report(exited(lease))
    await charged(desk)
    assert (await shown(desk, task, bob))["cost_microcredits"] == 600_000
    assert (await desk.get("/v1/admin/ledger/check")).json()["sound"] is True


async def test_the_owner_and_free_accounts_pay_nothing(desk: Desk) -> None:
    bob, _ = await person(desk)
    agent = await desk.agent("n1", lent(PRICE, free_for=("user:bob",)))
    for who in ({}, bob):
        task = await desk.command(who, gpu="1")
        lease = await started(desk, agent)
        await agent.report(exited(lease))
        assert (await shown(desk, task, who))["cost_microcredits"] is None


@pytest.mark.parametrize("cap", ["0", "-1", "x", "1/h", 1e-9])
async def test_a_max_cost_is_an_amount_above_0(desk: Desk, cap: Any) -> None:
    bob, _ = await person(desk)
    body = {"command": ["true"], "max_cost": cap}
    answer = await desk.post("/v1/tasks", body, headers=bob)
    assert (answer.status_code, "credits" in answer.json()["detail"]) == (400, True)
