"""Explain, the policy, cordons and reservations, over the real routes and the real channel."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gpool.core.ids import decode
from gpool.core.model import GIB, Allocation, EndReason, Offer, Permission
from gpool.core.scheduler.state.operator_rules import NO_RULES
from gpool.server.actions import policy
from gpool.wire.frames import Finished, Grants, Lease, Refused, Started
from tests.core.specs.recorded_topologies import recorded
from tests.server.server_desk import Agent, Desk, an_offer, exited

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


def lending(cpus: int = 2, gpus: int = 0, **more: Any) -> Offer:
    return replace(an_offer(cpus, gpus), **more)


async def test_labels_and_prices_decide_where_a_task_may_go_and_are_explained(desk: Desk) -> None:
    plain = await desk.agent("plain", lending(4, 1, price_microcredits=400_000))
    fast = await desk.agent("fast", lending(2, labels=frozenset({"ssd"})))
    await desk.command(labels=["ssd"])
    assert await desk.schedule() == 1
    assert (len(plain.leases()), len(fast.leases())) == (0, 1)
    task = await desk.command(labels=["ssd", "zone=b"])
    assert await desk.schedule() == 0
    found = await told(desk, task)
    assert found["code"] == "no_label"
    assert found["sentence"] == "No node has the label zone=b; there are: ssd."
    assert [one["change"] for one in found["suggestions"]] == ["without --label zone=b"]
    bob = await desk.person("bob", Permission.CONSUMER)  # the owner's own tasks are free

    async def bobs(**members: Any) -> str:
        answer = await desk.post("/v1/tasks", {"command": ["true"], **members}, headers=bob)
        task: str = answer.json()["ids"][0]
        return task

    dear = await bobs(gpu="1", max_price="0.30/h")
    assert await desk.schedule() == 0
    found = await told(desk, dear)
    assert found["code"] == "over_price"
    assert found["suggestions"] == [
        {
            "kind": "price",
            "change": "--max-price 0.40/h",
            "sentence": "It starts now at 0.40/h.",
        }
    ]
    await bobs(gpu="1", max_price="0.40/h")
    assert await desk.schedule() == 1
    listed = (await desk.get("/v1/resources")).json()["items"]
    prices = {one["node_name"]: one["price_microcredits"] for one in listed if one["kind"] == "gpu"}
    assert prices == {"plain": 400_000}
    assert {tuple(one["labels"]) for one in listed} == {(), ("ssd",)}


@pytest.mark.parametrize(
    "wrong",
    [{"labels": frozenset({"Not A Label"})}, {"price_microcredits": -1}],
)
async def test_an_offer_with_labels_or_prices_that_cannot_be_is_refused(
    desk: Desk, wrong: dict[str, Any]
) -> None:
    agent = await desk.agent("liar", lending(**wrong))
    assert [frame.code for frame in agent.frames(Refused)] == ["invalid"]


async def test_disk_that_was_asked_for_is_set_aside_and_kept_in_mind(desk: Desk) -> None:
    await desk.agent(offer=lending(8))
    await desk.command(disk="60GiB")
    await desk.command(disk="60GiB")
    assert await desk.schedule() == 1
    before = desk.server.picture.state
    await desk.server.picture.rebuild(desk.server.now)
    assert desk.server.picture.state == before
    assert await desk.schedule() == 0


async def test_a_gang_is_told_what_it_lacks_and_what_to_leave_out(desk: Desk) -> None:
    at = {"site": "lab", "address": "127.0.0.1", "gang_port": 47100}
    await desk.agent("one", lending(**at))
    task = await desk.command(nodes=2, engine="torchrun", on_loss="end")
    found = await told(desk, task)
    assert found["code"] == "no_site"
    assert found["sentence"] == "No site has 2 nodes that could run it; the most in one is 1."
    assert [one["change"] for one in found["suggestions"]] == [
        "--nodes 1 without --engine and --on-loss"
    ]
    await desk.agent("two", lending(**at))
    assert (await told(desk, task))["code"] == "next"


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
    assert desk.server.picture.policy.current.order == "fcfs"
    first = await desk.command(priority=0)
    desk.clock.advance(1)
    await desk.command(priority=50)
    await desk.schedule()
    assert agent.leases()[-1].task == int_of(first)
    desk.server.picture.use_rules(NO_RULES, desk.server.now)
    assert desk.server.picture.policy.current.order == configured
    await policy.refresh(desk.server)
    assert desk.server.picture.policy.current.order == "fcfs"
    back = await desk.http.patch("/v1/admin/policy", json={"order": None})
    assert back.json()["order"] == configured
    noted = (await desk.get("/v1/audit")).json()["items"]
    assert [one["action"] for one in noted[:2]] == ["policy.change", "policy.change"]


async def test_weights_are_kept_until_they_are_taken_back(desk: Desk) -> None:
    me = (await desk.get("/v1/me")).json()["id"]
    given = await desk.http.patch("/v1/admin/policy", json={"weights": {me: 2.5}})
    assert given.json()["weights"] == {me: 2.5}
    assert desk.server.picture.policy.current.weights == {("user", decode("user", me)): 2500}
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


def granted(agent: Agent) -> Allocation:
    """The allocation of the last lease."""
    frames = [frame for frame in agent.sent if isinstance(frame, Grants)]
    return frames[-1].lines[-1].allocation


async def test_a_task_with_gpus_gets_and_is_told_its_share_of_the_node(desk: Desk) -> None:
    gpus = recorded("pcie-pairs").gpus
    agent = await desk.agent("big", Offer(192_000, 2048 * GIB, GIB, gpus))
    waiting = await desk.command(gpu=2)
    assert (await told(desk, waiting))["resources"] == [
        "CPUs: share of the node (2/8: 48)",
        "Memory: share of the node (2/8: 512 GiB)",
    ]
    assert await desk.schedule() == 1
    allocation = granted(agent)
    assert (allocation.cpu_milli, allocation.memory_bytes) == (48_000, 512 * GIB)
    assert (await told(desk, waiting))["resources"] == [
        "CPUs: share of the node (2/8: 48)",
        "Memory: share of the node (2/8: 512 GiB)",
        "GPUs: 0, 1 (same PCIe switch)",
    ]
    document = (await desk.get(f"/v1/tasks/{waiting}")).json()
    assert (document["granted_cpus"], document["shares"]) == (48.0, ["cpus", "memory"])
    assert (document["cpus"], document["memory_bytes"]) == (1.0, None)  # as older clients read them
    assert document["closeness"] == "same PCIe switch"
    own = (await desk.get(f"/v1/nodes/{document['node']}/tasks")).json()
    assert (own["running"][0]["cpus"], own["running"][0]["memory_bytes"]) == (48.0, 512 * GIB)


async def test_requested_cpus_and_memory_win_over_the_share(desk: Desk) -> None:
    agent = await desk.agent("big", Offer(192_000, 2048 * GIB, GIB, recorded("pcie-pairs").gpus))
    task = await desk.command(gpu=1, cpus=4, memory="8GiB")
    assert await desk.schedule() == 1
    allocation = granted(agent)
    assert (allocation.cpu_milli, allocation.memory_bytes) == (4000, 8 * GIB)
    assert (await told(desk, task))["resources"] == ["CPUs: 4", "Memory: 8 GiB", "GPUs: 0"]
    document = (await desk.get(f"/v1/tasks/{task}")).json()
    assert (document["shares"], document["closeness"]) == ([], None)


async def test_a_task_on_a_busy_node_is_told_why_it_has_less_than_its_share(desk: Desk) -> None:
    await desk.agent("big", Offer(16_000, 64 * GIB, GIB, recorded("pcie-pairs").gpus[:1]))
    await desk.command(cpus=12)
    await desk.schedule()
    task = await desk.command(gpu=1)
    assert await desk.schedule() == 1
    assert (await told(desk, task))["resources"] == [
        "CPUs: 4; its share of the node (1/1: 16) was not free",
        "Memory: 16 GiB; its share of the node (1/1: 64 GiB) was not free",
        "GPUs: 0",
    ]
