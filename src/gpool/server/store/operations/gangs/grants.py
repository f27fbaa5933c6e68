"""Gangs as a plan grants them: whole, or not at all. The members' rows are written with the lease of their task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gpool.core.ids import TaskId
from gpool.core.model import Offer
from gpool.core.scheduler.state.events import GangPart, Placement
from gpool.server.store.protocol import Operation, Relation, Row, Statement
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


def parts_of(place: Placement) -> tuple[GangPart, ...]:
    """By rank."""
    return (GangPart(place.node, place.allocation), *place.members)


def is_whole(place: Placement) -> bool:
    """One lease for a task of one node; for a gang one task, and as many different nodes as it asks for."""
    if not place.members:
        return place.shape.requirements.nodes <= 1
    nodes = {part.node for part in parts_of(place)}
    return (
        len(place.grants) == 1
        and len(nodes) == len(place.members) + 1 == place.shape.requirements.nodes
    )


def offers_for(places: Sequence[Placement]) -> Operation[dict[int, Offer]]:
    """What the nodes of these gangs offer now."""
    nodes = of_ids(part.node for place in places if place.members for part in parts_of(place))
    if not nodes.rows:
        return {}
    rows = yield Statement(
        "SELECT n.id, n.offer FROM {nodes} AS i JOIN nodes n ON n.id = i.id", {}, {"nodes": nodes}
    )
    return {row[0]: offer_from(row[1]) for row in rows}


def can_meet(place: Placement, offers: Mapping[int, Offer]) -> bool:
    """Whether its members reach each other, by what their nodes offer; a task of one node has nobody to meet."""
    if not place.members:
        return True
    found = [offers[part.node] for part in parts_of(place)]
    site = found[0].site
    return bool(site) and all(
        offer.site == site and offer.address and offer.gang_port for offer in found
    )


def write_granted(
    granted: Sequence[Placement], offers: Mapping[int, Offer], secrets: Mapping[TaskId, bytes]
) -> Operation[dict[TaskId, Peers]]:
    """The members of gangs whose tasks were leased just now, and where each is found."""
    peers: dict[TaskId, Peers] = {}
    rows: list[Row] = []
    shared: list[Row] = []
    for place in granted:
        (grant,) = place.grants
        found = []
        for rank, part in enumerate(parts_of(place)):
            offer, number = offers[part.node], part.allocation.number
            peer = (offer.address, offer.gang_port + number)
            found.append(peer)
            text = allocation_text(part.allocation)
            rows.append((grant.task, rank, grant.epoch, part.node, number, text, *peer))
        peers[grant.task] = tuple(found)
        shared.append((grant.task, grant.epoch, secrets.get(grant.task, b"")))
    yield from forget("members", peers)
    yield from forget("gangs", peers)
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


def forget(table: str, tasks: Iterable[int]) -> Operation[None]:
    """What `table` has of these gangs."""
    yield Statement(
        f"DELETE FROM {table} WHERE task_id IN (SELECT id FROM {{tasks}} AS i)",  # noqa: S608
        {},
        {"tasks": of_ids(tasks)},
    )
