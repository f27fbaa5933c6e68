"""A stranger who knows a GPU's id changes nothing for its owner: 1,000 tries over channel and REST, in random sequences.

Strangers claim the id before the owner comes, while the owner is connected and while not; with keys and without; by one
account and by many; they prove with a card of their own, lie in verifications, leave, rejoin and delete accounts. After
each try the owner's binding, GPU row and node must be as before it. The controls show that the comparison can fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gpool.core.gpu_verification import GpuVerdict, MeasuredSpeed
from gpool.core.ids import UserId, encode
from gpool.core.model import Gpu, Offer, Permission
from gpool.server.app import make_app
from gpool.server.nodes.gpu_verifier import GpuVerifier, VerificationSettings, terms_of
from gpool.server.store.identity_values import Binding, GpuRow
from gpool.server.store.operations import gpus as gpu_operations
from gpool.server.store.operations.identity import accounts, users
from gpool.transfer.node_proofs import NodeKey
from gpool.wire.frames import (
    AnswerNow,
    ExamineGpu,
    GpuAnswered,
    GpuCommitted,
    GpuMeasured,
    GpuOpened,
    GpuUnable,
    OfferChanged,
)
from tests.server.gpu_proofs.test_trials import (
    NEVER,
    TERMS,
    answer,
    open_tiles,
    prover_for,
    say,
    tick,
)
from tests.server.identity_routes.people_desk import PASSWORD, registered
from tests.server.server_desk import Agent, Desk, StoppedClock, an_offer, open_desk

pytestmark = pytest.mark.anyio
ROUNDS, TRIES = 50, 20
SEED = 20_261_118
OUT_OF_TIME_S = 21.0
"""After it, everybody in a batch who did not commit has failed."""


@dataclass(frozen=True)
class Held:
    """State of an owner's GPU, as stored and as the planner sees it."""

    binding: Binding | None
    row: GpuRow | None
    withheld: frozenset[int]
    unproven: frozenset[int]


@dataclass
class Siege:
    """One GPU's id, its owner's node once it has joined, and the strangers' nodes."""

    desk: Desk
    dice: Random
    uuid: str
    owner: dict[str, str]
    has_equal_card: bool  # strangers also have real cards, which pass under the stolen id
    node: Agent | None = None
    strangers: list[dict[str, str]] = field(default_factory=list)
    agents: list[Agent] = field(default_factory=list)
    numbers: int = 0

    async def held(self) -> Held:
        read = self.desk.server.store.read
        bound = await read(gpu_operations.binding(self.uuid))
        if self.node is None:
            return Held(bound, None, frozenset(), frozenset())
        rows = await read(gpu_operations.gpus_of_nodes([self.node.credentials.node]))
        entry = self.desk.server.picture.state.nodes[self.node.credentials.node]
        assert entry.node is not None
        return Held(bound, rows[0], entry.node.gpus_withheld, entry.node.gpus_unproven)

    def claim(self) -> Offer:
        """An offer with the stolen id, beside other GPUs or not, as this or that."""
        model, vendor, gib = self.dice.choice(
            [("NVIDIA H200", "nvidia", 141)] * 3
            + [("NVIDIA NeverHeardOf", "nvidia", 8), ("Instinct MI300X", "amd", 192)]
            + [("NVIDIA T4", "nvidia", 1 << 19)]  # a petabyte: a commitment would take hours
        )
        stolen = Gpu(0, self.uuid, model, vendor, gib << 30, simulated=self.dice.random() < 0.1)
        other = Gpu(1, f"GPU-own-{self.dice.random()}", "NVIDIA H200", "nvidia", 141 << 30)
        gpus = (stolen, other) if self.dice.random() < 0.3 else (stolen,)
        host = self.dice.choice(["bench", "thief"])
        return replace(an_offer(), gpus=gpus, hostname=host)

    async def stranger(self) -> dict[str, str]:
        if not self.strangers or self.dice.random() < 0.2:
            self.numbers += 1
            name = f"s{self.numbers}-{self.uuid[-8:]}"
            asked = (Permission.PROVIDER, Permission.CONSUMER)
            self.strangers.append(await self.desk.person(name, *asked))
        return self.dice.choice(self.strangers)

    async def join(self, headers: dict[str, str], offer: Offer, **members: Any) -> Agent:
        self.desk.clock.advance(2)  # joins are rate limited
        self.numbers += 1
        name = f"n{self.numbers}-{self.uuid[-8:]}"
        return await self.desk.join(
            NodeKey(self.dice.randbytes(32)), offer, headers, name=name, **members
        )

    async def some_agent(self) -> Agent:
        if not self.agents:
            await claims_by_connecting(self)
        return self.dice.choice(self.agents)


