"""Nodes, their GPUs, and the invites they join with. An invite is redeemed once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpool.core.errors import Conflict, Forbidden, Invalid, NotFound
from gpool.core.ids import GpuId, NodeId, UserId
from gpool.core.model import Availability, Gpu, Health, Instant, Offer
from gpool.server.store.operation import operation
from gpool.server.store.operations.nodes.allowed_users import known_names, resolved
from gpool.server.store.protocol import Operation, Relation, Row, Statement
from gpool.server.store.rows import NODE_COLUMNS, node_row, offer_from, offer_text
from gpool.server.store.values import NodeCredentials, NodeRow

OFFER = NODE_COLUMNS.split(", ").index("n.offer")
GPU_COLUMNS = (("id", "int"), ("uuid", "text"), ("position", "int"), ("ails", "text"))


@operation
def create_invite(hashed: str, owner: UserId, expires_at: Instant, at: Instant) -> Operation[None]:
    yield Statement(
        "INSERT INTO invites (hashed, owner_id, expires_at, created_at) VALUES (:hashed, :owner, :expires_at, :at)",
        {"hashed": hashed, "owner": owner, "expires_at": expires_at, "at": at},
    )


@operation
def create_node(
    node_id: NodeId,
    name: str,
    owner: UserId | None,
    invite_hash: str | None,
    secret_hash: str,
    offer: Offer,
    gpu_ids: Sequence[int],
    at: Instant,
    public_key: str | None = None,
) -> Operation[NodeCredentials]:
    """With a public key the secret may be left out ("")."""
    if not secret_hash and public_key is None:
        raise Invalid("a node needs a key or a secret")
    if invite_hash is not None:
        invited = yield Statement(
            "SELECT owner_id, expires_at, used_at FROM invites WHERE hashed = :hashed /*postgresql FOR UPDATE*/",
            {"hashed": invite_hash},
        )
        owner = _inviter(invited, at)
    if owner is None:
        raise Forbidden("a node joins with an invite or with its owner's key; ask for a join link")
    taken = yield Statement(
        "SELECT 1 FROM nodes WHERE owner_id = :owner AND name = :name",
        {"owner": owner, "name": name},
    )
    if taken:
        raise Conflict(f"you have a node named {name!r} already; choose another name or remove it")
    if public_key is not None:
        known = yield Statement("SELECT 1 FROM nodes WHERE public_key = :key", {"key": public_key})
        if known:
            raise Conflict("a node with this key has joined already; make a new key")
    gpus = _gpu_rows(offer, gpu_ids)
    yield Statement(
        "INSERT INTO nodes (id, owner_id, name, secret_hash, offer, availability, created_at, public_key) "
        "VALUES (:id, :owner, :name, :secret_hash, :offer, 'available', :at, :key)",
        {
            "id": node_id,
            "owner": owner,
            "name": name,
            "secret_hash": secret_hash or f"none {public_key}",  # no hash looks like this
            "key": public_key,
            "offer": offer_text(offer),
            "at": at,
        },
    )
    if invite_hash is not None:
        yield Statement(
            "UPDATE invites SET used_at = :at, node_id = :node WHERE hashed = :hashed",
            {"at": at, "node": node_id, "hashed": invite_hash},
        )
    yield from _put_gpus(node_id, gpus)
    return NodeCredentials(node_id, owner, name, Availability.AVAILABLE, public_key)


def _inviter(invited: list[Row], at: Instant) -> UserId:
    for owner, expires_at, used_at in invited:
        if used_at is not None:
            raise Forbidden("this invite was used already; ask the owner for a new join link")
        if expires_at <= at:
            raise Forbidden("this invite has expired; ask the owner for a new join link")
        return UserId(owner)
    raise Forbidden("this invite is not known here; ask the owner for a new join link")


def _gpu_rows(offer: Offer, gpu_ids: Sequence[int]) -> Relation:
    if len({gpu.uuid for gpu in offer.gpus}) != len(offer.gpus):
        raise Invalid("the offer names a GPU twice; each needs a uuid of its own")
    pairs = zip(gpu_ids, offer.gpus, strict=True)
    return Relation(
        GPU_COLUMNS, [(number, gpu.uuid, gpu.index, _ailing(gpu)) for number, gpu in pairs]
    )


def _ailing(gpu: Gpu) -> str | None:
    """What a sick GPU is put in quarantine for; somebody has to say when it is well again."""
    return (gpu.ails or "sick") if gpu.health is Health.QUARANTINED else None


def _put_gpus(node: NodeId, gpus: Relation) -> Operation[None]:
    """A GPU keeps its id and its owner's wish when it comes back; what is not named any more is gone."""
    yield Statement("UPDATE gpus SET gone = 1 WHERE node_id = :node", {"node": node})
    if gpus.rows:
        yield Statement(
            "INSERT INTO gpus (id, node_id, uuid, position, quarantined) "
            "SELECT g.id, CAST(:node AS BIGINT), g.uuid, g.position, g.ails FROM {gpus} AS g WHERE true "
            "ON CONFLICT (node_id, uuid) DO UPDATE SET position = excluded.position, gone = 0, "
            "quarantined = COALESCE(gpus.quarantined, excluded.quarantined)",
            {"node": node},
            {"gpus": gpus},
        )


