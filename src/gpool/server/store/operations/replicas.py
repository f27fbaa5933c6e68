"""Replicas on PostgreSQL: rows that the change feed names, and the replica that has each node's connection.

Nothing here runs on SQLite, where one server has all connections. One file because the tables have no other users.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gpool.core.ids import BatchId, NodeId, SpecId, TaskId, UserId
from gpool.core.model import InputFile, Instant, TaskSpec, TaskStatus
from gpool.core.permissions import TeamId
from gpool.server.store.generated_rows import ReplicasRecord
from gpool.server.store.operations.identity.sealed_fields import secrets_to_open
from gpool.server.store.operations.leases import gang_members, leases
from gpool.server.store.operations.leases.connections import NodeLink
from gpool.server.store.operations.nodes import load_nodes
from gpool.server.store.operations.tasks.progress import manifests
from gpool.server.store.operations.tasks.storage import THIS, UploadReservation
from gpool.server.store.protocol import Operation, Relation, Statement, operation
from gpool.server.store.rows import columns, of_ids, select, spec_from, values
from gpool.server.store.sealing import PAYLOAD, SPEC_BODY, opened
from gpool.server.store.values import (
    NO_SECRETS,
    PREEMPTING,
    HeldGang,
    NodeRow,
    SealedSecrets,
)

REPLICA = columns(ReplicasRecord, ReplicasRecord, "r")
LEASED, QUEUED = TaskStatus.LEASED.value, TaskStatus.QUEUED.value

# ---- connections of nodes


class HeardNode(NamedTuple):
    """Node connected to another replica, with its last stored heartbeat."""

    node_id: NodeId
    replica_id: int
    last_beat_at: Instant | None


@operation
def begin_connection(node: NodeId, link: NodeLink, at: Instant) -> Operation[bool]:
    """Record the `Hello` of a node; False if a newer one was recorded. The node is not connected anywhere until
    `open_connection`: its GPUs may have to be withheld first.
    """
    found = yield from values(
        NodeId,
        "INSERT INTO node_connections (node_id, replica_id, boot, beat, connected_at) "
        "VALUES (:node, NULL, :boot, :beat, :at) ON CONFLICT (node_id) DO UPDATE SET "
        "replica_id = NULL, boot = excluded.boot, beat = excluded.beat, connected_at = excluded.connected_at "
        "WHERE (node_connections.boot, node_connections.beat) < (excluded.boot, excluded.beat) "
        "RETURNING node_id",
        {"node": node, "boot": link.boot, "beat": link.beat, "at": at},
    )
    return bool(found)


@operation
def open_connection(node: NodeId, link: NodeLink) -> Operation[bool]:
    """Record that the replica has the node's connection; False if a newer `Hello` was recorded meanwhile."""
    found = yield from values(
        NodeId,
        "UPDATE node_connections SET replica_id = :replica WHERE node_id = :node AND boot = :boot AND beat = :beat "
        "RETURNING node_id",
        {"node": node, "replica": link.replica, "boot": link.boot, "beat": link.beat},
    )
    return bool(found)


@operation
def disconnect(node: NodeId, link: NodeLink) -> Operation[None]:
    yield Statement(
        "UPDATE node_connections SET replica_id = NULL WHERE node_id = :node AND replica_id = :replica "
        "AND boot = :boot AND beat = :beat",
        {"node": node, "replica": link.replica, "boot": link.boot, "beat": link.beat},
    )


@operation
def disconnect_silent(node: NodeId) -> Operation[None]:
    """Close the connection of an expired node, whichever replica has it: that replica reads the row."""
    yield Statement(
        "UPDATE node_connections SET replica_id = NULL WHERE node_id = :node AND replica_id IS NOT NULL",
        {"node": node},
    )


@operation
def not_lending(connected: Collection[NodeId]) -> Operation[tuple[NodeId, ...]]:
    """Select the nodes whose owner may not lend any more."""
    found = yield from values(
        NodeId,
        "SELECT n.id FROM {nodes} AS i JOIN nodes n ON n.id = i.id JOIN users u ON u.id = n.owner_id "
        "WHERE u.disabled_at IS NOT NULL OR ',' || u.permissions || ',' NOT LIKE '%,provider,%'",
        {},
        {"nodes": of_ids(connected)},
    )
    return tuple(found)


@operation
def connected_elsewhere(replica: int) -> Operation[tuple[HeardNode, ...]]:
    rows = yield from select(
        HeardNode,
        "SELECT c.node_id, c.replica_id, n.last_beat_at FROM node_connections c JOIN nodes n ON n.id = c.node_id "
        "WHERE c.replica_id <> :replica",
        {"replica": replica},
    )
    return tuple(rows)


@operation
def holders(connected: Collection[NodeId]) -> Operation[tuple[NodeId, ...]]:
    """Select the nodes that hold leases."""
    found = yield from values(
        NodeId,
        "SELECT i.id FROM {nodes} AS i WHERE EXISTS (SELECT 1 FROM tasks t WHERE t.node_id = i.id AND t.holding = 1) "
        "OR EXISTS (SELECT 1 FROM members m WHERE m.node_id = i.id AND m.holding = 1)",
        {},
        {"nodes": of_ids(connected)},
    )
    return tuple(found)


