"""Fencing of a restored store, and the pool's read-only mode.

A backup is older than the moment at which its pool was lost. Nodes may hold leases that the store does not know, have
ended leases that it believes held, and people may hold tokens that were revoked since. So a restore ends every lease
and moves the epoch of every open task, and the term, past any value that the lost servers can have given out: late
reports are refused by their epoch, and servers of the old database by their term. Sessions, sign-ins in progress and
unused invitations end, and proofs of nodes that are older than the restore are not accepted (`restored_at`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from gpool.core.ids import TaskId
from gpool.core.lifecycle import Move
from gpool.core.model import EndReason, Instant
from gpool.server.identity.audit import AuditEntry
from gpool.server.store.operations.identity import audit
from gpool.server.store.operations.leases.ends import CANCELLED, Ends
from gpool.server.store.operations.leases.finished import HELD, HeldTask
from gpool.server.store.operations.leases.gang_members import delete_rows
from gpool.server.store.operations.rules import READ_ONLY
from gpool.server.store.operations.tasks.artifacts import ArtifactReference, release
from gpool.server.store.operations.tasks.storage import forget_interrupted
from gpool.server.store.protocol import Operation, Statement, operation
from gpool.server.store.rows import of_ids, select, values

EPOCH_JUMP = 1000
"""More leases than one task can have had between the backup and the loss of the pool."""
TERM_JUMP = 1_000_000
"""More terms than the lost servers can have taken since the backup."""
PAGE = 500
RESTORED = "restored"
_ONLY = 0
"""Id of the only row of each kind in `rules`."""


class _Mode(NamedTuple):
    value: str


@dataclass(frozen=True, slots=True)
class RestoredStore:
    """Results of the fencing: the new term, and the numbers of leases, sessions and invitations that were ended."""

    term: int
    leases: int
    sessions: int
    invitations: int


@operation
def fence_restored(
    term: int, at: Instant, entry: AuditEntry, *, forget_objects: bool = False
) -> Operation[RestoredStore]:
    """End all leases and one-time credentials of a loaded backup; `term`: of the database that it replaces.

    `forget_objects`: all artifacts are in the folder now.
    """
    leases = yield from _end_leases(at)
    yield Statement(
        "UPDATE tasks SET epoch = epoch + :jump WHERE finished_at IS NULL", {"jump": EPOCH_JUMP}
    )
    [stored] = yield from values(int, "SELECT COALESCE(MAX(term), 0) FROM scheduler_term")
    raised = max(term, int(stored)) + TERM_JUMP
    yield Statement(
        "INSERT INTO scheduler_term (id, term, taken_at) VALUES (1, :term, :at) "
        "ON CONFLICT (id) DO UPDATE SET term = excluded.term, taken_at = excluded.taken_at",
        {"term": raised, "at": at},
    )
    sessions = yield from values(
        str,
        "UPDATE sessions SET ended_at = :at, ended_why = 'restored' WHERE ended_at IS NULL RETURNING id",
        {"at": at},
    )
    yield Statement("DELETE FROM sign_in_nonces")
    invitations = 0
    for table in ("invites", "user_invites"):
        ended = yield from values(
            str,
            f"UPDATE {table} SET expires_at = :at WHERE used_at IS NULL AND expires_at > :at RETURNING hashed",  # noqa: S608
            {"at": at},
        )
        invitations += len(ended)
    yield from forget_interrupted()
    if forget_objects:
        yield Statement("UPDATE artifacts SET object = '' WHERE object LIKE '%/%'")
    yield from _put(RESTORED, msgspec.json.encode(int(at)).decode(), at)
    yield from audit.append_all([entry])
    return RestoredStore(raised, leases, len(sessions), invitations)


def _end_leases(at: Instant) -> Operation[int]:
    """Queue the tasks of all leases again. No node is to blame, so none of them counts as a start or a loss."""
    count = 0
    while rows := (
        yield from select(
            HeldTask,
            f"SELECT {HELD} FROM tasks t WHERE t.holding = 1 AND t.node_id IS NOT NULL ORDER BY t.id LIMIT :page",  # noqa: S608
            {"page": PAGE},
        )
    ):
        yield from _requeue(rows, at)
        count += len(rows)
    while rows := (
        yield from select(
            HeldTask,
            f"SELECT {HELD.replace('t.node_id', 'm.node_id')} FROM tasks t "  # noqa: S608
            "JOIN members m ON m.task_id = t.id AND m.rank = 0 WHERE t.holding = 1 ORDER BY t.id LIMIT :page",
            {"page": PAGE},
        )
    ):
        yield from _end_members([row.id for row in rows], at)
        yield from _requeue(rows, at)
        count += len(rows)
    return count


def _requeue(rows: list[HeldTask], at: Instant) -> Operation[None]:
    ends = Ends(at)
    for row in rows:
        if row.status == CANCELLED:
            ends.release(row, lost=True)
        else:
            detail = "the pool was restored from a backup"
            ends.requeue(row, Move.REQUEUED, EndReason.LOST, started_at=None, detail=detail)
    yield from ends.write()


def _end_members(gangs: list[TaskId], at: Instant) -> Operation[None]:
    tasks = {"tasks": of_ids(gangs)}
    yield Statement(
        "UPDATE members SET holding = 0, ended_at = :at, place = rank + 1, reason = 'lost' "
        "WHERE holding = 1 AND task_id IN (SELECT id FROM {tasks} AS i)",
        {"at": at},
        tasks,
    )
    yield from delete_rows("gangs", gangs)
    kept = yield from select(
        ArtifactReference,
        "DELETE FROM artifact_refs WHERE kind = 'result' AND holder IN (SELECT id FROM {tasks} AS i) "
        "RETURNING user_id, team_id, sha256",
        {},
        tasks,
    )
    yield from release(kept)


@operation
def restored_at() -> Operation[Instant | None]:
    """Time at which the store was restored from a backup; None: never."""
    found = yield from _value(RESTORED)
    return None if found is None else Instant(msgspec.json.decode(found, type=int))


@operation
def set_read_only(reason: str, at: Instant) -> Operation[None]:
    if reason:
        yield from _put(READ_ONLY, msgspec.json.encode(reason).decode(), at)
    else:
        yield Statement("DELETE FROM rules WHERE kind = :kind", {"kind": READ_ONLY})


def _value(kind: str) -> Operation[str | None]:
    rows = yield from select(
        _Mode,
        "SELECT value FROM rules WHERE kind = :kind AND id = :id",
        {"kind": kind, "id": _ONLY},
    )
    return rows[0].value if rows else None


def _put(kind: str, value: str, at: Instant) -> Operation[None]:
    yield Statement(
        "INSERT INTO rules (kind, id, value, changed_at) VALUES (:kind, :id, :value, :at) "
        "ON CONFLICT (kind, id) DO UPDATE SET value = excluded.value, changed_at = excluded.changed_at",
        {"kind": kind, "id": _ONLY, "value": value, "at": at},
    )
