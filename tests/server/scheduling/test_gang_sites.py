"""A site is its owner's own, and an address one by which a machine can be reached."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpool.core.model import Permission
from gpool.server.settings import Settings
from gpool.transfer.node_proofs import NodeKey
from gpool.wire.frames import OfferChanged, Refused, Welcome
from tests.server.scheduling.gang_site import Site, lab_offer
from tests.server.server_desk import Desk, StoppedClock, open_desk

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "claim",
    [
        {"address": "internal.example"},
        {"address": "::1"},
        {"address": "255.255.255.255"},
        {"address": "224.0.0.1"},
        {"address": "169.254.169.254"},
        {"address": "0.0.0.0"},
        {"gang_port": 70_000},
        {"gang_port": 60_001},
        {"gang_port": 1023},
        {"gang_port": -1},
        {"site": "a\0b"},
        {"site": "7/lab"},
    ],
)
async def test_an_address_that_is_no_machines_is_refused(desk: Desk, claim: dict[str, Any]) -> None:
    agent = await desk.node("odd", replace(lab_offer(1), **claim))
    await agent.connect()
    assert isinstance(agent.sent[-1], Refused)
    plain = await desk.node("plain", lab_offer(1))
    await plain.connect()
    assert isinstance(plain.sent[-1], Welcome)
    await plain.channel.receive(OfferChanged(replace(lab_offer(1), **claim)))
    assert isinstance(plain.sent[-1], Refused)


@pytest.mark.parametrize(("host", "answer"), [("127.0.0.1", Welcome), ("0.0.0.0", Refused)])
async def test_loopback_is_an_address_only_where_the_pool_is_one_machine(
    data: Path, host: str, answer: type
) -> None:
    desk = await open_desk(data, StoppedClock(), host=host)
    agent = await desk.node("here", replace(lab_offer(1), address="127.0.0.1"))
    await agent.connect()
    assert isinstance(agent.sent[-1], answer)
    await desk.http.aclose()
    await desk.server.store.close()


async def strangers(desk: Desk) -> Site:
    """Two nodes of two owners, each of which says that it is in `lab`."""
    agents = {}
    for number, name in enumerate(("mine", "theirs"), 1):
        headers = {} if name == "mine" else await desk.person(name, Permission.PROVIDER)
        key = NodeKey(hashlib.sha256(name.encode()).digest())
        agents[name] = await desk.join(key, lab_offer(number), headers, name=name)
        await agents[name].connect()
    return Site(desk, agents)


async def test_a_strangers_node_is_never_in_my_site(desk: Desk) -> None:
    site = await strangers(desk)
    task = await site.submit()
    assert await desk.schedule() == 0
    await site.agents["theirs"].channel.receive(OfferChanged(lab_offer(9)))
    assert await desk.schedule() == 0
    page = (await desk.get("/v1/nodes")).json()["items"]
    assert {node["site"] for node in page} == {"lab"}
    mine = await desk.node("also-mine", lab_offer(3))
    await mine.connect()
    site.agents["also-mine"] = mine
    assert await desk.schedule() == 1
    names = {agent.credentials.name for agent in site.members(task)}
    assert names == {"mine", "also-mine"}


async def test_unless_the_operator_shares_the_site(data: Path) -> None:
    desk = await open_desk(data, StoppedClock(), shared_sites="lab, attic")
    site = await strangers(desk)
    task = await site.submit()
    assert await desk.schedule() == 1
    assert len(site.members(task)) == 2
    await desk.http.aclose()
    await desk.server.store.close()


def test_a_site_is_shared_by_a_plain_name(data: Path) -> None:
    with pytest.raises(ValueError, match="shared_sites"):
        Settings(data=data, shared_sites="7/lab")
