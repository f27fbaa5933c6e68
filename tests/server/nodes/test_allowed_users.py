"""Whose tasks an owner takes: names in an offer are people and teams of this server, now and after a restart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpool.core.model import Offer, Permission
from gpool.wire.frames import OfferChanged, Refused
from tests.server.server_desk import Desk, StoppedClock, an_offer, open_desk

pytestmark = pytest.mark.anyio


def for_(*names: str) -> Offer:
    return replace(an_offer(), audience=names)


async def submitted(desk: Desk, who: dict[str, str], **members: object) -> str:
    answer = await desk.post("/v1/tasks", {"command": ["true"], **members}, headers=who)
    assert answer.status_code == 202, answer.text
    task: str = answer.json()["ids"][0]
    return task


async def test_only_those_an_owner_named_run_there(desk: Desk) -> None:
    ada = await desk.person("ada", Permission.CONSUMER)
    bob = await desk.person("bob", Permission.CONSUMER)
    agent = await desk.agent(offer=for_("me", "user:ada"))
    theirs, refused = await submitted(desk, ada), await submitted(desk, bob)
    own = await desk.command()
    assert await desk.schedule() == 2
    assert len(agent.leases()) == 2
    said = (await desk.get(f"/v1/tasks/{refused}/explain")).json()["sentence"]
    assert "take only the tasks of people they named" in said
    for task in (theirs, own):
        assert (await desk.get(f"/v1/tasks/{task}")).json()["status"] == "leased"


async def test_a_teams_tasks_run_there_and_its_members_own_do_not(desk: Desk) -> None:
    ada = await desk.person("ada", Permission.CONSUMER)
    team = (await desk.post("/v1/teams", {"name": "lab"}, headers=ada)).json()["id"]
    await desk.agent(offer=for_("team:lab"))
    await submitted(desk, ada)
    ours = await submitted(desk, ada, team=team)
    assert await desk.schedule() == 1
    assert (await desk.get(f"/v1/tasks/{ours}")).json()["status"] == "leased"


async def test_names_nobody_has_let_nobody_in_and_are_told_the_owner(desk: Desk) -> None:
    ada = await desk.person("ada", Permission.CONSUMER)
    agent = await desk.agent(offer=for_("user:nobody", "team:none", "everybody"))
    await submitted(desk, ada)
    assert await desk.schedule() == 0
    [mine] = (await desk.get("/v1/nodes")).json()["items"]
    assert mine["audience"] == ["user:nobody", "team:none", "everybody"]
    assert [problem.split()[-1] for problem in mine["problems"]] == ["here", "here", "team:NAME"]
    assert "user:nobody" in mine["problems"][0]
    [shown] = (await desk.get("/v1/nodes", headers=ada)).json()["items"]
    assert (shown["audience"], shown["problems"]) == (None, [])
    await desk.person("nobody", Permission.CONSUMER)
    anew = agent.again()
    await anew.connect()
    [mine] = (await desk.get("/v1/nodes")).json()["items"]
    assert len(mine["problems"]) == 2


async def test_an_offer_that_changes_changes_whose_tasks_are_taken(desk: Desk) -> None:
    ada = await desk.person("ada", Permission.CONSUMER)
    agent = await desk.agent(offer=for_("me"))
    await submitted(desk, ada)
    assert await desk.schedule() == 0
    await agent.channel.receive(OfferChanged(an_offer()))
    assert await desk.schedule() == 1


async def test_an_audience_outlives_a_restart(desk: Desk) -> None:
    ada = await desk.person("ada", Permission.CONSUMER)
    bob = await desk.person("bob", Permission.CONSUMER)
    await desk.agent(offer=for_("user:ada"))
    second = await open_desk(desk.server.settings.data, StoppedClock())
    await second.server.picture.rebuild(second.server.now)
    [entry] = second.server.picture.state.nodes.values()
    assert entry.node is not None
    assert entry.node.audience is not None
    me = (await desk.get("/v1/me", headers=ada)).json()["name"]
    assert (me, len(entry.node.audience.users)) == ("ada", 1)
    assert bob != ada
    await second.server.store.close()


async def test_a_node_says_what_it_lends_and_why_it_is_closed(desk: Desk) -> None:
    offer = replace(
        an_offer(),
        environments=frozenset({"default", "pip:" + "0" * 64}),
        builds=frozenset({"pip"}),
        closed="on battery",
    )
    await desk.agent(offer=offer)
    [node] = (await desk.get("/v1/nodes")).json()["items"]
    assert node["networks"] == ["none"]
    assert (node["builds"], node["closed"], node["audience"]) == (["pip"], "on battery", [])
    assert node["environments"] == ["default", "pip:" + "0" * 64]
    assert (await desk.get(f"/v1/nodes/{node['id']}")).json() == node
    [resource] = (await desk.get("/v1/resources")).json()["items"]
    assert (resource["status"], resource["available"]) == ("paused", True)


@pytest.mark.parametrize(
    "offer",
    [
        for_("user:" + "x" * 400),
        replace(an_offer(), closed="x" * 400),
        replace(an_offer(), builds=frozenset({"p\0p"})),
        for_(*(f"user:{number}" for number in range(2000))),
    ],
    ids=["a long name", "a long reason", "a NUL", "many names"],
)
async def test_an_offer_with_words_beyond_bounds_is_refused(desk: Desk, offer: Offer) -> None:
    agent = await desk.agent(offer=offer)
    assert isinstance(agent.sent[-1], Refused)
