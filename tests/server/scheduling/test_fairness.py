"""Fair shares at the server: what was had outlives a rebuild and a restart, and is written little; guarantees by REST."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpool.core.model import Instant, Permission
from gpool.core.scheduler.order.fair_share import HALF_LIFE
from gpool.server.scheduling.loops import StoreUsage, changed
from gpool.server.store.operations import rules
from tests.server.server_desk import Desk, an_offer, exited, open_desk

pytestmark = pytest.mark.anyio
MINUTE = 60 * 1_000_000


async def worked(desk: Desk) -> None:
    """The operator has the only GPU for ten minutes while more of its tasks wait."""
    agent = await desk.agent(offer=an_offer(cpus=8, gpus=1))
    await desk.command(copies=600, gpu=1)
    assert await desk.schedule() == 1
    desk.clock.advance(600)
    await agent.report(exited(agent.leases()[0]))
    assert await desk.schedule() > 0


async def test_fair_share_is_the_order_unless_another_is_asked_for(desk: Desk) -> None:
    assert desk.server.picture.policy.current.order == "fair_share"


async def test_what_was_had_outlives_a_rebuild(desk: Desk) -> None:
    await worked(desk)
    picture = desk.server.picture
    before = picture.state.used(desk.server.now)
    assert before
    assert max(before.values()) > 100_000_000  # a tenth of the pool, on average
    await picture.rebuild(desk.server.now)
    assert picture.state.used(desk.server.now) == before


async def test_what_was_had_outlives_a_restart(desk: Desk, tmp_path: Path) -> None:
    await worked(desk)
    keeping = StoreUsage(desk.server)
    await keeping.run_once(desk.server.now)
    before = desk.server.picture.state.used(desk.server.now)
    twin = await open_desk(tmp_path / "data", desk.clock)
    try:
        after = twin.server.picture.state.used(desk.server.now)
        assert {key: after[key] for key in before} == pytest.approx(before, abs=100)
    finally:
        await twin.http.aclose()
        await twin.server.store.close()


async def test_what_the_store_knows_is_not_written_again(desk: Desk) -> None:
    await worked(desk)
    keeping = StoreUsage(desk.server)
    await keeping.run_once(desk.server.now)
    first = await desk.server.store.read(rules.usage())
    desk.clock.advance(5)
    await keeping.run_once(desk.server.now)
    assert await desk.server.store.read(rules.usage()) == first
    desk.clock.advance(120)
    await keeping.run_once(desk.server.now)
    assert await desk.server.store.read(rules.usage()) != first


def test_a_value_that_only_wears_off_is_never_written() -> None:
    start, half = Instant(10**15), Instant(10**15 + HALF_LIFE)
    written = {("user", 1): (10**8, start)}
    assert changed({("user", 1): 10**8 // 2}, written, half) == {}
    assert changed({("user", 1): 10**8}, written, half) == {("user", 1): 10**8}


async def test_a_guarantee_is_set_by_operators_and_kept_to(desk: Desk) -> None:
    ada = await desk.person("ada", Permission.CONSUMER)
    me = (await desk.bare.get("/v1/me", headers=ada)).json()["id"]
    told = {"quota": {"guaranteed_gpus": 1, "running_gpus": 2}}
    refused = await desk.bare.patch(f"/v1/users/{me}", json=told, headers=ada)
    assert refused.status_code == 403
    answer = await desk.http.patch(f"/v1/users/{me}", json=told)
    assert answer.json()["quota"]["guaranteed_gpus"] == 1
    agent = await desk.agent(offer=an_offer(cpus=8, gpus=1))
    await desk.command(copies=3, gpu=1, preemptible=True)
    assert await desk.schedule() == 1
    body = {"command": ["true"], "gpu": 1}
    assert (await desk.bare.post("/v1/tasks", json=body, headers=ada)).status_code == 202
    await desk.schedule()
    assert len(desk.server.picture.state.stoppable) == 1
    assert next(iter(desk.server.picture.state.stoppable.values())).stopping
    assert agent.sent


async def test_more_than_the_limit_is_never_guaranteed(desk: Desk) -> None:
    made = (await desk.post("/v1/teams", {"name": "lab"})).json()["id"]
    told = {"quota": {"guaranteed_gpus": 3, "running_gpus": 2}}
    answer = await desk.http.patch(f"/v1/teams/{made}", json=told)
    assert 400 <= answer.status_code < 500
    assert "cannot be guaranteed" in answer.json()["detail"]


async def test_operators_list_all_teams_and_others_only_their_own(desk: Desk) -> None:
    ada = await desk.person("ada", Permission.CONSUMER)
    await desk.bare.post("/v1/teams", json={"name": "lab"}, headers=ada)
    assert (await desk.get("/v1/teams")).json()["items"] == []
    found = (await desk.get("/v1/teams?all=true")).json()["items"]
    assert [one["name"] for one in found] == ["lab"]
    refused = await desk.bare.get("/v1/teams?all=true", headers=ada)
    assert refused.status_code == 403
