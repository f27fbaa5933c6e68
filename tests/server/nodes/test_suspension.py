"""Suspended owners and removed nodes: nothing of theirs connects, holds a lease or gets one."""

from __future__ import annotations

import hashlib

import pytest

from gpool.core.errors import Forbidden
from gpool.core.ids import encode
from gpool.core.model import Permission
from gpool.server.store.operations.identity import accounts
from gpool.server.store.operations.leases import leases
from gpool.transfer.node_proofs import NodeKey
from gpool.wire.frames import Hold, Refused, Released, Started, Welcome
from tests.server.scheduling.gang_site import Site, lab_offer
from tests.server.server_desk import Agent, Desk, an_offer

pytestmark = pytest.mark.anyio


async def lender(desk: Desk, name: str = "mallory") -> tuple[Agent, dict[str, str]]:
    headers = await desk.person(name, Permission.PROVIDER, Permission.CONSUMER)
    key = NodeKey(hashlib.sha256(name.encode()).digest())
    agent = await desk.join(key, an_offer(), headers, name=f"{name}s")
    await agent.connect()
    return agent, headers


async def with_task(desk: Desk) -> tuple[Agent, str, dict[str, str]]:
    agent, headers = await lender(desk)
    task = await desk.command()
    assert await desk.schedule() == 1
    [lease] = agent.leases()
    await agent.report(Started(lease.task, lease.epoch))
    return agent, task, headers


async def change(desk: Desk, agent: Agent, **patch: object) -> None:
    owner = encode("user", agent.credentials.owner)
    answer = await desk.http.patch(f"/v1/users/{owner}", json=patch)
    assert answer.status_code == 200, answer.text


async def status_of(desk: Desk, task: str) -> str:
    return str((await desk.get(f"/v1/tasks/{task}")).json()["status"])


SUSPENSIONS: dict[str, dict[str, object]] = {
    "disabled": {"disabled": True},
    "without the permission": {"permissions": ["consumer"]},
}


@pytest.mark.parametrize("patch", SUSPENSIONS)
async def test_suspending_an_owner_ends_the_leases_of_its_nodes_at_once(
    desk: Desk, patch: str
) -> None:
    agent, task, _ = await with_task(desk)
    await change(desk, agent, **SUSPENSIONS[patch])
    assert isinstance(agent.sent[-1], Refused)
    assert not agent.sent[-1].retry
    assert await status_of(desk, task) == "queued"
    assert not desk.server.picture.state.held
    assert await desk.schedule() == 0
    honest = await desk.agent("honest")
    assert await desk.schedule() == 1
    assert len(honest.leases()) == 1


@pytest.mark.parametrize("patch", SUSPENSIONS)
async def test_a_node_of_a_suspended_owner_cannot_connect(desk: Desk, patch: str) -> None:
    agent, _, _ = await with_task(desk)
    await change(desk, agent, **SUSPENSIONS[patch])
    with pytest.raises(Forbidden, match="lacks the permission"):
        await desk.server.gate.node(agent.credentials.node)
    again = agent.again()  # its handshake was under way when the owner was suspended
    await again.connect(Hold(agent.leases()[0].task, 1))
    assert isinstance(again.sent[-1], Refused)
    assert not again.frames(Welcome)
    assert await desk.schedule() == 0
    answer = await desk.http_of(agent).post("/v1/nodes", json={"name": "mallorys"})
    assert answer.status_code == 403


async def test_the_node_of_an_owner_in_good_standing_connects(desk: Desk) -> None:
    """Control: the same node is accepted before the suspension and after its end."""
    agent, _, _ = await with_task(desk)
    again = agent.again()
    await again.connect()
    assert again.frames(Welcome)
    await change(desk, agent, disabled=True)
    await change(desk, agent, disabled=False)
    assert await desk.server.gate.node(agent.credentials.node) is not None
    later = again.again()
    await later.connect()
    assert later.frames(Welcome)


