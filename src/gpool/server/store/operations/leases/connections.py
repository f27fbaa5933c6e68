"""Fence of a node's frames: its row in `node_connections`, where replicas exist; without them no link is given.

A dead process's reports may still be under way to one replica while the restarted agent connects to another, which
reads the leases and sends them again. A report recorded after that would end a lease that the new process runs. So a
report counts only while the row names the connection that it came by. The row is locked with it (`FOR SHARE`): the
next `Hello` waits for the report's commit and then reads the leases as the report left them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gpool.core.ids import NodeId
from gpool.server.store.protocol import Operation, Relation, operation
from gpool.server.store.rows import values


class NodeLink(NamedTuple):
    """A node's connection: the replica that has it, and the `Hello` it began with."""

    replica: int
    boot: str
    beat: int


Links = Mapping[NodeId, NodeLink]
NO_LINKS: Links = {}

CURRENT_LINK = (
    "JOIN node_connections c ON c.node_id = l.node AND c.replica_id = l.replica "
    "AND c.boot = l.boot AND c.beat = l.beat "
)
"""Join of `{links} AS l` that keeps the nodes whose connection is the stored one; lock it with `FOR SHARE OF c`."""


def links_relation(links: Links) -> Relation:
    columns = (("node", "int"), ("replica", "int"), ("boot", "text"), ("beat", "int"))
    return Relation(columns, [(node, *link) for node, link in sorted(links.items())])


@operation
def still_connected(links: Links) -> Operation[set[NodeId]]:
    """Select the nodes whose connection is the stored one, and keep it so until the commit."""
    found = yield from values(
        NodeId,
        f"SELECT c.node_id FROM {{links}} AS l {CURRENT_LINK}"  # noqa: S608
        "/*postgresql ORDER BY c.node_id FOR SHARE OF c*/",
        {},
        {"links": links_relation(links)},
    )
    return set(found)
