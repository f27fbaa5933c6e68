"""Nobody is a node without its key: stolen tokens, replayed, stale and foreign proofs, on the channel and on requests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import pytest

from gpool.core.errors import NotSignedIn
from gpool.server.identity.node_proofs import TOKEN_LIFE, NodeAuthenticator
from gpool.server.nodes.guards import Handshake
from gpool.transfer.node_proofs import (
    ChallengeStatement,
    NodeKey,
    Purpose,
    RequestStatement,
    new_nonce,
)
from gpool.wire.frames import (
    Beat,
    Challenge,
    FromAgent,
    FromServer,
    Hello,
    Prove,
    Proven,
    Refused,
    Reports,
)
from tests.server.server_desk import Agent, Desk, an_offer
from tests.tools.nodes import a_key

pytestmark = pytest.mark.anyio
PATH = "/v1/artifacts/" + "0" * 64
LEASE = "t-0000000000001:1"


@dataclass
class Connection:
    """One connection as the server sees it."""

    handshake: Handshake
    sent: list[FromServer]

    async def say(self, frame: FromAgent) -> object:
        """What passes, or the refusal."""
        return await self.handshake.take(frame)

    @property
    def challenge(self) -> Challenge:
        found = self.sent[-1]
        assert isinstance(found, Challenge)
        return found

    @property
    def token(self) -> str:
        found = self.sent[-1]
        assert isinstance(found, Proven)
        return found.token


def dialled(desk: Desk, agent: Agent) -> Connection:
    sent: list[FromServer] = []
    handshake = Handshake(desk.server.gate, agent.credentials, desk.clock.now, sent.append)
    handshake.begin()
    return Connection(handshake, sent)


async def proven(desk: Desk, agent: Agent) -> Connection:
    connection = dialled(desk, agent)
    proof = agent.badge.answer(connection.challenge, is_open=False)
    assert proof is not None
    assert await connection.say(proof) is None
    assert connection.handshake.is_proven
    return connection


async def test_a_report_passes_with_the_connections_own_token_only(desk: Desk) -> None:
    alice, bob = await desk.node("alice"), await desk.node("bob")
    connection, other = await proven(desk, alice), await proven(desk, bob)
    token, stolen = connection.token, other.token
    report = Reports(1, (), token)
    assert await connection.say(report) == report
    for wrong in ("", stolen, token[:-1], token + "A"):
        assert isinstance(await connection.say(Reports(1, (), wrong)), Refused)
    desk.clock.advance(TOKEN_LIFE / 1_000_000)
    assert isinstance(await connection.say(report), Refused)


async def test_nothing_passes_before_the_proof(desk: Desk) -> None:
    agent = await desk.node()
    token = (await proven(desk, agent)).token
    hello = Hello(1, "boot", an_offer(), 1, ())
    for frame in (hello, Beat(1, ()), Reports(1, (), token)):
        assert isinstance(await dialled(desk, agent).say(frame), Refused)


async def test_a_token_is_renewed_in_time_and_the_old_one_holds_to_its_end(desk: Desk) -> None:
    agent = await desk.node()
    connection = await proven(desk, agent)
    first = connection.token
    desk.clock.advance(TOKEN_LIFE / 2_000_000)
    beat = Beat(2, ())
    assert await connection.say(beat) == beat
    challenge = connection.challenge
    assert challenge.purpose == Purpose.TOKEN
    assert await connection.say(beat) == beat
    assert connection.challenge == challenge  # one is under way
    proof = agent.badge.answer(challenge, is_open=True)
    assert proof is not None
    assert await connection.say(proof) is None
    second = connection.token
    assert second != first
    for token in (first, second):
        assert isinstance(await connection.say(Reports(1, (), token)), Reports)
    assert isinstance(await connection.say(proof), Refused)


async def test_a_removed_node_gets_no_token_any_more(desk: Desk) -> None:
    agent = await desk.node()
    connection = await proven(desk, agent)
    desk.clock.advance(TOKEN_LIFE / 2_000_000)
    await connection.say(Beat(2, ()))
    proof = agent.badge.answer(connection.challenge, is_open=True)
    assert proof is not None
    gone = await desk.http.delete(f"/v1/nodes/{agent.badge.identity.node}")
    assert gone.status_code == 204
    refused = await connection.say(proof)
    assert isinstance(refused, Refused)
    assert "join again" in refused.detail


@dataclass
class Thief:
    """Has alice's token, everything she ever sent, a key and a node of his own; not her key."""

    desk: Desk
    alice: Agent
    mallory: Agent
    token: str
    heard: list[tuple[Challenge, Prove]]
    requests: list[str]
    dice: Random

    @property
    def gate(self) -> NodeAuthenticator:
        return self.desk.server.gate

    def own_key(self) -> NodeKey:
        return NodeKey(self.dice.randbytes(32))

    async def opens_a_channel(self) -> bool:
        """Tries to answer a fresh challenge, or to repeat an old answer."""
        connection = dialled(self.desk, self.alice)
        nonce, key = connection.challenge.nonce, self.own_key()
        public = self.dice.choice((key.public, self.alice_public))
        node = self.dice.choice((self.alice_id, self.mallory.badge.identity.node, ""))
        server = self.dice.choice((self.gate.name, "pool-elsewhere"))
        purpose = self.dice.choice(tuple(Purpose))
        old_challenge, old_proof = self.dice.choice(self.heard)
        signed = key.sign(ChallengeStatement(purpose, server, node, public, nonce))
        mine = self.mallory.badge.answer(connection.challenge, is_open=False)
        assert mine is not None
        proof = self.dice.choice(
            (
                Prove(nonce, signed),
                mine,
                old_proof,
                Prove(nonce, old_proof.signature),
                Prove(old_challenge.nonce, signed),
                Prove(nonce, self.dice.choice(("", "A" * 86, signed[:-1], old_proof.nonce))),
            )
        )
        await connection.say(proof)
        if not connection.handshake.is_proven:
            return False
        return isinstance(await connection.say(Reports(1, (), self.token)), Reports)

    async def reports_behind_his_own_connection(self) -> bool:
        connection = await proven(self.desk, self.mallory)
        said = self.dice.choice((self.token, self.token[:-1] + "A", connection.token[::-1]))
        return isinstance(await connection.say(Reports(1, (), said)), Reports)

    async def sends_a_request(self) -> bool:
        """With her token: repeats a request of hers, changes it, or signs with a key of his own."""
        at = self.desk.clock.now() // 1_000_000
        key, nonce = self.own_key(), new_nonce()
        said = RequestStatement(self.gate.name, "GET", PATH, self.token, at, nonce, LEASE)
        said = replace(said, at_s=at + self.dice.choice((0, 0, 61, -61, 10**9)))
        proof = self.dice.choice((self.dice.choice(self.requests), key.request_proof(said), ""))
        parts = proof.split(".")
        if len(parts) == 3 and self.dice.random() < 0.5:
            changed = self.dice.choice(
                ([str(at + 1), *parts[1:]], [parts[0], nonce, parts[2]], [*parts[:2], "A" * 86])
            )
            proof = ".".join(changed)
        method = self.dice.choice(("GET", "PUT", "HEAD"))
        path = self.dice.choice((PATH, PATH[:-1] + "1", PATH + "?x=1"))
        lease = self.dice.choice((LEASE, "t-0000000000001:2", ""))
        token = self.dice.choice((self.token, self.token, self.token + "A", ""))
        try:
            await self.gate.requests(method, path, lease, token, proof)
        except NotSignedIn:
            return False
        return True

    @property
    def alice_public(self) -> bytes:
        return a_key(77).public

    @property
    def alice_id(self) -> str:
        return self.alice.badge.identity.node


