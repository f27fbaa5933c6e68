"""Grants of gangs: all members or none, written with the lease of their task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import Offer
from gpool.core.scheduler.state.events import GangPart, Placement
from gpool.server.store.protocol import Operation, Relation, Row, Statement
from gpool.server.store.queries import select
from gpool.server.store.rows import allocation_text, of_ids, offer_from
from gpool.server.store.values import Peers

SECRETS = (("task", "int"), ("epoch", "int"), ("secret", "blob"))
GRANTED = (
    ("task", "int"),
    ("rank", "int"),
    ("epoch", "int"),
    ("node", "int"),
    ("number", "int"),
    ("allocation", "text"),
    ("host", "text"),
    ("port", "int"),
)


class _NodeOffer(NamedTuple):
    id: NodeId
    offer: str


def members_of(place: Placement) -> tuple[GangPart, ...]:
    return (GangPart(place.node, place.allocation), *place.members)


def is_whole(place: Placement) -> bool:
    """Whether a place has as many different nodes as its task asks for; of a gang, for one task only."""
    if not place.members:
        return place.shape.requirements.nodes <= 1
    nodes = {member.node for member in members_of(place)}
    return (
        len(place.grants) == 1
        and len(nodes) == len(place.members) + 1 == place.shape.requirements.nodes
    )


def offers_for(places: Sequence[Placement]) -> Operation[dict[NodeId, Offer]]:
    nodes = of_ids(member.node for place in places if place.members for member in members_of(place))
    if not nodes.rows:
        return {}
    rows = yield from select(
        _NodeOffer,
        "SELECT n.id, n.offer FROM {nodes} AS i JOIN nodes n ON n.id = i.id",
        {},
        {"nodes": nodes},
    )
    return {row.id: offer_from(row.offer) for row in rows}


def can_connect(place: Placement, offers: Mapping[NodeId, Offer]) -> bool:
    if not place.members:
        return True
    found = [offers[member.node] for member in members_of(place)]
    site = found[0].site
    return bool(site) and all(
        offer.site == site and offer.address and offer.gang_port for offer in found
    )


def write_granted(
    granted: Sequence[Placement], offers: Mapping[NodeId, Offer], secrets: Mapping[TaskId, bytes]
) -> Operation[dict[TaskId, Peers]]:
    peers: dict[TaskId, Peers] = {}
    rows: list[Row] = []
    shared: list[Row] = []
    for place in granted:
        (grant,) = place.grants
        found = []
        for rank, member in enumerate(members_of(place)):
            offer, number = offers[member.node], member.allocation.number
            peer = (offer.address, offer.gang_port + number)
            found.append(peer)
            text = allocation_text(member.allocation)
            rows.append((grant.task, rank, grant.epoch, member.node, number, text, *peer))
        peers[grant.task] = tuple(found)
        shared.append((grant.task, grant.epoch, secrets.get(grant.task, b"")))
    yield from delete_rows("members", peers)
    yield from delete_rows("gangs", peers)
    yield Statement(
        "INSERT INTO gangs (task_id, epoch, secret_sealed) SELECT g.task, g.epoch, g.secret FROM {shared} AS g",
        {},
        {"shared": Relation(SECRETS, shared)},
    )
    yield Statement(
        "INSERT INTO members (task_id, rank, epoch, node_id, allocation_number, allocation, host, port, holding) "
        "SELECT m.task, m.rank, m.epoch, m.node, m.number, m.allocation, m.host, m.port, 1 FROM {members} AS m",
        {},
        {"members": Relation(GRANTED, rows)},
    )
    return peers


def delete_rows(table: str, tasks: Iterable[TaskId]) -> Operation[None]:
    yield Statement(
        f"DELETE FROM {table} WHERE task_id IN (SELECT id FROM {{tasks}} AS i)",  # noqa: S608
        {},
        {"tasks": of_ids(tasks)},
    )
