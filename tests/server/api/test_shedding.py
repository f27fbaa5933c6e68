"""Requests refused for overload: which, how, and how clients come back."""

from __future__ import annotations

import pytest

from gpool.server.alerts.loops import LagLoop
from gpool.server.api.routing import endpoints
from gpool.server.overload.admission import MANY, MOST_PRESSURE, LoadClass, LoadSample
from gpool.transfer.node_proofs import PROOF_HEADER
from gpool.transfer.requests import LEASE_HEADER
from tests.server.server_desk import FUNCTION, FUNCTION_SHA256, Desk, an_offer, returned

pytestmark = pytest.mark.anyio
TRUE = {"command": ["true"]}


def press(desk: Desk, pressure: float) -> None:
    """Overload the server by measures of its store, as its loop would report them, up to this pressure."""
    admission, now_s = desk.server.admission, 0.0
    while admission.pressure < pressure:
        now_s += 0.1
        for _ in range(MANY):
            admission.admit(LoadClass.VITAL, now_s)
        admission.tick(LoadSample(write_s=0.4), now_s)
    assert admission.pressure == pressure


async def statuses(desk: Desk, task: str) -> dict[str, int]:
    asked = {
        "listing": await desk.get("/v1/tasks"),
        "resources": await desk.get("/v1/resources"),
        "explain": await desk.get(f"/v1/tasks/{task}/explain"),
        "queue": await desk.get("/v1/queue"),
        "submit": await desk.post("/v1/tasks", TRUE),
        "upload": await desk.http.put(f"/v1/artifacts/{FUNCTION_SHA256}", content=FUNCTION),
        "status": await desk.get(f"/v1/tasks/{task}"),
        "me": await desk.get("/v1/me"),
        "health": await desk.bare.get("/healthz"),
        "metrics": await desk.get("/metrics"),
    }
    return {name: answer.status_code for name, answer in asked.items()}


ORDER = [{"listing", "resources"}, {"explain", "queue"}, {"submit", "upload"}, {"status", "me"}]


@pytest.mark.parametrize("pressure", range(5))
async def test_overload_refuses_listings_then_explanations_then_submissions_then_the_rest(
    desk: Desk, pressure: int
) -> None:
    task = await desk.command()
    press(desk, float(pressure))
    found = await statuses(desk, task)
    refused = {name for name, status in found.items() if status == 429}
    assert refused == set().union(*ORDER[:pressure])
    assert all(status < 300 for name, status in found.items() if name not in refused)


async def test_a_refusal_says_what_happens_and_when_to_come_back_and_is_counted(desk: Desk) -> None:
    press(desk, 2.0)
    refused = await desk.get("/v1/tasks")
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "2"
    assert refused.headers["x-request-id"]
    found = refused.json()
    assert found["code"] == "overloaded"
    assert found["detail"] == (
        "the server is overloaded: listings are refused for now; try again in 2 seconds"
    )
    page = (await desk.get("/metrics")).text
    assert 'gpool_requests_shed_total{class="listing"} 1.0' in page
    assert 'gpool_requests_shed_total{class="submission"} 0.0' in page


async def test_heartbeats_and_reports_are_taken_at_any_pressure(desk: Desk) -> None:
    agent = await desk.agent(offer=an_offer(cpus=2))
    task = await desk.command()
    await desk.schedule()
    [lease] = agent.leases()
    press(desk, MOST_PRESSURE)
    await agent.send_beat()
    await agent.report(returned(lease))
    desk.server.admission.pressure = 0.0
    assert (await desk.get(f"/v1/tasks/{task}")).json()["status"] == "succeeded"


async def test_an_agents_transfer_is_not_refused_and_its_headers_alone_give_no_access(
    desk: Desk,
) -> None:
    press(desk, MOST_PRESSURE)
    path = f"/v1/artifacts/{FUNCTION_SHA256}"
    forged = {PROOF_HEADER: "x", LEASE_HEADER: "t-0000000000007:1", "authorization": "Bearer x"}
    assert (await desk.bare.put(path, content=FUNCTION, headers=forged)).status_code == 401
    assert (await desk.http.put(path, content=FUNCTION)).status_code == 429


async def test_a_request_is_active_until_its_answer_begins(desk: Desk) -> None:
    admission = desk.server.admission
    for path in ("/v1/tasks", "/v1/me", "/no/such/route", "/v1/tasks/t-0000000000007"):
        await desk.get(path)
    await desk.post("/v1/tasks", TRUE)
    await desk.post("/v1/tasks", {"command": 7})
    assert admission.active == 0
    admission.active = 10_000
    assert (await desk.get("/v1/me")).status_code == 429
    admission.active = 0


async def test_the_loop_measures_the_delays_of_the_store(desk: Desk) -> None:
    loop, store = LagLoop(desk.server), desk.server.metrics.signals.store
    await loop.run_once(desk.server.now)
    store.begun_writes["a write of long ago"] = 0.0
    desk.server.admission.active = MANY
    await loop.run_once(desk.server.now)
    assert desk.server.admission.pressure > 0
    desk.server.admission.active = 0
    store.begun_writes.clear()
    readers = desk.server.settings.store_readers
    store.begun_reads.update(dict.fromkeys(range(readers), 0.0))
    assert store.read_wait_s(readers) == 0.0  # each of them has a reader
    store.begun_reads["one more"] = 0.0
    assert store.read_wait_s(readers) > 1.0


def test_every_route_has_a_class_and_only_a_few_are_vital() -> None:
    vital = {each.name for each in endpoints() if each.load is LoadClass.VITAL}
    assert vital == {
        "agent_channel",
        "get_health",
        "get_readiness",
        "get_metrics",
        "list_alerts",
        "list_replicas",
    }
    pages = [each for each in endpoints() if each.name.startswith("list_")]
    assert {each.load for each in pages} == {LoadClass.LISTING, LoadClass.VITAL}
