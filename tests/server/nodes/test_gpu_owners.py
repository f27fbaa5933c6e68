"""A GPU is bound to its first owner and that owner's payout wallet; later claims flag the claimant's row only."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from gpool.core.ids import UserId, decode, encode
from gpool.core.model import SECOND, Gpu, Offer, Permission
from gpool.server.identity import authorization
from gpool.server.store.operations import gpus as gpu_bindings
from gpool.server.store.operations.identity import accounts, users
from gpool.server.store.operations.nodes import KEPT_AFTER
from gpool.transfer.node_proofs import NodeKey
from gpool.wire.frames import OfferChanged
from tests.server.identity_routes.people_desk import PASSWORD, registered
from tests.server.server_desk import Agent, Desk, an_offer
from tests.tools.nodes import a_key

pytestmark = pytest.mark.anyio
UUID = "GPU-5f1c9b1e-0000-4000-8000-000000000001"
WALLET = "0x" + "ab" * 20


def offering(*uuids: str, simulated: bool = False) -> Offer:
    gpus = tuple(
        Gpu(index, uuid, "A100", "nvidia", 80 << 30, simulated) for index, uuid in enumerate(uuids)
    )
    return replace(an_offer(), gpus=gpus)


async def owned(desk: Desk, owner: str, offer: Offer) -> Agent:
    """A connected node of somebody else's."""
    headers = await desk.person(owner, Permission.PROVIDER, Permission.CONSUMER)
    key = NodeKey(hashlib.sha256(owner.encode()).digest())
    agent = await desk.join(key, offer, headers, name=f"{owner}s")
    await agent.connect()
    return agent


async def flags(desk: Desk) -> dict[str, str | None]:
    items = (await desk.get("/v1/resources")).json()["items"]
    return {each["node_name"]: each["flagged"] for each in items if each["kind"] == "gpu"}


async def explained(desk: Desk, task: str) -> str:
    answer = (await desk.get(f"/v1/tasks/{task}/explain")).json()
    return str(answer)


async def test_a_gpu_is_bound_to_its_owner_and_their_payout_wallet(desk: Desk) -> None:
    operator = await desk.server.store.read(users.user_by_name("operator"))
    assert operator is not None
    await desk.server.store.write(accounts.link_wallet(operator.id, WALLET, desk.clock.now()))
    await desk.agent(offer=offering(UUID))
    bound = await desk.server.store.read(gpu_bindings.binding(UUID))
    assert bound is not None
    assert (bound.owner, bound.wallet) == (operator.id, WALLET)


async def test_a_claim_flags_the_claimant_and_leaves_the_holder_usable(desk: Desk) -> None:
    first = await desk.agent("first", offering(UUID, "GPU-mine"))
    thief = await owned(desk, "thief", offering(UUID, "GPU-mine"))
    pages = (await desk.get("/v1/nodes")).json()["items"]
    told = {node["name"]: [gpu["flagged"] for gpu in node["gpus"]] for node in pages}
    assert told["first"] == [None, None]
    assert all("another owner" in str(why) for why in told["thiefs"])
    task = await desk.command(gpu="A100:2")
    await desk.schedule()
    assert (await desk.get(f"/v1/tasks/{task}")).json()["status"] == "leased"
    assert (len(first.leases()), len(thief.leases())) == (1, 0)


async def test_a_task_that_only_flagged_gpus_would_suit_is_told_so(desk: Desk) -> None:
    first = await desk.agent("first", offering(UUID))
    await owned(desk, "thief", offering(UUID))
    await first.channel.receive(OfferChanged(offering()))
    task = await desk.command(gpu="A100")
    await desk.schedule()
    assert "bound to another owner" in await explained(desk, task)


async def test_an_operator_settles_whose_it_is_and_nobody_else_does(desk: Desk) -> None:
    first = await desk.agent("first", offering(UUID))
    thief = await owned(desk, "thief", offering(UUID))
    items = (await desk.get("/v1/resources")).json()["items"]
    mine, claimed = (
        next(each["id"] for each in items if each["node_name"] == name and each["uuid"])
        for name in ("first", "thiefs")
    )
    other = await desk.person("other", Permission.PROVIDER, Permission.CONSUMER)
    refused = await desk.http.patch(f"/v1/resources/{mine}", json={"flagged": None}, headers=other)
    assert refused.status_code in (403, 404)
    given = await desk.http.patch(f"/v1/resources/{claimed}", json={"flagged": None})
    assert (given.status_code, given.json()["flagged"]) == (200, None)
    told = await flags(desk)
    assert told["thiefs"] is None
    assert "another owner" in str(told["first"])
    settled = await desk.http.patch(f"/v1/resources/{mine}", json={"flagged": None})
    assert (settled.status_code, settled.json()["flagged"]) == (200, None)
    told = await flags(desk)
    assert told["first"] is None
    assert "another owner" in str(told["thiefs"])
    await desk.command(gpu="A100")
    await desk.schedule()
    assert (len(first.leases()), len(thief.leases())) == (1, 0)
    assert (await desk.http.patch(f"/v1/resources/{mine}", json={})).status_code == 400


async def test_simulated_gpus_are_nobodys_to_claim(desk: Desk) -> None:
    await desk.agent("first", offering(UUID, simulated=True))
    await owned(desk, "second", offering(UUID, simulated=True))
    assert set((await flags(desk)).values()) == {None}
    assert await desk.server.store.read(gpu_bindings.binding(UUID)) is None


async def test_a_gpu_that_appears_later_is_bound_and_flagged_alike(desk: Desk) -> None:
    await desk.agent("first", offering(UUID))
    thief = await owned(desk, "thief", offering())
    assert set((await flags(desk)).values()) == {None}
    await thief.channel.receive(OfferChanged(offering(UUID)))
    told = await flags(desk)
    assert told["first"] is None
    assert told["thiefs"] is not None
    node = desk.server.picture.state.nodes[thief.credentials.node].node
    assert node.gpus_withheld == {0}
    assert decode("node", thief.badge.identity.node) == thief.credentials.node


