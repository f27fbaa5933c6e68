"""Pages of nodes by filter, and stored reliability of nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gpool.core.ids import NodeId, UserId
from gpool.core.model import (
    Availability,
    Span,
)
from gpool.core.reliability import ReliabilityRecord
from gpool.server.store.generated_rows import NodeRecordsRecord
from gpool.server.store.operations.nodes import MAX_PAGE_GPUS, RELIABILITY, load_nodes
from gpool.server.store.protocol import Operation, Relation, Statement, operation
from gpool.server.store.rows import (
    select,
)
from gpool.server.store.values import NodeRow


@operation
def reliability_records() -> Operation[Mapping[NodeId, ReliabilityRecord]]:
    rows = yield from select(
        NodeRecordsRecord, "SELECT node_id, up_us, losses, at FROM node_records"
    )
    return {row.node_id: ReliabilityRecord(Span(row.up_us), row.losses, row.at) for row in rows}


@operation
def put_reliability_records(found: Mapping[NodeId, ReliabilityRecord]) -> Operation[None]:
    rows = [(id_, each.up, each.losses_milli, each.at) for id_, each in sorted(found.items())]
    yield Statement(
        "INSERT INTO node_records (node_id, up_us, losses, at) SELECT r.node, r.up, r.losses, r.at FROM {found} AS r "
        "JOIN nodes n ON n.id = r.node WHERE true ON CONFLICT (node_id) DO UPDATE SET up_us = excluded.up_us, "
        "losses = excluded.losses, at = excluded.at WHERE excluded.at >= node_records.at",
        {},
        {"found": Relation(RELIABILITY, rows)},
    )


@operation
def forget_reliability_records() -> Operation[None]:
    yield Statement("DELETE FROM node_records WHERE node_id NOT IN (SELECT id FROM nodes)", {})


@dataclass(frozen=True, slots=True)
class NodeFilter:
    """None and the empty text do not filter.

    `search` is compared with names and, as a prefilter, with all of the offer past the first GPU model: the caller
    compares the models themselves. `viewer` does not see machines that others registered without an agent's key.
    """

    owner: UserId | None = None
    node: NodeId | None = None
    availability: Availability | None = None
    search: str = ""
    viewer: UserId | None = None


class NodeRows(NamedTuple):
    rows: tuple[NodeRow, ...]
    more: bool


class _GpuCount(NamedTuple):
    id: NodeId
    gpus: int


@operation
def node_page(wanted: NodeFilter, after: NodeId | None, limit: int) -> Operation[NodeRows]:
    """Nodes after `after`, at most `limit`, and at most `MAX_PAGE_GPUS` GPUs on more than one of them."""
    where = ["n.id > :after"]
    parameters: dict[str, int | str] = {"after": -1 if after is None else after}
    if wanted.owner is not None:
        where.append("n.owner_id = :owner")
        parameters["owner"] = wanted.owner
    if wanted.node is not None:
        where.append("n.id = :node")
        parameters["node"] = wanted.node
    if wanted.availability is not None:
        where.append("n.availability = :availability")
        parameters["availability"] = wanted.availability.value
    if wanted.search:
        where.append(
            "(LOWER(n.name) LIKE :name ESCAPE '!' OR LOWER(n.offer) LIKE :model ESCAPE '!')"
        )
        pattern = _escaped(wanted.search.lower())
        parameters |= {"name": f"%{pattern}%", "model": f'%"model":"%{pattern}%'}
    if wanted.viewer is not None:
        where.append("(n.public_key IS NOT NULL OR n.owner_id = :viewer)")
        parameters["viewer"] = wanted.viewer
    page = yield from select(
        _GpuCount,
        "SELECT n.id, (SELECT COUNT(*) FROM gpus g WHERE g.node_id = n.id AND g.gone = 0) AS gpus "  # noqa: S608
        f"FROM nodes n WHERE {' AND '.join(where)} ORDER BY n.id LIMIT :limit",
        {**parameters, "limit": limit},
    )
    if not page:
        return NodeRows((), False)
    shown, gpus = 1, page[0].gpus
    while shown < len(page) and gpus + page[shown].gpus <= MAX_PAGE_GPUS:
        gpus += page[shown].gpus
        shown += 1
    where.append("n.id <= :last")
    last = page[shown - 1].id
    rows = yield from load_nodes(" AND ".join(where), {**parameters, "last": last})
    return NodeRows(rows, more=len(page) == limit or shown < len(page))


def _escaped(text: str) -> str:
    """Literal part of a LIKE pattern with '!' as escape character, as the offer's JSON spells it."""
    literal = json.dumps(text, ensure_ascii=False)[1:-1]
    return literal.replace("!", "!!").replace("%", "!%").replace("_", "!_")