# ---- the owner


async def proves(siege: Siege, agent: Agent) -> None:
    """Let a node prove its GPU honestly; others in its batch run out of time."""
    for _ in range(3):  # a measurement or a batch in progress comes first
        await tick(siege.desk, 6)
        if agent.frames(ExamineGpu):
            break
    trial, prover = prover_for(agent)
    root = prover.commit()
    await say(agent, GpuCommitted(trial, root))
    if not [each for each in agent.frames(AnswerNow) if each.trial == trial]:
        await tick(siege.desk, OUT_OF_TIME_S)
    await answer(agent, trial, prover, root)
    await open_tiles(agent, trial, prover)


async def owner_joins(siege: Siege) -> None:
    gpu = Gpu(0, siege.uuid, "NVIDIA H200", "nvidia", 141 << 30)
    offer = replace(an_offer(), gpus=(gpu,), hostname="owners")
    siege.node = await siege.join(siege.owner, offer)
    await siege.node.connect()
    if siege.desk.server.offer_terms.proof:
        await proves(siege, siege.node)


async def is_whole(siege: Siege) -> bool:
    """Whether the owner's GPU is bound to the owner, without a flag, and takes strangers' tasks."""
    held, node = await siege.held(), siege.node
    assert node is not None
    is_bound = held.binding is not None and held.binding.owner == node.credentials.owner
    is_free = held.row is not None and not (held.row.flagged or held.row.unproven)
    return is_bound and is_free and not held.withheld and not held.unproven


# ---- the strangers


async def claims_by_connecting(siege: Siege) -> None:
    agent = await siege.join(await siege.stranger(), siege.claim())
    await agent.connect()
    siege.agents.append(agent)


async def claims_by_changing_the_offer(siege: Siege) -> None:
    agent = await siege.some_agent()
    await agent.channel.receive(OfferChanged(siege.claim()))


async def drops_the_claim(siege: Siege) -> None:
    agent = await siege.some_agent()
    await agent.channel.receive(OfferChanged(an_offer()))


def listed(siege: Siege) -> dict[str, Any]:
    claimed = siege.claim().gpus[0]
    return {
        "index": 0,
        "uuid": claimed.uuid,
        "model": claimed.model,
        "memory_bytes": claimed.memory_bytes,
    }


async def joins_with_the_id_and_stays_away(siege: Siege) -> None:
    await siege.join(await siege.stranger(), an_offer(), gpus=[listed(siege)])


async def lists_it_without_a_key(siege: Siege) -> None:
    wanted = {"name": "listing", "gpus": [listed(siege)]}
    told = await siege.desk.post("/register_gpu", wanted, headers=await siege.stranger())
    assert told.status_code == 201, told.text


async def offers_it_by_http(siege: Siege) -> None:
    agent = await siege.some_agent()
    async with siege.desk.http_of(agent) as http:
        await http.post("/v1/nodes", json={"name": "x", "gpus": [listed(siege)]})


async def sends_frames_of_other_verifications(siege: Siege) -> None:
    agent = await siege.some_agent()
    seen = siege.node.frames(ExamineGpu) if siege.node is not None else []
    for trial in (0, 1, *(each.trial for each in seen)):
        await say(agent, GpuUnable(trial, siege.uuid, "broken"))
        await say(agent, GpuCommitted(trial, siege.dice.randbytes(32)))
        await say(agent, GpuAnswered(trial, (siege.dice.randbytes(32),) * TERMS.rounds))
        await say(agent, GpuOpened(trial, ()))
    await say(agent, GpuMeasured(siege.uuid, MeasuredSpeed(1, 1, 1, 1, 1, 1)))