async def test_a_plan_made_before_the_suspension_grants_nothing(desk: Desk) -> None:
    agent, _ = await lender(desk)
    await desk.command()
    server = desk.server
    await server.store.write(accounts.set_disabled(agent.credentials.owner, True, server.now))
    assert await desk.schedule() == 0, "the picture still has the node as connected"
    assert agent.leases() == []


async def test_an_invite_of_a_suspended_owner_is_refused(desk: Desk) -> None:
    agent, headers = await lender(desk)
    invite = (await desk.post("/v1/nodes/invites", {}, headers=headers)).json()["token"]
    await change(desk, agent, disabled=True)
    with pytest.raises(AssertionError, match="may not lend"):
        await desk.join(NodeKey(b"\1" * 32), an_offer(), {}, name="more", token=invite)


# ---- removal


@pytest.mark.parametrize("as_owner", [True, False])
async def test_a_node_that_holds_a_lease_is_removed_by_force(desk: Desk, as_owner: bool) -> None:
    agent, task, headers = await with_task(desk)
    await desk.http.delete(f"/v1/tasks/{task}")  # which the node does not release
    other = await desk.command()
    assert await desk.schedule() == 1
    path = f"/v1/nodes/{agent.badge.identity.node}"
    who = headers if as_owner else {}
    refused = await desk.http.delete(path, headers=who)
    assert (refused.status_code, "force" in refused.json()["detail"]) == (409, True)
    assert (await desk.http.delete(f"{path}?force=true", headers=who)).status_code == 204
    assert agent.channel.closed
    assert await status_of(desk, other) == "queued"
    assert await status_of(desk, task) == "cancelled"
    assert not desk.server.picture.state.held
    assert (await desk.get(path)).status_code == 404
    assert await desk.server.gate.node(agent.credentials.node) is None
    await desk.agent("honest")
    assert await desk.schedule() == 1


async def test_nobody_else_removes_a_node_by_force(desk: Desk) -> None:
    agent, task, _ = await with_task(desk)
    other = await desk.person("other", Permission.PROVIDER, Permission.CONSUMER)
    path = f"/v1/nodes/{agent.badge.identity.node}?force=true"
    assert (await desk.http.delete(path, headers=other)).status_code in (403, 404)
    assert await status_of(desk, task) == "running"


async def test_a_member_of_a_gang_is_removed_by_force(desk: Desk) -> None:
    agents = {name: await desk.node(name, lab_offer(number)) for number, name in enumerate("ab", 1)}
    for agent in agents.values():
        await agent.connect()
    site = Site(desk, agents)
    task = await site.running()
    first, second = site.members(task)
    node = second.badge.identity.node
    assert (await desk.http.delete(f"/v1/nodes/{node}?force=true")).status_code == 204
    await first.report(Released(task, 1))
    assert (await site.words(task))[0] == "queued"
    assert not desk.server.picture.state.held


# ---- a second scheduler on the same store


async def test_an_expiry_of_an_earlier_term_is_not_applied(desk: Desk) -> None:
    agent, task, _ = await with_task(desk)
    server = desk.server
    term, heard_at = server.picture.term, server.nodes.heard_at[agent.credentials.node]
    await server.store.write(leases.take_term(server.now))
    expiry = leases.expire_silent(agent.credentials.node, heard_at, term, server.now)
    assert await server.store.write(expiry) is leases.NotExpired.DEPOSED
    assert await status_of(desk, task) == "running"


async def test_an_expiry_is_not_applied_to_a_node_that_another_server_hears(desk: Desk) -> None:
    agent, task, _ = await with_task(desk)
    server, node = desk.server, agent.credentials.node
    heard_at = server.nodes.heard_at[node]
    desk.clock.advance(20)
    await server.store.write(leases.record_heartbeats([(node, (), server.now)]))
    expiry = leases.expire_silent(node, heard_at, server.picture.term, server.now)
    assert await server.store.write(expiry) is leases.NotExpired.HEARD
    assert await status_of(desk, task) == "running"
    unfenced = await server.store.write(leases.expire(node, server.now))
    assert unfenced.requeued, "control: without the fence the lease is gone"
