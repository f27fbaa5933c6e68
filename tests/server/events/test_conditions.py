"""Conditions on a real server: begin and end of lost nodes, sick GPUs, alerts, budgets and low balances, once each."""

from __future__ import annotations

from typing import Any

import pytest

from gpool.server.alerts.evaluation import ActiveAlert
from gpool.server.alerts.rules import RULES
from tests.server.events.events_desk import Post, types
from tests.server.identity_routes.people_desk import registered
from tests.server.server_desk import Desk, an_offer
from tests.tools.ledger_charges import set_aside

pytestmark = pytest.mark.anyio


async def newest(desk: Desk, query: str = "") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await desk.get(f"/v1/events{query}")).json()["items"]
    return found


async def test_a_node_that_loses_contact_and_comes_back_is_two_events(desk: Desk) -> None:
    await types(desk)
    await types(desk, "?pool=true")
    agent, post = await desk.agent(), Post(desk)
    await agent.send_beat()
    await post.watch()
    desk.clock.advance(300)
    for _ in range(3):
        await post.watch()
    await agent.again().connect()
    await agent.send_beat()
    for _ in range(2):
        await post.watch()
    for query in ("", "?pool=true"):
        found = await newest(desk, query)
        assert [each["type"] for each in found] == ["node.lost", "node.back"]
        assert found[0]["data"]["name"] == "bench"


async def test_a_node_that_is_removed_while_it_is_lost_is_not_back(desk: Desk) -> None:
    await types(desk)
    agent, post = await desk.agent(), Post(desk)
    await agent.send_beat()
    desk.clock.advance(300)
    await post.watch()
    node = agent.badge.identity.node
    assert (await desk.http.delete(f"/v1/nodes/{node}?force=true")).status_code == 204
    await post.watch()
    assert await types(desk) == ["node.lost"]


async def test_a_node_that_was_lost_for_long_before_somebody_subscribes_is_no_event(
    desk: Desk,
) -> None:
    agent, post = await desk.agent(), Post(desk)
    await agent.send_beat()
    desk.clock.advance(7200)
    await types(desk)
    await post.watch()
    assert await types(desk) == []


async def test_a_gpu_in_quarantine_is_an_event_of_its_owner(desk: Desk) -> None:
    await types(desk)
    await desk.agent(offer=an_offer(gpus=1))
    post = Post(desk)
    [gpu] = [
        each for each in (await desk.get("/v1/resources")).json()["items"] if each["kind"] == "gpu"
    ]
    path = f"/v1/resources/{gpu['id']}"
    assert (await desk.http.patch(path, json={"quarantined": "it smells"})).status_code == 200
    await post.watch()
    assert (await desk.http.patch(path, json={"quarantined": None})).status_code == 200
    await post.watch()
    sick, well = await newest(desk)
    assert (sick["type"], sick["data"]["gpu"], sick["data"]["why"]) == (
        "gpu.unhealthy",
        gpu["id"],
        "it smells",
    )
    assert (well["type"], well["data"]["why"]) == ("gpu.healthy", "")


async def test_an_alert_that_fires_and_ends_goes_to_operators(desk: Desk) -> None:
    await types(desk, "?pool=true")
    post, alerts = Post(desk), desk.server.monitor.alerts
    alerts.active = (ActiveAlert(RULES[0], (("reason", "x"),), 0.0, 1.0, True),)
    await post.watch()
    await post.watch()
    alerts.active = ()
    await post.watch()
    firing, resolved = await newest(desk, "?pool=true")
    assert (firing["type"], resolved["type"]) == ("alert.firing", "alert.resolved")
    assert firing["data"]["alert"] == RULES[0].name
    assert firing["data"]["labels"] == {"reason": "x"}
    assert firing["account"] is None
    assert await types(desk) == []


async def test_budget_and_balance_are_reported_once(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    assert await types(desk, "", ada.headers) == []
    post = Post(desk)
    await ada.ask("PUT", "/v1/budget", {"cap_microcredits": 1_000_000})
    await post.watch()
    assert await types(desk, "", ada.headers) == []
    await set_aside(desk.server, ada.id, 850_000, for_s=3600)
    for _ in range(2):
        await post.watch()
    assert await types(desk, "", ada.headers) == ["budget.warning", "balance.low"]
    await ada.ask("PUT", "/v1/budget", {"cap_microcredits": 850_000})
    for _ in range(2):
        await post.watch()
    found = (await ada.ask("GET", "/v1/events")).json()["items"]
    assert [each["type"] for each in found][2:] == ["budget.reached"]
    spent = found[2]["data"]
    assert (spent["spent_microcredits"], spent["cap_microcredits"]) == (850_000, 850_000)
