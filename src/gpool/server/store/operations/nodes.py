"""Nodes: their GPUs, join invites, allowed users and reliability records.
One file because joining, connecting, lending and listing share `_put_gpus` and `load_nodes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gpool.core.errors import AlreadyJoined, Conflict, Forbidden, Invalid, NotFound
from gpool.core.gpu_verification import UNPROVEN
from gpool.core.ids import GpuId, NodeId, UserId
from gpool.core.model import (
    SECOND,
    Audience,
    Availability,
    Gpu,
    Health,
    Instant,
    Offer,
    Permission,
    Span,
)
from gpool.core.quotas import NO_OWNER_QUOTA, OwnerQuota
from gpool.server.store.generated_rows import InvitesRecord, NodesRecord
from gpool.server.store.operations.identity.users import permissions_from
from gpool.server.store.protocol import Operation, Relation, Relations, Statement, operation
from gpool.server.store.rows import (
    NONE,
    STORED_NODE,
    StoredNode,
    columns,
    exists,
    node_row,
    of_names,
    offer_from,
    offer_text,
    select,
    select_pairs,
    values,
)
from gpool.server.store.values import NodeCredentials, NodeRow

GPU_COLUMNS = (("id", "int"), ("uuid", "text"), ("position", "int"), ("ails", "text"))
RELIABILITY = (("node", "int"), ("up", "int"), ("losses", "int"), ("at", "int"))
ME, USER, TEAM = "me", "user:", "team:"
KEPT_AFTER = Span(3600 * SECOND)
"""Age of a GPU's binding from which on the GPU is kept when it leaves the offer."""
MAX_GONE = 1024
"""GPUs of one node that are kept after they left the offer."""
MAX_PAGE_GPUS = 1024
"""GPUs on one page of nodes, unless its first node has more: each takes some 40 microseconds of the loop."""
INVITE = columns(InvitesRecord, InvitesRecord, "i")


class _NodeAccount(NamedTuple):
    id: NodeId
    owner_id: UserId
    name: str
    availability: str
    public_key: str | None


class _OwnerAccount(NamedTuple):
    permissions: str | None  # None: no such account (the nodes of simulations)
    disabled_at: Instant | None

    @property
    def may_lend(self) -> bool:
        if self.permissions is None:
            return True
        return self.disabled_at is None and PROVIDER in self.permissions.split(",")


CREDENTIALS = columns(_NodeAccount, NodesRecord, "n")
PROVIDER = Permission.PROVIDER.value
MAY_NOT_LEND = (
    "the account of this node's owner is disabled, or lacks the permission 'provider'; "
    "ask an operator of the pool"
)


class _UnusableGpu(NamedTuple):
    node_id: NodeId
    position: int
    flagged: str | None
    unproven: str | None
    verdict: str | None
    is_withheld: int


class _NamedId(NamedTuple):
    name: str
    id: int


class _OwnerTeam(NamedTuple):
    user_id: UserId
    team_id: int


class _GpuOfNode(NamedTuple):
    id: GpuId
    node_id: NodeId
    position: int


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
    quota: OwnerQuota = NO_OWNER_QUOTA,
) -> Operation[NodeCredentials]:
    """Create a node of the invite's owner or of `owner`. With a public key, `secret_hash` may be ""."""
    if not secret_hash and public_key is None:
        raise Invalid("a node needs a key or a secret")
    if public_key is not None:
        yield from _require_unused_key(public_key)
    if invite_hash is not None:
        invites = yield from select(
            InvitesRecord,
            f"SELECT {INVITE} FROM invites i WHERE i.hashed = :hashed /*postgresql FOR UPDATE*/",  # noqa: S608
            {"hashed": invite_hash},
        )
        owner = _inviter(invites, at)
        inviters = yield from select(
            _OwnerAccount,
            "SELECT u.permissions, u.disabled_at FROM users u WHERE u.id = :owner",
            {"owner": owner},
        )
        if not all(inviter.may_lend for inviter in inviters):
            raise Forbidden("the account that made this invite may not lend; ask an operator")
    if owner is None:
        raise Forbidden("a node joins with an invite or with its owner's key; ask for a join link")
    taken = yield from exists(
        "SELECT 1 FROM nodes WHERE owner_id = :owner AND name = :name",
        {"owner": owner, "name": name},
    )
    if taken:
        raise Conflict(f"you have a node named {name!r} already; choose another name or remove it")
    yield from _check_quota(owner, node_id, quota, len(offer.gpus), is_new=True)
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
    yield from _put_gpus(node_id, owner, gpus, at)
    return NodeCredentials(node_id, owner, name, Availability.AVAILABLE, public_key)


class _JoinedNode(NamedTuple):
    name: str
    owner: str | None


