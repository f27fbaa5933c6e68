"""Listing of the pool's servers, for operators."""

from __future__ import annotations

from dataclasses import dataclass

from gpool.core.model import Instant
from gpool.server.replicas.membership import Membership
from gpool.server.server import VERSION, Server
from gpool.server.store.generated_rows import ReplicasRecord
from gpool.server.store.operations import replicas as operations


@dataclass(frozen=True, slots=True)
class ListedReplica:
    row: ReplicasRecord
    leads: bool
    is_alive: bool
    nodes: int


async def listed(server: Server) -> list[ListedReplica]:
    """Replicas of the database; on SQLite the only server, which has no row."""
    here = server.replica
    if not isinstance(here, Membership):
        never, term = Instant(0), server.picture.term
        sole = ReplicasRecord(0, 0, server.settings.origin, VERSION, never, never, None, term, 0)
        nodes_here = len(server.nodes.connections)
        return [ListedReplica(sole, leads=True, is_alive=True, nodes=nodes_here)]
    rows = await server.store.read(operations.replicas())
    nodes = await server.store.read(operations.nodes_of_replicas())
    dead = set(here.dead)
    newest = max((row.term for row in rows), default=0)
    return [
        ListedReplica(
            row,
            leads=bool(row.term) and row.term == newest and row.id not in dead,
            is_alive=row.id not in dead,
            nodes=nodes.get(row.id, 0),
        )
        for row in rows
    ]
