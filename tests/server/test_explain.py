"""Explain, the policy, cordons and reservations, over the real routes and the real channel."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from server_desk import Agent, Desk, an_offer, exited

from gpool.core.ids import decode
from gpool.core.model import EndReason, Permission
from gpool.core.scheduling.rules import NO_RULES
from gpool.server.actions import operating
from gpool.wire.frames import Finished, Lease, Started

pytestmark = pytest.mark.anyio


async def ran(desk: Desk, agent: Agent, seconds: float, **members: object) -> None:
    """A task that ran so long, for run times to be known."""
    await desk.command(**members)
    assert await desk.schedule() == 1
    lease = agent.leases()[-1]
    await agent.report(Started(lease.task, lease.epoch))
    desk.clock.advance(seconds)
    await agent.report(ended(lease, seconds))


def ended(lease: Lease, seconds: float, code: int = 0) -> Finished:
    duration = round(seconds * 1_000_000)
    return Finished(lease.task, lease.epoch, EndReason.EXITED, exit_code=code, duration_us=duration)


async def told(desk: Desk, task: str, **headers: str) -> dict[str, Any]:
    answer = await desk.get(f"/v1/tasks/{task}/explain", headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_a_waiting_task_is_told_when_it_starts(desk: Desk) -> None:
    agent = await desk.agent(offer=an_offer(cpus=1))
    for _ in range(10):
        await ran(desk, agent, 100)
    await desk.command()
    await desk.schedule()
    desk.clock.advance(40)
    second, third = await desk.command(), await desk.command()
    found = await told(desk, second)
    assert (found["code"], found["position"], found["ahead"]) == ("nodes_busy", 1, 0)
    starts = datetime.fromisoformat(found["estimate"]["at"])
    now = datetime.fromtimestamp(desk.clock.now() / 1e6, UTC)
    assert starts - now == pytest.approx(timedelta(seconds=60), abs=timedelta(seconds=5))
    assert found["estimate"]["from"] <= found["estimate"]["at"] <= found["estimate"]["to"]
    later = datetime.fromisoformat((await told(desk, third))["estimate"]["at"])
    assert later - starts == pytest.approx(timedelta(seconds=100), abs=timedelta(seconds=15))


async def test_without_any_run_time_no_start_is_promised(desk: Desk) -> None:
    await desk.agent(offer=an_offer(cpus=1))
    await desk.command()
    await desk.schedule()
    found = await told(desk, await desk.command())
    assert found["estimate"] is None


async def test_a_suggestion_is_told_and_starts_the_task_when_submitted(desk: Desk) -> None:
    agent = await desk.agent(offer=an_offer(cpus=2))
    await desk.command()
    await desk.schedule()
    large = await desk.command(cpus=2)
    found = await told(desk, large)
    assert found["suggestions"] == [
        {
            "kind": "cpus",
            "change": "--cpus 1",
            "sentence": "It starts now with 1 CPUs instead of 2.",
        }
    ]
    assert (await desk.http.delete(f"/v1/tasks/{large}")).status_code < 300
    before = len(agent.leases())
    await desk.command(cpus=1)
    assert await desk.schedule() == 1
    assert len(agent.leases()) == before + 1


async def test_a_task_that_keeps_failing_says_so_and_not_that_it_waits(desk: Desk) -> None:
    agent = await desk.agent(offer=an_offer(cpus=1))
    task = await desk.command(retries=5)
    for _ in range(2):
        assert await desk.schedule() == 1
        lease = agent.leases()[-1]
        await agent.report(Started(lease.task, lease.epoch))
        await agent.report(ended(lease, 1, code=7))
    found = await told(desk, task)
    assert found["code"] == "keeps_failing"
    assert found["tries"] == 2
    assert found["sentence"].startswith("It failed 2 times by itself")


async def test_what_has_ended_says_how(desk: Desk) -> None:
    agent = await desk.agent()
    task = await desk.command()
    await desk.schedule()
    await agent.report(exited(agent.leases()[-1], 3))
    found = await told(desk, task)
    assert (found["code"], found["estimate"], found["suggestions"]) == ("ended", None, [])


# ---- the policy


async def test_a_dry_run_tells_and_changes_nothing(desk: Desk) -> None:
    agent = await desk.agent(offer=an_offer(cpus=1))
    for _ in range(10):
        await ran(desk, agent, 60)
    await desk.command()
    await desk.schedule()
    await desk.command(priority=0)
    desk.clock.advance(1)
    await desk.command(priority=50)
    await desk.http.patch("/v1/admin/policy", json={"order": "priority"})
    answer = await desk.http.patch("/v1/admin/policy", json={"order": "fcfs", "dry_run": True})
    assert answer.status_code == 200, answer.text
    found = answer.json()["dry_run"]
    assert found["sentence"] == "Would start 1 task sooner, 1 later; 0 of 2 as now."
    held = (await desk.get("/v1/admin/policy")).json()
    assert (held["order"], held["changed"]) == ("priority", ["order"])


async def test_a_policy_holds_from_the_next_pass_and_after_a_restart(desk: Desk) -> None:
    agent = await desk.agent(offer=an_offer(cpus=1))
    configured = desk.server.settings.order
    changed = await desk.http.patch("/v1/admin/policy", json={"order": "fcfs", "patience_s": 5})
    assert changed.status_code == 200, changed.text
    assert sorted(changed.json()["changed"]) == ["order", "patience_s"]
    assert desk.server.scheduler.policy.order == "fcfs"
    first = await desk.command(priority=0)
    desk.clock.advance(1)
    await desk.command(priority=50)
    await desk.schedule()
    assert agent.leases()[-1].task == int_of(first)
    desk.server.scheduler.use_rules(NO_RULES, desk.server.now)
    assert desk.server.scheduler.policy.order == configured
    await operating.refresh(desk.server)
    assert desk.server.scheduler.policy.order == "fcfs"
    back = await desk.http.patch("/v1/admin/policy", json={"order": None})
    assert back.json()["order"] == configured
    noted = (await desk.get("/v1/audit")).json()["items"]
    assert [one["action"] for one in noted[:2]] == ["policy.change", "policy.change"]


async def test_weights_are_kept_until_they_are_taken_back(desk: Desk) -> None:
    me = (await desk.get("/v1/me")).json()["id"]
    given = await desk.http.patch("/v1/admin/policy", json={"weights": {me: 2.5}})
    assert given.json()["weights"] == {me: 2.5}
    assert desk.server.scheduler.policy.weights == {("user", decode("user", me)): 2500}
    await desk.http.patch("/v1/admin/policy", json={"order": "fcfs"})
    assert (await desk.get("/v1/admin/policy")).json()["weights"] == {me: 2.5}
    back = await desk.http.patch("/v1/admin/policy", json={"weights": {me: None}})
    assert (back.json()["weights"], back.json()["changed"]) == ({}, ["order"])
    assert (
        await desk.http.patch("/v1/admin/policy", json={"weights": {"x": 1}})
    ).status_code == 400


async def test_an_order_that_is_not_there_is_refused(desk: Desk) -> None:
    answer = await desk.http.patch("/v1/admin/policy", json={"order": "luck"})
    assert answer.status_code == 400
    assert "there are: " in answer.json()["detail"]


def int_of(task: str) -> int:
    return decode("task", task)


# ---- cordons and reservations


async def test_a_cordoned_node_never_starts_anything_until_it_is_uncordoned(desk: Desk) -> None:
    agent = await desk.agent()
    node = (await desk.get("/v1/nodes")).json()["items"][0]["id"]
    answer = await desk.http.put(f"/v1/admin/cordons/{node}", json={"why": "new disks"})
    assert answer.status_code == 200, answer.text
    task = await desk.command()
    assert await desk.schedule() == 0
    assert (await told(desk, task))["code"] == "cordoned"
    await agent.again().connect()
    assert await desk.schedule() == 0
    assert (await desk.http.delete(f"/v1/admin/cordons/{node}")).status_code == 204
    assert await desk.schedule() == 1
    assert (await desk.http.delete(f"/v1/admin/cordons/{node}")).status_code == 404


async def test_draining_asks_what_may_be_preempted_to_go(desk: Desk) -> None:
    agent = await desk.agent()
    node = (await desk.get("/v1/nodes")).json()["items"][0]["id"]
    await desk.command(preemptible=True)
    await desk.schedule()
    lease = agent.leases()[-1]
    await agent.report(Started(lease.task, lease.epoch))
    answer = await desk.http.put(f"/v1/admin/cordons/{node}", json={"drain": True})
    assert answer.json()["preempted"] == 1
    assert answer.json()["running"] == 1


async def test_reserved_nodes_start_only_the_tasks_they_are_kept_for(desk: Desk) -> None:
    owner = await desk.person("lender", Permission.PROVIDER)
    await desk.agent(offer=an_offer(cpus=4))
    pupil = await desk.person("pupil", Permission.CONSUMER)
    other = await desk.person("other", Permission.CONSUMER)
    assert owner
    me = (await desk.get("/v1/me", headers=pupil)).json()["id"]
    node = (await desk.get("/v1/nodes")).json()["items"][0]["id"]
    now = datetime.fromtimestamp(desk.clock.now() / 1e6, UTC)
    wanted = {
        "nodes": [node],
        "users": [me],
        "first": (now + timedelta(minutes=10)).isoformat(),
        "last": (now + timedelta(minutes=20)).isoformat(),
        "why": "class",
    }
    keyed = {"idempotency-key": "one"}
    made = await desk.post("/v1/admin/reservations", wanted, headers=keyed)
    assert made.status_code == 201, made.text
    again = await desk.post("/v1/admin/reservations", wanted, headers=keyed)
    assert again.json()["id"] == made.json()["id"]
    assert len((await desk.get("/v1/admin/reservations")).json()["items"]) == 1

    async def submitted(headers: dict[str, str]) -> str:
        answer = await desk.post("/v1/tasks", {"command": ["true"]}, headers=headers)
        assert answer.status_code == 202, answer.text
        task: str = answer.json()["ids"][0]
        return task

    await submitted(other)
    assert await desk.schedule() == 1, "not yet reserved"
    desk.clock.advance(11 * 60)
    waits = await submitted(other)
    assert await desk.schedule() == 0
    assert (await told(desk, waits, **other))["code"] == "reserved"
    await submitted(pupil)
    assert await desk.schedule() == 1
    desk.clock.advance(10 * 60)
    assert await desk.schedule() == 1, "no longer reserved"


async def test_a_reservation_for_nobody_is_refused(desk: Desk) -> None:
    await desk.agent()
    node = (await desk.get("/v1/nodes")).json()["items"][0]["id"]
    now = datetime.fromtimestamp(desk.clock.now() / 1e6, UTC)
    times = {"first": now.isoformat(), "last": (now + timedelta(hours=1)).isoformat()}
    answer = await desk.post("/v1/admin/reservations", {"nodes": [node], **times})
    assert answer.status_code == 400