def _require_unused_key(public_key: str) -> Operation[None]:
    """Checked before the invite: a machine that is a node does not use it up."""
    rows = yield from select(
        _JoinedNode,
        "SELECT n.name, u.name FROM nodes n LEFT JOIN users u ON u.id = n.owner_id WHERE n.public_key = :key",
        {"key": public_key},
    )
    for row in rows:
        raise AlreadyJoined(
            f"this machine is the node {row.name!r} of {row.owner or 'an unknown account'} already; "
            "remove that node first to join for somebody else"
        )


def _inviter(invites: list[InvitesRecord], at: Instant) -> UserId:
    for invite in invites:
        if invite.used_at is not None:
            raise Forbidden("this invite was used already; ask the owner for a new join link")
        if invite.expires_at <= at:
            raise Forbidden("this invite has expired; ask the owner for a new join link")
        return invite.owner_id
    raise Forbidden("this invite is not known here; ask the owner for a new join link")


def _gpu_rows(offer: Offer, gpu_ids: Sequence[int]) -> Relation:
    if len({gpu.uuid for gpu in offer.gpus}) != len(offer.gpus):
        raise Invalid("the offer names a GPU twice; each needs a uuid of its own")
    pairs = zip(gpu_ids, offer.gpus, strict=True)
    return Relation(
        GPU_COLUMNS, [(number, gpu.uuid, gpu.index, _ailing(gpu)) for number, gpu in pairs]
    )


def _ailing(gpu: Gpu) -> str | None:
    return (gpu.ails or "sick") if gpu.health is Health.QUARANTINED else None


def _check_quota(
    owner: UserId, node: NodeId, quota: OwnerQuota, gpus: int, *, is_new: bool
) -> Operation[None]:
    """Refuse a node or an offer past the owner's quota. Operators have none: they run the pool."""
    if quota.nodes is None and quota.gpus is None:
        return
    texts = yield from values(
        str, "SELECT permissions FROM users WHERE id = :owner", {"owner": owner}
    )
    if any(Permission.OPERATOR in permissions_from(text) for text in texts):
        return
    if is_new and quota.nodes is not None:
        [count] = yield from values(
            int, "SELECT COUNT(*) FROM nodes WHERE owner_id = :owner", {"owner": owner}
        )
        if count >= quota.nodes:
            raise Forbidden(
                f"the owner has {count} of {quota.nodes} nodes; remove one, or ask an operator for more"
            )
    if gpus and quota.gpus is not None:
        [others] = yield from values(
            int,
            "SELECT COUNT(*) FROM gpus g JOIN nodes n ON n.id = g.node_id "
            "WHERE n.owner_id = :owner AND g.gone = 0 AND n.id <> :node",
            {"owner": owner, "node": node},
        )
        if others + gpus > quota.gpus:
            raise Forbidden(
                f"the owner's other nodes have {others} of {quota.gpus} GPUs; {gpus} more do not fit. "
                "Offer fewer, or ask an operator for more"
            )


def _put_gpus(node: NodeId, owner: UserId, gpus: Relation, at: Instant) -> Operation[None]:
    """Store the GPUs of an offer and mark others as gone. A returning GPU keeps its id and availability, unless it left
    soon after it came (`_forget_gone`).
    """
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
    yield from _forget_gone(node, owner, at)


def _forget_gone(node: NodeId, owner: UserId, at: Instant) -> Operation[None]:
    """Delete GPUs that left the offer, with their bindings, so that changing offers do not fill the tables.

    Kept are withdrawn, quarantined, measured and verified GPUs and those bound for `KEPT_AFTER`, the newest `MAX_GONE`.
    """
    gone = yield from values(
        str, "SELECT uuid FROM gpus WHERE node_id = :node AND gone = 1 LIMIT 1", {"node": node}
    )
    if not gone:
        return
    forgotten = yield from values(
        str,
        "DELETE FROM gpus WHERE node_id = :node AND gone = 1 AND (id IN ("
        "SELECT g.id FROM gpus g WHERE g.node_id = :node AND g.gone = 1 ORDER BY g.id DESC LIMIT 1000000 OFFSET :most"
        ") OR (available = 1 AND quarantined IS NULL AND measured IS NULL AND verdict IS NULL AND NOT EXISTS ("
        "SELECT 1 FROM gpu_bindings b WHERE b.uuid = gpus.uuid AND b.owner_id = :owner "
        "AND (b.bound_at <= :before OR b.settled_at IS NOT NULL)))) RETURNING uuid",
        {"node": node, "owner": owner, "before": at - KEPT_AFTER, "most": MAX_GONE},
    )
    if forgotten:
        yield Statement(
            "DELETE FROM gpu_bindings WHERE uuid IN (SELECT name FROM {forgotten} AS f) AND owner_id = :owner "
            "AND settled_at IS NULL AND NOT EXISTS (SELECT 1 FROM gpus g JOIN nodes n ON n.id = g.node_id "
            "WHERE g.uuid = gpu_bindings.uuid AND n.owner_id = :owner)",
            {"owner": owner},
            {"forgotten": of_names(forgotten)},
        )