# ---- proofs of nodes' requests


@operation
def take_proof(key: str, nonce: str, expires_at: Instant) -> Operation[bool]:
    """Record an accepted proof; False if a replica has accepted it before."""
    found = yield from values(
        str,
        "INSERT INTO used_proofs (key, nonce, expires_at) VALUES (:key, :nonce, :expires) "
        "ON CONFLICT (key, nonce) DO NOTHING RETURNING nonce",
        {"key": key, "nonce": nonce, "expires": expires_at},
    )
    return bool(found)


@operation
def forget_proofs(now: Instant) -> Operation[None]:
    """Delete proofs that their expiry rejects."""
    yield Statement("DELETE FROM used_proofs WHERE expires_at < :now", {"now": now})


# ---- parts of uploads


@operation
def begin_part(upload: UploadReservation, replica: int) -> Operation[bool]:
    """Let this replica write the next part of an upload; False while another one writes. Dead replicas have no row."""
    found = yield from values(
        int,
        f"UPDATE uploads SET writer = :replica WHERE {THIS} "  # noqa: S608
        "AND writer NOT IN (SELECT id FROM replicas WHERE id <> :replica) RETURNING number",
        _part(upload, replica),
    )
    return bool(found)


@operation
def end_part(upload: UploadReservation, replica: int) -> Operation[None]:
    sql = f"UPDATE uploads SET writer = 0 WHERE {THIS} AND writer = :replica"  # noqa: S608
    yield Statement(sql, _part(upload, replica))


def _part(upload: UploadReservation, replica: int) -> dict[str, int | str]:
    key: dict[str, int | str] = {"uploader": upload.uploader, "sha256": upload.sha256}
    return key | {"number": upload.number, "replica": replica}


# ---- replicas


@operation
def replicas() -> Operation[tuple[ReplicasRecord, ...]]:
    rows = yield from select(
        ReplicasRecord,
        f"SELECT {REPLICA} FROM replicas r ORDER BY r.started_at, r.id",  # noqa: S608
    )
    return tuple(rows)


class _NodesOf(NamedTuple):
    replica_id: int
    nodes: int


@operation
def nodes_of_replicas() -> Operation[dict[int, int]]:
    rows = yield from select(
        _NodesOf,
        "SELECT c.replica_id, COUNT(*) FROM node_connections c WHERE c.replica_id IS NOT NULL GROUP BY c.replica_id",
    )
    return {row.replica_id: row.nodes for row in rows}


@operation
def bury(dead: Collection[int], term: int) -> Operation[tuple[NodeId, ...] | None]:
    """Remove dead replicas; return the nodes that were connected to them. None: another leader has taken over."""
    if not (yield from leases.is_current_term(term)):
        return None
    nodes = yield from values(
        NodeId,
        "UPDATE node_connections SET replica_id = NULL WHERE replica_id IN (SELECT id FROM {dead} AS d) "
        "RETURNING node_id",
        {},
        {"dead": of_ids(dead)},
    )
    yield Statement(
        "DELETE FROM replicas WHERE id IN (SELECT id FROM {dead} AS d)", {}, {"dead": of_ids(dead)}
    )
    return tuple(nodes)


# ---- rows that the change feed names


class ChangedTask(NamedTuple):
    """Present row of a task. `payload` and its hash only if it is leased on a node connected here; `allocation`: if held."""

    id: TaskId
    epoch: int
    batch_id: BatchId
    spec_id: SpecId
    user_id: UserId
    team_id: TeamId | None
    status: str
    queued_at: Instant | None
    node_id: NodeId | None
    holding: int
    allocation_number: int | None
    allocation: str | None
    started_at: Instant | None
    finished_at: Instant | None
    preempting: int
    payload: bytes | None
    payload_sha256: str


class EndedAttempt(NamedTuple):
    task_id: TaskId
    epoch: int
    node_id: NodeId
    started_at: Instant | None
    ended_at: Instant
    reason: str


class _ChangedSpec(NamedTuple):
    id: SpecId
    user_id: UserId
    body: str


class _NodePlace(NamedTuple):
    id: NodeId
    replica_id: int | None


@dataclass(frozen=True, slots=True)
class FollowedIds:
    """Ids to read again; `here`: nodes connected to this replica; `known`: specs that need not be read."""

    ids: Collection[int]
    here: Collection[NodeId]
    known: Collection[SpecId]
    with_secrets: Collection[SpecId]
    with_checkpoints: Collection[SpecId]


@dataclass(frozen=True, slots=True)
class ChangedRows:
    tasks: tuple[ChangedTask, ...]
    attempts: Mapping[tuple[TaskId, int], EndedAttempt]
    specs: Mapping[SpecId, tuple[UserId, TaskSpec]]
    gangs: tuple[HeldGang, ...]  # those of `tasks` that hold allocations
    nodes: tuple[NodeRow, ...]
    places: Mapping[NodeId, int | None] = field(default_factory=dict)  # replicas of `nodes`
    secrets: SealedSecrets = NO_SECRETS
    checkpoints: Mapping[TaskId, tuple[InputFile, ...]] = field(default_factory=dict)


