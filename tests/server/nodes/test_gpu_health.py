"""Quarantine, rules of single GPUs and telemetry, over the real routes and the real channel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import Gpu, GpuDetails, Health, Instant, Offer, Permission
from gpool.server.nodes.telemetry import KEPT, Telemetry
from gpool.wire.frames import (
    Beat,
    GpuReading,
    Hold,
    OfferChanged,
    Refused,
    Started,
    Stop,
    StopReason,
    TaskReading,
)
from tests.server.server_desk import Agent, Desk, an_offer

pytestmark = pytest.mark.anyio
DETAILS = GpuDetails(
    "nvml", "580.95.05", "9.0", "0000:19:00.0", "gen5 x16", 700_000, 1980, ((1, 18),)
)


def offering(**changes: Any) -> Offer:
    first = replace(Gpu(0, "GPU-a", "H200", "nvidia", 140 << 30, details=DETAILS), **changes)
    return replace(an_offer(4), gpus=(first, Gpu(1, "GPU-b", "H200", "nvidia", 140 << 30)))


async def tell(agent: Agent, **changes: Any) -> None:
    await agent.channel.receive(OfferChanged(offering(**changes)))


async def gpus(desk: Desk) -> list[dict[str, Any]]:
    items = (await desk.get("/v1/resources")).json()["items"]
    return [one for one in items if one["kind"] == "gpu"]


async def patch(desk: Desk, gpu: str, **wanted: Any) -> Any:
    return await desk.http.patch(f"/v1/resources/{gpu}", json=wanted)


async def test_a_sick_gpu_takes_nothing_until_it_is_well_and_somebody_says_so(desk: Desk) -> None:
    agent = await desk.agent(offer=offering())
    await tell(agent, health=Health.QUARANTINED, ails="XID 79", closed="in quarantine: XID 79")
    first, second = await gpus(desk)
    assert (first["status"], first["quarantined"], second["status"]) == (
        "quarantined",
        "XID 79",
        "free",
    )
    await desk.command(gpu="H200:2")
    assert await desk.schedule() == 0
    refused = await patch(desk, first["id"], quarantined=None)
    assert refused.status_code == 409
    assert "XID 79" in refused.json()["detail"]
    await tell(agent)
    assert (await gpus(desk))[0]["status"] == "quarantined"
    assert await desk.schedule() == 0
    cleared = await patch(desk, first["id"], quarantined=None)
    assert cleared.json()["status"] == "free"
    assert await desk.schedule() == 1


async def test_the_owner_is_told_of_a_sick_gpu_and_strangers_are_not(desk: Desk) -> None:
    agent = await desk.agent(offer=offering())
    await tell(agent, health=Health.DEGRADED, ails="it is slowed down by heat")
    [node] = (await desk.get("/v1/nodes")).json()["items"]
    assert node["problems"] == ["gpu0 (H200) is degraded: it is slowed down by heat"]
    assert (await gpus(desk))[0]["status"] == "free"
    await tell(agent, health=Health.QUARANTINED, ails="XID 79")
    [node] = (await desk.get("/v1/nodes")).json()["items"]
    assert "gpool node resume gpu0" in node["problems"][0]
    stranger = await desk.person("stranger", Permission.CONSUMER)
    [node] = (await desk.get("/v1/nodes", headers=stranger)).json()["items"]
    assert node["problems"] == []


async def test_an_operator_can_quarantine_by_hand_and_what_runs_there_moves(desk: Desk) -> None:
    agent = await desk.agent(offer=offering())
    await desk.command(gpu="H200")
    await desk.schedule()
    [lease] = agent.leases()
    index = agent.sent[-1].lines[0].allocation.slices[0].gpu_index  # type: ignore[union-attr]
    await agent.report(Started(lease.task, lease.epoch))
    used = (await gpus(desk))[index]["id"]
    done = await patch(desk, used, quarantined="it smells of smoke")
    assert done.json()["quarantined"] == "it smells of smoke"
    holds = (Hold(lease.task, lease.epoch),)
    kinds = (StopReason.RECLAIMED, StopReason.PREEMPTED)
    assert agent.frames(Stop) == [Stop(holds, kind) for kind in kinds]


async def test_a_closed_gpu_takes_nothing_and_the_task_is_told_why(desk: Desk) -> None:
    agent = await desk.agent(offer=replace(offering(), gpus=offering().gpus[:1]))
    rest = replace(offering(closed="its owner is using the machine"))
    await agent.channel.receive(OfferChanged(replace(rest, gpus=rest.gpus[:1])))
    task = await desk.command(gpu="H200")
    assert await desk.schedule() == 0
    told = (await desk.get(f"/v1/tasks/{task}/explain")).json()
    assert "its owner is using the machine" in told["sentence"]
    assert (await gpus(desk))[0]["status"] == "paused"
    assert (await gpus(desk))[0]["closed"] == "its owner is using the machine"


async def test_of_two_equal_nodes_the_one_whose_gpu_is_closed_is_passed_over(desk: Desk) -> None:
    def one(uuid: str, closed: str = "") -> Offer:
        return replace(
            an_offer(4), gpus=(Gpu(0, uuid, "H200", "nvidia", 140 << 30, closed=closed),)
        )

    first = await desk.agent("first", one("GPU-a"))
    second = await desk.agent("second", one("GPU-b"))
    await first.channel.receive(OfferChanged(one("GPU-a", "its owner wants it")))
    for _ in range(2):
        await desk.command(gpu="H200")
    assert await desk.schedule() == 1
    assert (len(first.leases()), len(second.leases())) == (0, 1)
    await first.channel.receive(OfferChanged(one("GPU-a")))
    assert await desk.schedule() == 1
    assert len(first.leases()) == 1


async def test_an_owner_takes_one_gpu_back_at_once(desk: Desk) -> None:
    agent = await desk.agent(offer=offering())
    await desk.command(gpu="H200:2")
    await desk.schedule()
    [lease] = agent.leases()
    await agent.report(Started(lease.task, lease.epoch))
    first = (await gpus(desk))[0]["id"]
    assert (await patch(desk, first, available=False)).status_code == 200
    assert agent.frames(Stop) == []
    await patch(desk, first, available=False, reclaim=True)
    stops = [stop.reason for stop in agent.frames(Stop)]
    assert stops == [StopReason.RECLAIMED, StopReason.PREEMPTED]


async def test_a_gpu_is_shown_with_its_details(desk: Desk) -> None:
    await desk.agent(offer=offering())
    told = (await gpus(desk))[0]["details"]
    assert (told["driver"], told["pcie"], told["power_limit_watts"]) == (
        "580.95.05",
        "gen5 x16",
        700.0,
    )
    assert told["links"] == {"1": 18}


async def test_an_offer_with_endless_details_is_refused(desk: Desk) -> None:
    agent = await desk.agent(offer=offering())
    await tell(agent, details=replace(DETAILS, driver="x" * 1000))
    assert isinstance(agent.sent[-1], Refused)


async def test_readings_of_a_beat_are_shown_kept_and_exported(desk: Desk) -> None:
    agent = await desk.agent(offer=offering())
    task = await desk.command(gpu="H200:2")
    await desk.schedule()
    [lease] = agent.leases()
    hold = Hold(lease.task, lease.epoch)
    for number in range(2, 5):
        desk.clock.advance(8)
        readings = (GpuReading(0, 90 + number, 7 << 30, 650_000, 70), GpuReading(1, 10))
        own = (TaskReading(lease.task, lease.epoch, 50, 8 << 30, 700_000, 70),)
        await agent.channel.receive(Beat(number, (hold,), readings, own))
    first, second = await gpus(desk)
    assert first["reading"]["utilisation_percent"] == 94
    assert first["reading"]["power_watts"] == 650.0
    assert second["reading"]["temperature_celsius"] is None
    history = (await desk.get(f"/v1/resources/{first['id']}/telemetry")).json()
    assert [one["utilisation_percent"] for one in history["readings"]] == [92, 93, 94]
    own_history = (await desk.get(f"/v1/tasks/{task}/telemetry")).json()
    assert [one["memory_used_bytes"] for one in own_history["readings"]] == [8 << 30] * 3
    page = desk.server.metrics.page().decode()
    assert 'gpool_gpu_utilisation_ratio{gpu="0",model="H200"' in page
    assert "gpool_gpu_power_watts" in page
    assert "gpool_gpu_health" in page
    desk.clock.advance(120)
    assert (await gpus(desk))[0]["reading"] is None


async def test_a_node_cannot_tell_of_what_is_not_its_own(desk: Desk) -> None:
    agent = await desk.agent(offer=offering())
    lies = (GpuReading(7, 50), GpuReading(0, 1000), GpuReading(1, -5))
    other = (TaskReading(12345, 1, 50),)
    await agent.channel.receive(Beat(2, (), lies, other))
    assert [one["reading"] for one in await gpus(desk)] == [None, None]
    assert desk.server.telemetry.task(TaskId(12345)) == ()


@given(st.lists(st.integers(0, 100), max_size=300))
def test_a_ring_always_holds_the_last_readings_and_never_more(told: list[int]) -> None:
    telemetry = Telemetry()
    for at, percent in enumerate(told):
        telemetry.add(NodeId(1), {0}, (), (GpuReading(0, percent),), (), Instant(at))
    kept = [point.utilisation_percent for point in telemetry.gpu(NodeId(1), 0)]
    assert kept == told[-KEPT:]


async def test_a_quarantine_survives_a_new_hello(desk: Desk) -> None:
    agent = await desk.agent(offer=offering())
    await tell(agent, health=Health.QUARANTINED, ails="XID 79")
    again = agent.again()
    await again.connect()
    assert (await gpus(desk))[0]["quarantined"] == "XID 79"


async def test_a_stranger_waits_beside_an_untested_gpu_and_its_owner_gets_it(desk: Desk) -> None:
    offer = offering(vendor="amd", model="MI210", untested=True)
    await desk.agent(offer=replace(offer, gpus=offer.gpus[:1]))
    assert [one["untested"] for one in await gpus(desk)] == [True]
    stranger = await desk.person("stranger", Permission.CONSUMER)
    body = {"command": ["true"], "gpu": "MI210"}
    made = await desk.post("/v1/tasks", body, headers=stranger)
    assert await desk.schedule() == 0
    told = await desk.get(f"/v1/tasks/{made.json()['ids'][0]}/explain", headers=stranger)
    assert told.json()["code"] == "untested"
    await desk.command(gpu="MI210")
    assert await desk.schedule() == 1