async def lies_in_its_own_verification(siege: Siege) -> None:
    agent = await siege.some_agent()
    await tick(siege.desk, 6)
    if not agent.frames(ExamineGpu):
        return
    trial, _ = prover_for(agent)
    said = siege.dice.choice(
        [
            GpuUnable(trial, siege.uuid, "no"),
            GpuCommitted(trial, b"r" * 32),
            GpuOpened(trial, ()),
        ]
    )
    await say(agent, said)
    await tick(siege.desk, OUT_OF_TIME_S)


async def proves_with_a_card_of_its_own(siege: Siege) -> None:
    """A real, equal card under the stolen id: it passes, and still gets nothing that is the owner's."""
    if not siege.has_equal_card or siege.node is None:
        return
    gpu = Gpu(0, siege.uuid, "NVIDIA H200", "nvidia", 141 << 30)
    agent = await siege.join(await siege.stranger(), replace(an_offer(), gpus=(gpu,)))
    await agent.connect()
    await proves(siege, agent)
    siege.agents.append(agent)
    [row] = await siege.desk.server.store.read(
        gpu_operations.gpus_of_nodes([agent.credentials.node])
    )
    assert row.verified
    assert row.flagged is not None


async def disconnects(siege: Siege) -> None:
    await (await siege.some_agent()).channel.close()


async def connects_again(siege: Siege) -> None:
    agent = (await siege.some_agent()).again()
    await agent.connect()
    siege.agents.append(agent)


async def removes_its_node(siege: Siege) -> None:
    agent = await siege.some_agent()
    for headers in siege.strangers:
        path = f"/v1/nodes/{agent.badge.identity.node}?force=true"
        await siege.desk.http.request("DELETE", path, headers=headers)
    gone = agent.credentials.node
    siege.agents = [each for each in siege.agents if each.credentials.node != gone]


async def asks_for_the_owners_things(siege: Siege) -> None:
    if siege.node is None:
        return
    headers, http = await siege.stranger(), siege.desk.http
    [row] = await siege.desk.server.store.read(
        gpu_operations.gpus_of_nodes([siege.node.credentials.node])
    )
    gpu, node = gpu_id(row), siege.node.badge.identity.node
    for body in ({"flagged": None}, {"available": False}, {"quarantined": "it is mine"}):
        told = await http.patch(f"/v1/resources/{gpu}", json=body, headers=headers)
        assert told.status_code in (400, 403, 404), told.text
    paths = (f"/v1/resources/{gpu}", f"/v1/nodes/{node}?force=true")
    for path in paths:
        told = await http.request("DELETE", path, headers=headers)
        assert told.status_code in (403, 404), told.text
    told = await http.patch(f"/v1/nodes/{node}", json={"availability": "paused"}, headers=headers)
    assert told.status_code in (403, 404), told.text


async def claims_and_deletes_the_account(siege: Siege) -> None:
    siege.desk.clock.advance(60)
    siege.numbers += 1
    somebody = await registered(siege.desk, f"gone{siege.numbers}-{siege.uuid[-8:]}")
    agent = await siege.join(somebody.headers, siege.claim())
    await agent.connect()
    told = await somebody.ask("DELETE", "/v1/me", {"password": PASSWORD})
    assert told.status_code == 204, told.text


async def links_a_wallet(siege: Siege) -> None:
    agent = await siege.some_agent()
    wallet = "0x" + siege.dice.randbytes(20).hex()
    write, now = siege.desk.server.store.write, siege.desk.clock.now()
    await write(accounts.link_wallet(agent.credentials.owner, wallet, now))
    await write(gpu_operations.rebind_wallet(agent.credentials.owner, wallet))