async def test_a_machine_listed_without_a_key_neither_binds_nor_flags(desk: Desk) -> None:
    other = await desk.person("other", Permission.PROVIDER)
    gpu = {"index": 0, "uuid": UUID, "model": "A100", "memory_bytes": 80 << 30}
    for _ in range(2):  # listed, then updated
        answer = await desk.post("/register_gpu", {"name": "claim", "gpus": [gpu]}, headers=other)
        assert answer.status_code == 201
    assert await desk.server.store.read(gpu_bindings.binding(UUID)) is None
    await desk.agent("first", offering(UUID))
    bound = await desk.server.store.read(gpu_bindings.binding(UUID))
    operator = await desk.server.store.read(users.user_by_name("operator"))
    assert (bound and bound.owner) == (operator and operator.id)
    await desk.post("/register_gpu", {"name": "claim", "gpus": [gpu]}, headers=other)
    assert await flags(desk) == {"first": None, "claim": None}


async def seen_by(desk: Desk, headers: dict[str, str]) -> list[str]:
    """Hardware uuids in every document of GPUs."""
    items = (await desk.get("/v1/resources?kind=gpu", headers=headers)).json()["items"]
    nodes = (await desk.get("/v1/nodes", headers=headers)).json()["items"]
    one = (await desk.get(f"/v1/resources/{items[0]['id']}", headers=headers)).json()
    listed = [*items, *(gpu for node in nodes for gpu in node["gpus"]), one]
    return [gpu["uuid"] for gpu in listed if gpu["uuid"]]


async def test_uuids_are_shown_to_their_owner_and_operators_only(desk: Desk) -> None:
    await owned(desk, "lender", offering(UUID))
    stranger = await desk.person("stranger", Permission.PROVIDER, Permission.CONSUMER)
    assert await seen_by(desk, stranger) == []
    assert await seen_by(desk, {}) == [UUID] * 3  # the operator's key
    lender = await desk.server.store.read(users.user_by_name("lender"))
    assert lender is not None
    key = {"authorization": f"Bearer {await new_key(desk, lender.id)}"}
    assert await seen_by(desk, key) == [UUID] * 3


async def new_key(desk: Desk, user: UserId) -> str:
    key = authorization.fresh(authorization.USER_PREFIX)
    hashed = authorization.hashed(key)
    await desk.server.store.write(
        users.add_key(desk.server.ids.next(), user, "test", hashed, desk.server.now)
    )
    return key


async def test_a_flag_lapses_when_the_rival_s_node_is_removed(desk: Desk) -> None:
    squatter = await owned(desk, "squatter", offering(UUID))
    honest = await desk.agent("honest", offering(UUID))
    told = (await desk.get(f"/v1/nodes/{honest.badge.identity.node}")).json()
    assert "another owner" in told["problems"][0], "the owner is told why"
    await desk.command(gpu="A100")
    await squatter.channel.close()
    assert await desk.schedule() == 0
    removed = await desk.http.delete(f"/v1/nodes/{squatter.badge.identity.node}")
    assert removed.status_code == 204
    assert await flags(desk) == {"honest": None}
    assert await desk.schedule() == 1
    bound = await desk.server.store.read(gpu_bindings.binding(UUID))
    assert (bound and bound.owner) == honest.credentials.owner


async def test_a_holder_that_is_offline_keeps_its_gpu(desk: Desk) -> None:
    """Control: only a removed node gives up its claim."""
    holder = await owned(desk, "holder", offering(UUID))
    desk.clock.advance(
        KEPT_AFTER / SECOND
    )  # a claim of less than an hour is forgotten with its offer
    await holder.channel.receive(OfferChanged(offering()))
    await holder.channel.close()
    await desk.agent("claimant", offering(UUID))
    assert "another owner" in str((await flags(desk))["claimant"])


@pytest.mark.parametrize("patch", [{"disabled": True}, {"permissions": ["consumer"]}])
async def test_a_flag_lapses_when_the_rival_s_account_is_suspended(
    desk: Desk, patch: dict[str, object]
) -> None:
    squatter = await owned(desk, "squatter", offering(UUID))
    await desk.agent("honest", offering(UUID))
    owner = encode("user", squatter.credentials.owner)
    answer = await desk.http.patch(f"/v1/users/{owner}", json=patch)
    assert answer.status_code == 200
    assert (await flags(desk))["honest"] is None


@pytest.mark.parametrize("is_settled", [False, True])
async def test_a_flag_lapses_when_the_rival_deletes_the_account(
    desk: Desk, is_settled: bool
) -> None:
    squatter = await registered(desk, "squatter")
    node = await desk.join(a_key(9), offering(UUID), squatter.headers, name="claims")
    await node.connect()
    honest = await desk.agent("honest", offering(UUID))
    if is_settled:
        listed = (await squatter.ask("GET", "/v1/resources?kind=gpu")).json()["items"]
        [mine] = [gpu["id"] for gpu in listed if gpu["uuid"] == UUID]
        decided = await desk.http.patch(f"/v1/resources/{mine}", json={"flagged": None})
        assert decided.status_code == 200, decided.text
    assert (await flags(desk))["honest"] is not None
    gone = await squatter.ask("DELETE", "/v1/me", {"password": PASSWORD})
    assert gone.status_code == 204, gone.text
    assert await flags(desk) == {"honest": None}
    bound = await desk.server.store.read(gpu_bindings.binding(UUID))
    assert (bound and bound.owner) == honest.credentials.owner
