"""How nodes fared: written now and then, off every hot path. What the numbers mean, `core.merits` knows."""

from __future__ import annotations

from collections.abc import Mapping

from gpool.core.ids import NodeId
from gpool.core.model import Instant, Span
from gpool.core.trust.reliability import ReliabilityRecord
from gpool.server.store.operation import operation
from gpool.server.store.protocol import Operation, Relation, Statement

COLUMNS = (("node", "int"), ("up", "int"), ("losses", "int"), ("at", "int"))


@operation
def records() -> Operation[Mapping[NodeId, ReliabilityRecord]]:
    rows = yield Statement("SELECT node_id, up_us, losses, at FROM node_records", {})
    return {
        NodeId(row[0]): ReliabilityRecord(Span(row[1]), row[2], Instant(row[3])) for row in rows
    }


@operation
def put_records(found: Mapping[NodeId, ReliabilityRecord]) -> Operation[None]:
    """Of nodes that are still there; what was written later stays."""
    rows = [(id_, each.up, each.losses_milli, each.at) for id_, each in sorted(found.items())]
    yield Statement(
        "INSERT INTO node_records (node_id, up_us, losses, at) SELECT r.node, r.up, r.losses, r.at FROM {found} AS r "
        "JOIN nodes n ON n.id = r.node WHERE true ON CONFLICT (node_id) DO UPDATE SET up_us = excluded.up_us, "
        "losses = excluded.losses, at = excluded.at WHERE excluded.at >= node_records.at",
        {},
        {"found": Relation(COLUMNS, rows)},
    )


@operation
def forget_records() -> Operation[None]:
    """Of nodes that were removed."""
    yield Statement("DELETE FROM node_records WHERE node_id NOT IN (SELECT id FROM nodes)", {})