def _credentials(where: str, **parameters: int | str) -> Operation[NodeCredentials | None]:
    rows = yield Statement(
        f"SELECT id, owner_id, name, availability, public_key FROM nodes WHERE {where}",  # noqa: S608
        parameters,
    )
    for number, owner, name, availability, key in rows:
        return NodeCredentials(NodeId(number), UserId(owner), name, Availability(availability), key)
    return None


@operation
def node_of_invite(hashed: str) -> Operation[NodeId | None]:
    """The node that joined with it."""
    rows = yield Statement("SELECT node_id FROM invites WHERE hashed = :hashed", {"hashed": hashed})
    return NodeId(rows[0][0]) if rows and rows[0][0] is not None else None


@operation
def node_by_key(public_key: str) -> Operation[NodeCredentials | None]:
    return (yield from _credentials("public_key = :key", key=public_key))


@operation
def credentials_of(node: NodeId) -> Operation[NodeCredentials | None]:
    """With the key a node must prove it has."""
    return (yield from _credentials("id = :node", node=node))


@operation
def greet(node: NodeId, offer: Offer, gpu_ids: Sequence[int], at: Instant) -> Operation[None]:
    known = yield Statement("SELECT 1 FROM nodes WHERE id = :node", {"node": node})
    if not known:
        raise NotFound("this node was removed; join again with a new link")
    gpus = _gpu_rows(offer, gpu_ids)
    yield Statement(
        "UPDATE nodes SET offer = :offer, last_beat_at = :at WHERE id = :node",
        {"offer": offer_text(offer), "at": at, "node": node},
    )
    yield from _put_gpus(node, gpus)


def load_nodes(where: str, parameters: Mapping[str, int | str]) -> Operation[tuple[NodeRow, ...]]:
    """Nodes with the indexes of the GPUs that take nothing: withheld, sick, or flagged. `where` speaks of `n`."""
    withheld: dict[int, set[int]] = {}
    flagged: dict[int, set[int]] = {}
    rows = yield Statement(
        "SELECT g.node_id, g.position, COALESCE(g.flagged, g.unproven) FROM gpus g JOIN nodes n ON n.id = g.node_id "  # noqa: S608
        f"WHERE g.gone = 0 AND (g.available = 0 OR g.flagged IS NOT NULL OR g.unproven IS NOT NULL "
        f"OR g.quarantined IS NOT NULL) AND {where}",
        parameters,
    )
    for number, position, why in rows:
        withheld.setdefault(number, set()).add(position)
        if why is not None:
            flagged.setdefault(number, set()).add(position)
    rows = yield Statement(
        f"SELECT {NODE_COLUMNS} FROM nodes n WHERE {where} ORDER BY n.id",  # noqa: S608
        parameters,
    )
    known = yield from known_names(offer_from(row[OFFER]) for row in rows)
    return tuple(
        node_row(
            row,
            frozenset(withheld.get(row[0], ())),
            frozenset(flagged.get(row[0], ())),
            *resolved(offer_from(row[OFFER]), known),
        )
        for row in rows
    )


