"""Beats of nodes: when each was last heard of, and which leases it says it holds are not its own any more."""

from __future__ import annotations

from collections.abc import Sequence

from gpool.core.ids import NodeId
from gpool.core.model import Instant
from gpool.server.store.operation import operation
from gpool.server.store.protocol import Operation, Relation, Statement
from gpool.server.store.rows import of_ids
from gpool.wire.frames import Hold

BEATS = (("id", "int"), ("at", "int"))
Beaten = tuple[NodeId, Sequence[Hold], Instant]
"""Who, what it says it holds, and when that came."""


@operation
def beat(beats: Sequence[Beaten]) -> Operation[list[tuple[Hold, ...]]]:
    """Of each, those of its holds that are not that node's any more. A cancelled one is, until it is released.

    What is current is read in the transaction that extends it: no expiry can slip in between.
    """
    latest: dict[NodeId, Instant] = {}
    for node, _, at in beats:
        latest[node] = max(at, latest.get(node, at))
    yield Statement(
        "UPDATE nodes SET last_beat_at = b.at FROM {beats} AS b WHERE nodes.id = b.id",
        {},
        {"beats": Relation(BEATS, sorted(latest.items()))},
    )
    holding = {node for node, holds, _ in beats if holds}
    if not holding:
        return [() for _ in beats]
    rows = yield Statement(
        "SELECT t.node_id, t.id, t.epoch FROM {nodes} AS n JOIN tasks t ON t.node_id = n.id WHERE t.holding = 1 UNION ALL "
        "SELECT m.node_id, m.task_id, m.epoch FROM {nodes} AS n JOIN members m ON m.node_id = n.id WHERE m.holding = 1",
        {},
        {"nodes": of_ids(holding)},
    )
    current = set(rows)
    return [
        tuple(hold for hold in holds if (node, hold.task, hold.epoch) not in current)
        for node, holds, _ in beats
    ]