@operation
def changed_rows(wanted: FollowedIds) -> Operation[ChangedRows]:
    """Present rows of the tasks and nodes among the ids; other ids (batches, deleted rows) are left out."""
    ids = of_ids(wanted.ids)
    tasks = yield from select(
        ChangedTask,
        "SELECT t.id, t.epoch, t.batch_id, t.spec_id, t.user_id, t.team_id, t.status, t.queued_at, t.node_id, t.holding, "
        "t.allocation_number, CASE WHEN t.holding <> 0 THEN t.allocation END, t.started_at, t.finished_at, "
        "CASE WHEN t.holding = 1 AND EXISTS (SELECT 1 FROM attempt_notes a WHERE a.task_id = t.id "
        "AND a.epoch = t.epoch AND a.note = :note) THEN 1 ELSE 0 END, "
        "CASE WHEN h.id IS NOT NULL AND t.status = :leased THEN t.payload END, "
        "CASE WHEN h.id IS NOT NULL AND t.status = :leased THEN t.payload_sha256 ELSE '' END "
        "FROM {ids} AS i JOIN tasks t ON t.id = i.id LEFT JOIN {here} AS h ON h.id = t.node_id ORDER BY t.id",
        {"note": PREEMPTING, "leased": LEASED},
        {"ids": ids, "here": of_ids(wanted.here)},
    )
    tasks = yield from opened(tasks, PAYLOAD)
    attempts = yield from _last_attempts(tasks)
    specs = yield from _specs_of(tasks, wanted.known)
    gangs = yield from gang_members.pictured(
        [row.id for row in tasks if row.holding and row.node_id is None]
    )
    places = yield from _node_places(set(wanted.ids), tasks)
    nodes: tuple[NodeRow, ...] = ()
    if places:
        listed = of_ids(place.id for place in places)
        nodes = yield from load_nodes(
            "n.id IN (SELECT id FROM {listed} AS l)", {}, {"listed": listed}
        )
    granted = [row for row in tasks if row.status == LEASED and row.node_id in wanted.here]
    new_secret = {id_ for id_, (_, spec) in specs.items() if spec.secrets}
    new_saved = {id_ for id_, (_, spec) in specs.items() if spec.checkpoint}
    secret = {
        row.spec_id
        for row in granted
        if row.spec_id in wanted.with_secrets or row.spec_id in new_secret
    }
    saved = [
        row.id
        for row in granted
        if row.spec_id in wanted.with_checkpoints or row.spec_id in new_saved
    ]
    return ChangedRows(
        tasks=tuple(tasks),
        attempts={(row.task_id, row.epoch): row for row in attempts},
        specs=specs,
        gangs=tuple(gang for gang, _ in gangs),
        nodes=nodes,
        places={place.id: place.replica_id for place in places},
        secrets=(yield from secrets_to_open(secret)),
        checkpoints=(yield from manifests(saved)),
    )


def _last_attempts(tasks: Iterable[ChangedTask]) -> Operation[list[EndedAttempt]]:
    """Attempts after which tasks were queued again."""
    retried = [(row.id, row.epoch) for row in tasks if row.status == QUEUED and row.epoch]
    if not retried:
        return []
    return (
        yield from select(
            EndedAttempt,
            "SELECT a.task_id, a.epoch, a.node_id, a.started_at, a.ended_at, a.reason FROM {retried} AS r "
            "JOIN attempts a ON a.task_id = r.task AND a.epoch = r.epoch",
            {},
            {"retried": Relation((("task", "int"), ("epoch", "int")), retried)},
        )
    )


def _node_places(ids: set[int], tasks: Iterable[ChangedTask]) -> Operation[list[_NodePlace]]:
    """Replicas of the nodes among the ids. Ids of tasks and of their batches are no nodes."""
    others = ids.difference(*((row.id, row.batch_id) for row in tasks))
    if not others:
        return []
    return (
        yield from select(
            _NodePlace,
            "SELECT n.id, c.replica_id FROM {ids} AS i JOIN nodes n ON n.id = i.id "
            "LEFT JOIN node_connections c ON c.node_id = n.id",
            {},
            {"ids": of_ids(others)},
        )
    )


def _specs_of(
    tasks: Iterable[ChangedTask], known: Collection[SpecId]
) -> Operation[dict[SpecId, tuple[UserId, TaskSpec]]]:
    missing = {
        row.spec_id
        for row in tasks
        if row.spec_id not in known and (row.holding or row.finished_at is None)
    }
    if not missing:
        return {}
    rows = yield from select(
        _ChangedSpec,
        "SELECT s.id, s.user_id, s.body FROM {specs} AS i JOIN specs s ON s.id = i.id",
        {},
        {"specs": of_ids(missing)},
    )
    rows = yield from opened(rows, SPEC_BODY)
    return {row.id: (row.user_id, spec_from(row.body)) for row in rows}