@operation
def nodes(owner: UserId | None = None) -> Operation[tuple[NodeRow, ...]]:
    if owner is None:
        return (yield from load_nodes("true", {}))
    return (yield from load_nodes("n.owner_id = :owner", {"owner": owner}))


@operation
def node(id: NodeId) -> Operation[NodeRow | None]:
    return (yield from _one(id, None))


def _one(node: NodeId, owner: UserId | None) -> Operation[NodeRow | None]:
    if owner is None:
        found = yield from load_nodes("n.id = :node", {"node": node})
    else:
        found = yield from load_nodes(
            "n.id = :node AND n.owner_id = :owner", {"node": node, "owner": owner}
        )
    return found[0] if found else None


@operation
def set_availability(
    node: NodeId, owner: UserId | None, availability: Availability, at: Instant
) -> Operation[NodeRow | None]:
    if (yield from _one(node, owner)) is None:
        return None
    yield Statement(
        "UPDATE nodes SET availability = :availability, availability_at = :at WHERE id = :node",
        {"availability": availability.value, "at": at, "node": node},
    )
    return (yield from _one(node, owner))


@operation
def set_gpu_available(
    gpu_id: GpuId, owner: UserId | None, available: bool
) -> Operation[NodeRow | None]:
    rows = yield Statement("SELECT node_id FROM gpus WHERE id = :gpu", {"gpu": gpu_id})
    if not rows or (yield from _one(NodeId(rows[0][0]), owner)) is None:
        return None
    yield Statement(
        "UPDATE gpus SET available = :available WHERE id = :gpu",
        {"available": int(available), "gpu": gpu_id},
    )
    return (yield from _one(NodeId(rows[0][0]), owner))


@operation
def remove_node(node: NodeId, owner: UserId | None) -> Operation[bool]:
    locked = yield Statement(
        "SELECT owner_id FROM nodes WHERE id = :node /*postgresql FOR UPDATE*/", {"node": node}
    )
    if not locked or (owner is not None and locked[0][0] != owner):
        return False
    holds = yield Statement(
        "SELECT 1 FROM tasks WHERE node_id = :node AND holding = 1 UNION ALL "
        "SELECT 1 FROM members WHERE node_id = :node AND holding = 1 LIMIT 1",
        {"node": node},
    )
    if holds:
        raise Conflict("this node still holds leases; drain it first, then remove it")
    yield Statement("DELETE FROM gpus WHERE node_id = :node", {"node": node})
    yield Statement("DELETE FROM nodes WHERE id = :node", {"node": node})
    return True


@operation
def gpus() -> Operation[tuple[tuple[GpuId, NodeId, int], ...]]:
    rows = yield Statement(
        "SELECT id, node_id, position FROM gpus WHERE gone = 0 ORDER BY node_id, position"
    )
    return tuple((GpuId(row[0]), NodeId(row[1]), row[2]) for row in rows)


# ---- pages


@dataclass(frozen=True, slots=True)
class NodeFilter:
    """Which nodes a listing holds; None and the empty text do not filter.

    `search` is compared with names and, as a prefilter, with everything past the first GPU model of the offer: the
    caller compares the models themselves.
    """

    owner: UserId | None = None
    node: NodeId | None = None
    availability: Availability | None = None
    search: str = ""


@operation
def node_page(
    wanted: NodeFilter, after: NodeId | None, limit: int
) -> Operation[tuple[NodeRow, ...]]:
    """At most `limit` nodes with ids past `after`, ascending."""
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
    page = yield Statement(
        f"SELECT n.id FROM nodes n WHERE {' AND '.join(where)} ORDER BY n.id LIMIT :limit",  # noqa: S608
        {**parameters, "limit": limit},
    )
    if not page:
        return ()
    last = max(number for (number,) in page)
    where.append("n.id <= :last")
    return (yield from load_nodes(" AND ".join(where), {**parameters, "last": last}))


def _escaped(text: str) -> str:
    """The text as a literal part of a LIKE pattern with '!' as escape character, as the offer's JSON spells it."""
    literal = json.dumps(text, ensure_ascii=False)[1:-1]
    return literal.replace("!", "!!").replace("%", "!%").replace("_", "!_")
