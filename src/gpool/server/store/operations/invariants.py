"""Invariants of a store as queries that find their violations; the World checks the same ones while it runs.

Each query returns the violating object's id and a text, so that a sound store returns no rows. Read-only.
One file because every table's invariants are listed once, beside each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import TaskStatus
from gpool.server.store.operations.identity.sealed_fields import SEALED_COLUMNS
from gpool.server.store.protocol import Operation, operation
from gpool.server.store.rows import select

_WORDS = ", ".join(f"'{status.value}'" for status in TaskStatus)
_FINAL = ", ".join(f"'{status.value}'" for status in TaskStatus if status.is_final)
_ACTIVE = "'leased', 'running'"


@dataclass(frozen=True, slots=True)
class RowCheck:
    """`kind`: of the ids (`core.ids`), or "" for other names. `sql` selects id and detail, both as text."""

    name: str
    kind: str
    sql: str


class ViolatingRow(NamedTuple):
    id: str
    detail: str


def _tasks(name: str, detail: str, where: str) -> RowCheck:
    return RowCheck(
        name,
        "task",
        f"SELECT CAST(t.id AS TEXT), '{detail}' FROM tasks t WHERE {where} ORDER BY t.id",  # noqa: S608
    )


def _orphans(table: str, column: str, parent: str, key: str = "id", where: str = "") -> RowCheck:
    """Rows that name a row of another table which is not there."""
    extra = f" AND {where}" if where else ""
    return RowCheck(
        f"{table}.{column}",
        "",
        f"SELECT CAST(c.{column} AS TEXT), '{table} names it, and {parent} has no such row' FROM {table} c "  # noqa: S608
        f"WHERE NOT EXISTS (SELECT 1 FROM {parent} p WHERE p.{key} = c.{column}){extra} "
        f"GROUP BY c.{column} ORDER BY c.{column}",
    )


_CHARGES = """
    SELECT CASE WHEN t.team_id IS NULL THEN 'user' ELSE 'team' END AS kind, COALESCE(t.team_id, t.user_id) AS id,
        t.stored_bytes + COALESCE(c.stored_bytes, 0) + COALESCE(h.stored_bytes, 0) AS size
        FROM tasks t LEFT JOIN checkpoints c ON c.task_id = t.id LEFT JOIN log_heads h ON h.task_id = t.id
    UNION ALL SELECT CASE WHEN o.team_id IS NULL THEN 'user' ELSE 'team' END, COALESCE(o.team_id, s.user_id),
        s.stored_bytes FROM specs s
        LEFT JOIN (SELECT spec_id, MIN(team_id) AS team_id FROM tasks GROUP BY spec_id) o ON o.spec_id = s.id
    UNION ALL SELECT u.kind, u.account, u.size_bytes FROM uploads u
    UNION ALL SELECT s.kind, s.id, a.size_bytes FROM stored s JOIN artifacts a ON a.sha256 = s.sha256
    UNION ALL SELECT g.kind, g.id, -g.size_bytes FROM storage g