async def claims_from_many_accounts_at_once(siege: Siege) -> None:
    joined = [await siege.join(await siege.stranger(), siege.claim()) for _ in range(4)]
    await asyncio.gather(*(agent.connect() for agent in joined))
    siege.agents += joined


WAYS: tuple[Callable[[Siege], Awaitable[None]], ...] = (
    claims_by_connecting,
    claims_by_changing_the_offer,
    drops_the_claim,
    joins_with_the_id_and_stays_away,
    lists_it_without_a_key,
    offers_it_by_http,
    sends_frames_of_other_verifications,
    lies_in_its_own_verification,
    proves_with_a_card_of_its_own,
    disconnects,
    connects_again,
    removes_its_node,
    asks_for_the_owners_things,
    claims_and_deletes_the_account,
    links_a_wallet,
    claims_from_many_accounts_at_once,
)


def gpu_id(row: GpuRow) -> str:
    return encode("gpu", row.id)


# ---- the tries


async def opened(data: Path, *, proof: bool) -> Desk:
    desk = await open_desk(data, StoppedClock(), examine_gpus=proof)
    server = desk.server
    wanted = VerificationSettings(
        examine=proof,
        measure=False,
        again_every=NEVER,
        terms=lambda gpu, models: TERMS if terms_of(gpu, models) else None,
    )
    verifier = GpuVerifier(server.store, server.picture, desk.clock.now, wanted, Random(1))
    desk.server = replace(server, examiner=verifier)
    desk.app = make_app(desk.server)
    return desk


@pytest.fixture
async def strict(data: Path) -> AsyncIterator[Desk]:
    desk = await opened(data, proof=True)
    async with desk.http:
        yield desk
    await desk.server.store.close()


async def tries(siege: Siege, count: int) -> int:
    """Try so often; return the number of tries that changed something for the owner."""
    changed = 0
    for _ in range(count):
        before = await siege.held()
        await siege.dice.choice(WAYS)(siege)
        changed += await siege.held() != before
    return changed


async def ends(siege: Siege) -> None:
    """An operator removes all nodes."""
    for node in (await siege.desk.get("/v1/nodes?limit=500")).json()["items"]:
        told = await siege.desk.http.delete(f"/v1/nodes/{node['id']}?force=true")
        assert told.status_code == 204, told.text


async def besieged(desk: Desk, number: int) -> tuple[int, int, int]:
    """One GPU: tries, tries that changed something, and times the owner came and did not get the GPU."""
    dice = Random(SEED + number)
    owner = await desk.person(f"owner{number}", Permission.PROVIDER, Permission.CONSUMER)
    uuid = f"GPU-{dice.randbytes(16).hex()}"
    siege = Siege(desk, dice, uuid, owner, has_equal_card=number % 2 == 0)
    changed = await tries(siege, 5)
    await owner_joins(siege)
    refused = not await is_whole(siege)
    changed += await tries(siege, 6)
    assert siege.node is not None
    await siege.node.channel.close()
    changed += await tries(siege, 4)
    siege.node = siege.node.again()
    await siege.node.connect()
    refused += not await is_whole(siege)
    changed += await tries(siege, 5)
    if (
        not siege.has_equal_card
    ):  # the owner installs the machine anew: the binding lapses meanwhile
        path = f"/v1/nodes/{siege.node.badge.identity.node}?force=true"
        assert (await desk.http.request("DELETE", path, headers=owner)).status_code == 204
        siege.node = None
        await owner_joins(siege)
        refused += not await is_whole(siege)
    await ends(siege)
    return TRIES, changed, refused


async def test_a_stranger_who_knows_an_id_changes_nothing_for_the_owner(strict: Desk) -> None:
    tried = changed = refused = 0
    for number in range(ROUNDS):
        found = await besieged(strict, number)
        tried, changed, refused = (
            tried + found[0],
            changed + found[1],
            refused + found[2],
        )
    assert (tried, changed, refused) == (ROUNDS * TRIES, 0, 0)


