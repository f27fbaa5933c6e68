"""Nodes and consumers for benchmarks, written to an empty store as if they had joined.

Apart from the agents, because it runs with the tree of an older release too: it imports what that release has.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from hashlib import sha256

from gpool.core.ids import NodeId, UserId, encode
from gpool.core.model import Permission
from gpool.server.app import open_server
from gpool.server.identity import authorization
from gpool.server.replicas.membership import Membership
from gpool.server.server import Server
from gpool.server.settings import Settings
from gpool.server.store.operations import nodes
from gpool.server.store.operations.identity import users
from gpool.server.store.values import User
from gpool.transfer.node_proofs import NodeKey, public_text
from tests.tools.scripted_agent import offer

AT_ONCE = 64
"""Agents that connect for the first time together, and nodes registered in one go."""


@dataclass(frozen=True, slots=True)
class SimulatedNode:
    """A registered node, as the process of the agents needs it."""

    seed: bytes
    node: str
    server: str
    cpus: int


@dataclass(frozen=True, slots=True)
class RegisteredPool:
    nodes: list[SimulatedNode]
    keys: list[str]  # API keys of consumers


async def register(settings: Settings, count: int, cpus: int, consumers: int) -> RegisteredPool:
    """Write nodes and consumers to an empty store, as if they had joined: joining has rate limits of its own."""
    server = await open_server(settings)
    try:
        keys = []
        for number in range(consumers):
            id_ = UserId(server.ids.next())
            user = User(id_, f"consumer{number}", frozenset({Permission.CONSUMER}), server.now)
            await server.store.write(users.create_user(user))
            key = authorization.fresh(authorization.USER_PREFIX)
            hashed = authorization.hashed(key)
            await server.store.write(
                users.add_key(server.ids.next(), id_, "bench", hashed, server.now)
            )
            keys.append(key)
        owner = await server.store.read(users.user_by_name("operator"))
        assert owner is not None
        found = []
        for first in range(0, count, AT_ONCE):
            writes = []
            for number in range(first, min(count, first + AT_ONCE)):
                seed, node = sha256(b"simulated %d" % number).digest(), NodeId(server.ids.next())
                public = public_text(NodeKey(seed).public)
                writes.append(
                    server.store.write(
                        nodes.create_node(
                            node,
                            f"simulated-{number}",
                            owner.id,
                            None,
                            "",
                            offer(cpus),
                            (),
                            server.now,
                            public,
                        )
                    )
                )
                found.append(SimulatedNode(seed, encode("node", node), server.gate.name, cpus))
            await asyncio.gather(*writes)
        return RegisteredPool(found, keys)
    finally:
        await _close(server)


async def _close(server: Server) -> None:
    """Without `app.close_server`, which the older trees of an upgrade do not have."""
    if isinstance(server.replica, Membership):
        await server.replica.stop()
    await server.identity.close()
    await server.store.close()