def _credentials(where: str, **parameters: int | str) -> Operation[NodeCredentials | None]:
    rows = yield from select_pairs(
        _NodeAccount,
        _OwnerAccount,
        f"SELECT {CREDENTIALS}, u.permissions, u.disabled_at FROM nodes n "  # noqa: S608
        f"LEFT JOIN users u ON u.id = n.owner_id WHERE {where}",
        parameters,
    )
    for row, owner in rows:
        return NodeCredentials(
            row.id,
            row.owner_id,
            row.name,
            Availability(row.availability),
            row.public_key,
            owner.may_lend,
        )
    return None


@operation
def node_of_invite(hashed: str) -> Operation[NodeId | None]:
    rows = yield from select(
        InvitesRecord,
        f"SELECT {INVITE} FROM invites i WHERE i.hashed = :hashed",  # noqa: S608
        {"hashed": hashed},
    )
    return rows[0].node_id if rows else None


@operation
def keyless_node(owner: UserId, name: str) -> Operation[NodeId | None]:
    """Machine of this name that was registered without an agent's key."""
    found = yield from values(
        NodeId,
        "SELECT id FROM nodes WHERE owner_id = :owner AND name = :name AND public_key IS NULL",
        {"owner": owner, "name": name},
    )
    return found[0] if found else None


@operation
def node_by_key(public_key: str) -> Operation[NodeCredentials | None]:
    return (yield from _credentials("n.public_key = :key", key=public_key))


@operation
def credentials_of(node: NodeId) -> Operation[NodeCredentials | None]:
    return (yield from _credentials("n.id = :node", node=node))


@operation
def greet(
    node: NodeId,
    offer: Offer,
    gpu_ids: Sequence[int],
    at: Instant,
    quota: OwnerQuota = NO_OWNER_QUOTA,
) -> Operation[None]:
    """Record the offer of a node that connects, and its heartbeat."""
    owners = yield from values(
        UserId, "SELECT owner_id FROM nodes WHERE id = :node", {"node": node}
    )
    if not owners:
        raise NotFound("this node was removed; join again with a new link")
    [owner] = owners
    yield from _check_quota(owner, node, quota, len(offer.gpus), is_new=False)
    gpus = _gpu_rows(offer, gpu_ids)
    yield Statement(
        "UPDATE nodes SET offer = :offer, last_beat_at = :at WHERE id = :node",
        {"offer": offer_text(offer), "at": at, "node": node},
    )
    yield from _put_gpus(node, owner, gpus, at)