"""

ROW_CHECKS = (
    _tasks("task_status", "its status is no word of the lifecycle", f"t.status NOT IN ({_WORDS})"),
    _tasks(
        "queued_task",
        "queued, but with a lease or an end",
        "t.status = 'queued' AND (t.holding <> 0 OR t.node_id IS NOT NULL OR t.queued_at IS NULL "
        "OR t.finished_at IS NOT NULL OR t.sequence IS NOT NULL)",
    ),
    _tasks(
        "leased_task",
        "leased or running, but without a lease, or ended",
        f"t.status IN ({_ACTIVE}) AND (t.holding <> 1 OR t.epoch < 1 OR t.leased_at IS NULL "
        "OR t.finished_at IS NOT NULL OR t.sequence IS NOT NULL)",
    ),
    _tasks(
        "ended_task",
        "ended, but without time or place among the results, or it holds a lease",
        f"t.status IN ({_FINAL}) AND (t.finished_at IS NULL OR t.sequence IS NULL "
        "OR t.holding <> 0 AND t.status <> 'cancelled')",
    ),
    _tasks(
        "lease_place",
        "held, but neither by one existing node with an allocation nor by members of a gang",
        "t.holding = 1 AND NOT (t.node_id IS NOT NULL AND t.allocation IS NOT NULL "
        "AND t.allocation_number IS NOT NULL AND EXISTS (SELECT 1 FROM nodes n WHERE n.id = t.node_id)) "
        "AND NOT (t.node_id IS NULL AND EXISTS (SELECT 1 FROM gangs g WHERE g.task_id = t.id AND g.epoch = t.epoch) "
        "AND EXISTS (SELECT 1 FROM members m WHERE m.task_id = t.id AND m.epoch = t.epoch AND m.holding = 1))",
    ),
    _tasks(
        "attempt_epoch",
        "an attempt is archived for an epoch that is held, or was never granted",
        "EXISTS (SELECT 1 FROM attempts a WHERE a.task_id = t.id "
        "AND (a.epoch > t.epoch OR a.epoch < 1 OR a.epoch = t.epoch AND t.holding = 1))",
    ),
    RowCheck(
        "batch_counts",
        "batch",
        "SELECT CAST(b.id AS TEXT), 'its counts differ from its tasks' FROM batches b "  # noqa: S608
        "LEFT JOIN (SELECT t.batch_id, COUNT(*) AS tasks, MAX(t.sequence) AS last, COUNT(t.sequence) AS ended, "
        f"SUM(CASE WHEN t.status IN ({_FINAL}) THEN 0 ELSE 1 END) AS waiting FROM tasks t GROUP BY t.batch_id) c "
        "ON c.batch_id = b.id WHERE b.done > b.total OR COALESCE(c.waiting, 0) <> b.total - b.done "
        "OR COALESCE(c.tasks, 0) > b.total OR COALESCE(c.ended, 0) > b.done OR COALESCE(c.last, 0) > b.done "
        "ORDER BY b.id",
    ),
    RowCheck(
        "batch_sequences",
        "batch",
        "SELECT CAST(t.batch_id AS TEXT), 'two results have one place' FROM tasks t WHERE t.sequence IS NOT NULL "
        "GROUP BY t.batch_id, t.sequence HAVING COUNT(*) > 1 ORDER BY t.batch_id",
    ),
    RowCheck(
        "gang_members",
        "task",
        "SELECT CAST(m.task_id AS TEXT), 'members hold leases, and the gang does not, or their ranks have gaps' "
        "FROM members m LEFT JOIN tasks t ON t.id = m.task_id GROUP BY m.task_id "
        "HAVING MAX(m.holding) > MAX(COALESCE(t.holding, 0)) OR MIN(m.rank) <> 0 OR MAX(m.rank) <> COUNT(*) - 1 "
        "OR MIN(m.epoch) <> MAX(m.epoch) OR MAX(m.epoch) > MAX(COALESCE(t.epoch, 0)) ORDER BY m.task_id",
    ),
    _orphans("tasks", "spec_id", "specs"),
    _orphans("tasks", "batch_id", "batches"),
    _orphans("tasks", "user_id", "users"),
    _orphans("attempts", "task_id", "tasks"),
    _orphans("checkpoints", "task_id", "tasks"),
    _orphans("log_heads", "task_id", "tasks"),
    _orphans("log_chunks", "task_id", "tasks"),
    _orphans("gangs", "task_id", "tasks"),
    _orphans("task_secrets", "spec_id", "specs"),
    _orphans("gpus", "node_id", "nodes"),
    _orphans("nodes", "owner_id", "users"),
    _orphans("api_keys", "user_id", "users"),
    _orphans("memberships", "team_id", "teams"),
    _orphans("artifact_refs", "sha256", "artifacts", "sha256"),
    _orphans("stored", "sha256", "artifacts", "sha256"),
    _orphans("tasks", "payload_sha256", "artifacts", "sha256", "c.payload_sha256 <> ''"),
    _orphans("tasks", "value_sha256", "artifacts", "sha256", "c.value_sha256 <> ''"),
    _orphans("tasks", "log_sha256", "artifacts", "sha256", "c.log_sha256 <> ''"),
    RowCheck(
        "storage",
        "",
        "SELECT x.kind || ' ' || CAST(x.id AS TEXT), 'charged bytes minus counted bytes: ' || CAST(SUM(x.size) AS TEXT) "  # noqa: S608
        f"FROM ({_CHARGES}) AS x GROUP BY x.kind, x.id HAVING SUM(x.size) <> 0 ORDER BY x.kind, x.id",
    ),
)


@operation
def violations(check: RowCheck, limit: int) -> Operation[list[ViolatingRow]]:
    return (yield from select(ViolatingRow, f"{check.sql} LIMIT :limit", {"limit": limit}))


# ---- checks that need more than SQL


class HoldingNode(NamedTuple):
    id: NodeId
    offer: str


class StoredAllocation(NamedTuple):
    task: TaskId
    number: int
    allocation: str
    is_member: int


@operation
def holding_nodes(after: int, limit: int) -> Operation[list[HoldingNode]]:
    """Nodes with leases, in pages by id."""
    return (
        yield from select(
            HoldingNode,
            "SELECT n.id, n.offer FROM nodes n WHERE n.id > :after AND ("
            "EXISTS (SELECT 1 FROM tasks t WHERE t.node_id = n.id AND t.holding = 1) "
            "OR EXISTS (SELECT 1 FROM members m WHERE m.node_id = n.id AND m.holding = 1)) ORDER BY n.id LIMIT :limit",
            {"after": after, "limit": limit},
        )
    )


@operation
def held_allocations(node: NodeId) -> Operation[list[StoredAllocation]]:
    return (
        yield from select(
            StoredAllocation,
            "SELECT t.id, t.allocation_number, t.allocation, 0 FROM tasks t "
            "WHERE t.node_id = :node AND t.holding = 1 AND t.allocation IS NOT NULL UNION ALL "
            "SELECT m.task_id, m.allocation_number, m.allocation, 1 FROM members m "
            "WHERE m.node_id = :node AND m.holding = 1 ORDER BY 2, 1",
            {"node": node},
        )
    )


class ArtifactFile(NamedTuple):
    sha256: str
    object: str


@operation
def artifacts_in_folder(after: str, limit: int) -> Operation[list[ArtifactFile]]:
    """Artifacts of the folder, in pages by name."""
    return (
        yield from select(
            ArtifactFile,
            "SELECT a.sha256, a.object FROM artifacts a WHERE a.sha256 > :after AND a.object NOT LIKE '%/%' ORDER BY a.sha256 LIMIT :limit",
            {"after": after, "limit": limit},
        )
    )


class SealedWith(NamedTuple):
    """First bytes of a sealed field: version and id of its data key."""

    head: bytes
    fields: int


@operation
def sealing_keys() -> Operation[dict[str, list[SealedWith]]]:
    """Heads of the sealed fields, by table."""
    found = {}
    for column in SEALED_COLUMNS.values():
        name = column.column
        found[column.table] = yield from select(
            SealedWith,
            f"SELECT substr(x.{name}, 1, 9), COUNT(*) FROM {column.table} x "  # noqa: S608
            f"WHERE x.{name} IS NOT NULL GROUP BY substr(x.{name}, 1, 9)",
        )
    return found