async def a_thief(desk: Desk) -> Thief:
    alice = await desk.join(a_key(77), an_offer(), {}, name="alice")
    mallory = await desk.node("mallory")
    heard = []
    for _ in range(3):
        connection = dialled(desk, alice)
        challenge = connection.challenge
        proof = alice.badge.answer(challenge, is_open=False)
        assert proof is not None
        await connection.say(proof)
        heard.append((challenge, proof))
    token = connection.token
    at = desk.clock.now() // 1_000_000
    requests = []
    for _ in range(3):
        said = RequestStatement(desk.server.gate.name, "GET", PATH, token, at, new_nonce(), LEASE)
        requests.append(a_key(77).request_proof(said))
        who = await desk.server.gate.requests("GET", PATH, LEASE, token, requests[-1])
        assert who == alice.credentials
    return Thief(desk, alice, mallory, token, heard, requests, Random(3))


async def test_a_thief_without_the_key_gets_in_0_times_of_10_000(desk: Desk) -> None:
    thief = await a_thief(desk)
    ways: list[Callable[[], object]] = [
        thief.opens_a_channel,
        thief.reports_behind_his_own_connection,
        thief.sends_a_request,
    ]
    let_in = 0
    for number in range(10_000):
        if number % 1000 == 999:
            desk.clock.advance(1)
        let_in += bool(await ways[number % 3]())  # type: ignore[misc]
    assert let_in == 0
    # The control: the very same ways are open to whoever has the key.
    connection = await proven(desk, thief.alice)
    assert isinstance(await connection.say(Reports(1, (), thief.token)), Reports)
    fresh = RequestStatement(
        desk.server.gate.name,
        "GET",
        PATH,
        thief.token,
        desk.clock.now() // 1_000_000,
        new_nonce(),
        LEASE,
    )
    who = await desk.server.gate.requests(
        "GET", PATH, LEASE, thief.token, a_key(77).request_proof(fresh)
    )
    assert who == thief.alice.credentials


async def test_a_stale_answer_is_refused_for_now_and_a_request_of_a_minute_ago_too(
    desk: Desk,
) -> None:
    agent = await desk.node()
    connection = dialled(desk, agent)
    proof = agent.badge.answer(connection.challenge, is_open=False)
    assert proof is not None
    desk.clock.advance(31)
    refused = await connection.say(proof)
    assert isinstance(refused, Refused)
    assert refused.retry
    async with desk.http_of(agent, LEASE) as http:
        request = http.build_request("GET", PATH)
        assert (await http.send(request)).status_code == 404  # proven, and nothing is there
    stolen = {
        name: value
        for name, value in request.headers.items()
        if name in ("authorization", "gpool-proof", "gpool-lease")
    }
    assert set(stolen) == {"authorization", "gpool-proof", "gpool-lease"}
    assert (await desk.bare.get(PATH, headers=stolen)).status_code == 401
    bare_token = {"authorization": stolen["authorization"]}
    assert (await desk.bare.get(PATH, headers=bare_token)).status_code == 401
    assert hashlib.sha256(stolen["gpool-proof"].encode()).hexdigest()  # it was a real one