def load_nodes(
    where: str, parameters: Mapping[str, int | str], relations: Relations = NONE
) -> Operation[tuple[NodeRow, ...]]:
    """Nodes with the indexes of GPUs that must not be leased (withheld, sick or flagged), and of unproven ones. `where`
    is about `n`.
    """
    withheld: dict[NodeId, set[int]] = {}
    flagged: dict[NodeId, set[int]] = {}
    unproven: dict[NodeId, set[int]] = {}
    gpus = yield from select(
        _UnusableGpu,
        "SELECT g.node_id, g.position, g.flagged, g.unproven, g.verdict, CASE WHEN g.available = 0 "  # noqa: S608
        "OR g.quarantined IS NOT NULL THEN 1 ELSE 0 END AS is_withheld FROM gpus g JOIN nodes n ON n.id = g.node_id "
        f"WHERE g.gone = 0 AND (g.available = 0 OR g.flagged IS NOT NULL OR g.unproven IS NOT NULL "
        f"OR g.quarantined IS NOT NULL) AND {where}",
        parameters,
        relations,
    )
    for gpu in gpus:
        is_unproven = gpu.unproven is not None and gpu.verdict in UNPROVEN
        is_flagged = gpu.flagged is not None or (gpu.unproven is not None and not is_unproven)
        if is_unproven:
            unproven.setdefault(gpu.node_id, set()).add(gpu.position)
        if is_flagged:
            flagged.setdefault(gpu.node_id, set()).add(gpu.position)
        if is_flagged or gpu.is_withheld:
            withheld.setdefault(gpu.node_id, set()).add(gpu.position)
    rows = yield from select(
        StoredNode,
        f"SELECT {STORED_NODE} FROM nodes n WHERE {where} ORDER BY n.id",  # noqa: S608
        parameters,
        relations,
    )
    known = yield from _known_names(offer_from(row.offer) for row in rows)
    teams: dict[UserId, set[int]] = {}
    joined = yield from select(
        _OwnerTeam,
        "SELECT DISTINCT m.user_id, m.team_id FROM memberships m JOIN nodes n ON n.owner_id = m.user_id "  # noqa: S608
        f"WHERE {where}",
        parameters,
        relations,
    )
    for member in joined:
        teams.setdefault(member.user_id, set()).add(member.team_id)
    return tuple(
        node_row(
            row,
            frozenset(withheld.get(row.id, ())),
            frozenset(flagged.get(row.id, ())),
            *_named_accounts(offer_from(row.offer), known),
            owner_teams=frozenset(teams.get(row.owner_id, ())),
            unproven=frozenset(unproven.get(row.id, ())),
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
    found = yield from values(NodeId, "SELECT node_id FROM gpus WHERE id = :gpu", {"gpu": gpu_id})
    if not found or (yield from _one(found[0], owner)) is None:
        return None
    yield Statement(
        "UPDATE gpus SET available = :available WHERE id = :gpu",
        {"available": int(available), "gpu": gpu_id},
    )
    return (yield from _one(found[0], owner))


@operation
def remove_node(node: NodeId, owner: UserId | None) -> Operation[bool]:
    owners = yield from values(
        UserId,
        "SELECT owner_id FROM nodes WHERE id = :node /*postgresql FOR UPDATE*/",
        {"node": node},
    )
    if not owners or (owner is not None and owners != [owner]):
        return False
    holds = yield from exists(
        "SELECT 1 FROM tasks WHERE node_id = :node AND holding = 1 UNION ALL "
        "SELECT 1 FROM members WHERE node_id = :node AND holding = 1 LIMIT 1",
        {"node": node},
    )
    if holds:
        raise Conflict("this node still holds leases; drain it first, or remove it with force")
    for sql in (
        "DELETE FROM gpus WHERE node_id = :node",
        "DELETE FROM node_connections WHERE node_id = :node",
        "DELETE FROM rules WHERE kind IN ('certified', 'cordon') AND id = :node",
        "DELETE FROM nodes WHERE id = :node",
    ):
        yield Statement(sql, {"node": node})
    return True


@operation
def gpus() -> Operation[tuple[tuple[GpuId, NodeId, int], ...]]:
    rows = yield from select(
        _GpuOfNode,
        "SELECT id, node_id, position FROM gpus WHERE gone = 0 ORDER BY node_id, position",
    )
    return tuple((row.id, row.node_id, row.position) for row in rows)


# ---- users that a node is offered to

_Names = tuple[Mapping[str, int], Mapping[str, int]]
"""Ids of users and of teams by name."""


def _known_names(offers: Iterable[Offer]) -> Operation[_Names]:
    """Users and teams that these offers name; no statement where none does.

    A name stands for the first team that had it (`team_names`), also after a rename: nobody else can take the name and
    with it the node. A deleted team is not found.
    """
    words = {word for offer in offers for word in (*offer.audience, *offer.free_for)}
    users = yield from _ids_of("JOIN users f ON f.name = w.name", USER, words)
    had = "JOIN team_names h ON h.name = w.name JOIN teams f ON f.id = h.team_id"
    teams = yield from _ids_of(had, TEAM, words)
    return users, teams


def _ids_of(joined: str, prefix: str, words: set[str]) -> Operation[dict[str, int]]:
    names = of_names(word.removeprefix(prefix) for word in words if word.startswith(prefix))
    if not names.rows:
        return {}
    rows = yield from select(
        _NamedId,
        f"SELECT w.name, f.id FROM {{names}} AS w {joined}",  # noqa: S608
        {},
        {"names": names},
    )
    return {row.name: row.id for row in rows}


def _named_accounts(
    offer: Offer, known: _Names
) -> tuple[Audience | None, Audience | None, tuple[str, ...]]:
    """Users and teams that are allowed, those for whom the node is free, and the names that are not known."""
    allowed, problems = _accounts(offer.audience, known, "its audience")
    free_for, more = _accounts(offer.free_for, known, "its list of whom it is free for")
    return allowed, free_for, problems + more


def _accounts(
    words: tuple[str, ...], known: _Names, where: str
) -> tuple[Audience | None, tuple[str, ...]]:
    if not words:
        return None, ()
    users, teams = known
    found_users, found_teams, problems = set(), set(), []
    for word in words:
        name = word.partition(":")[2]
        if word == ME:
            continue  # tasks of the node's owner are always admitted
        if word.startswith(USER) and name in users:
            found_users.add(users[name])
        elif word.startswith(TEAM) and name in teams:
            found_teams.add(teams[name])
        elif word.startswith((USER, TEAM)):
            problems.append(f"{where} names {word}, which is not known here")
        else:
            problems.append(f"{where} holds {word!r}; write me, user:NAME or team:NAME")
    return Audience(frozenset(found_users), frozenset(found_teams)), tuple(problems)


# ---- reliability records; `core.reliability` defines them


# ---- pages