async def test_the_control_without_proof_the_first_claimant_keeps_the_owner_out(
    data: Path,
) -> None:
    """The behaviour before: an id is bound by naming it."""
    desk = await opened(data, proof=False)
    owner = await desk.person("owner", Permission.PROVIDER, Permission.CONSUMER)
    siege = Siege(desk, Random(1), f"GPU-{'5' * 32}", owner, has_equal_card=False)
    gpu = Gpu(0, siege.uuid, "NVIDIA H200", "nvidia", 141 << 30)
    thief = await siege.join(await siege.stranger(), replace(an_offer(), gpus=(gpu,)))
    await thief.connect()
    await owner_joins(siege)
    assert not await is_whole(siege)
    await desk.server.store.close()


async def test_the_control_an_operator_does_change_whose_it_is(strict: Desk) -> None:
    owner = await strict.person("owner", Permission.PROVIDER, Permission.CONSUMER)
    siege = Siege(strict, Random(2), f"GPU-{'6' * 32}", owner, has_equal_card=True)
    await owner_joins(siege)
    await proves_with_a_card_of_its_own(siege)
    before = await siege.held()
    assert await is_whole(siege)
    theirs = siege.agents[-1].credentials.node
    [row] = await strict.server.store.read(gpu_operations.gpus_of_nodes([theirs]))
    told = await strict.http.patch(f"/v1/resources/{gpu_id(row)}", json={"flagged": None})
    assert told.status_code == 200, told.text
    assert await siege.held() != before
    assert not await is_whole(siege)


async def test_a_claim_of_more_than_was_proved_is_proved_again(strict: Desk) -> None:
    """A card that passed as itself does not become another one by renaming it, whatever way the new offer comes."""
    owner = await strict.person("owner", Permission.PROVIDER, Permission.CONSUMER)
    siege = Siege(strict, Random(3), f"GPU-{'7' * 32}", owner, has_equal_card=False)
    await owner_joins(siege)
    agent = siege.node
    assert agent is not None
    was, better = agent.offer, Gpu(0, siege.uuid, "NVIDIA B200", "nvidia", 180 << 30)
    for steps in (
        [OfferChanged(replace(was, gpus=(better,)))],
        [OfferChanged(an_offer()), OfferChanged(replace(was, gpus=(better,)))],
    ):
        assert await is_whole(siege)
        for frame in steps:
            await agent.channel.receive(frame)
        assert (await siege.held()).withheld == {0}
        await agent.channel.receive(OfferChanged(was))
        assert (await siege.held()).withheld == {0}
        agent.sent.clear()
        await proves(siege, agent)
    renamed = {"index": 0, "uuid": siege.uuid, "model": "B200", "vendor": "nvidia"}
    body = {"name": "x", "gpus": [{**renamed, "memory_bytes": 180 << 30}]}
    async with strict.http_of(agent) as http:
        assert (await http.post("/v1/nodes", json=body)).status_code == 200
    assert (await siege.held()).withheld == {0}


async def test_a_petabyte_is_no_deadline_for_others(strict: Desk) -> None:
    claimed = Gpu(0, "GPU-large", "NVIDIA T4", "nvidia", 1 << 50)
    agent = await strict.agent(offer=replace(an_offer(), gpus=(claimed,)))
    await tick(strict)
    assert agent.frames(ExamineGpu) == []
    [row] = await strict.server.store.read(gpu_operations.gpus_of_nodes([agent.credentials.node]))
    assert GpuVerdict.UNKNOWN_MODEL.text in str(row.unproven)


async def test_the_owner_named_by_a_claim_is_the_nodes_owner(strict: Desk) -> None:
    owner = await strict.person("owner", Permission.PROVIDER, Permission.CONSUMER)
    siege = Siege(strict, Random(4), f"GPU-{'8' * 32}", owner, has_equal_card=False)
    await owner_joins(siege)
    found = await strict.server.store.read(users.user_by_name("owner"))
    bound = (await siege.held()).binding
    assert bound is not None
    assert found is not None
    assert bound.owner == UserId(found.id)
