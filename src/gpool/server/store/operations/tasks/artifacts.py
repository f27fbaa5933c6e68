"""Artifacts and their references. Knowing a hash grants nothing: an artifact is visible only through a reference.

Weak references do not keep an artifact: `upload` (of a user) and `lease` (uploaded by a node under (task, epoch),
visible to nobody yet). Strong ones do: `spec` (function and inputs), `payload`, `result`, `log` and `checkpoint` of a
task. References of a team's task belong to the team, not to the submitting user. Each account is charged once for an
artifact that it refers to.
One file because references, holders and pruning guard the same rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, cast

from gpool.core.errors import Unreachable
from gpool.core.ids import NodeId, SpecId, TaskId, UserId
from gpool.core.model import Instant
from gpool.core.permissions import TeamId
from gpool.server.store.generated_rows import StoredRecord
from gpool.server.store.identity_values import Holder
from gpool.server.store.operations.tasks.storage import Account, change, holder_of, summed
from gpool.server.store.protocol import Operation, Relation, Statement, operation
from gpool.server.store.rows import exists, of_ids, of_names, select, values
from gpool.server.store.sealing import (
    FILE_KEY,
    account_keys,
    file_key_place,
    opened,
    sealed_by,
    sealing,
)

HELD = (("kind", "text"), ("id", "int"), ("sha256", "text"))


class ArtifactReference(NamedTuple):
    user_id: UserId
    team_id: TeamId | None
    sha256: str


class _Size(NamedTuple):
    sha256: str
    size_bytes: int


def count(held: Sequence[tuple[Holder, int, str]]) -> Operation[None]:
    if not held:
        return
    new = yield from select(
        StoredRecord,
        "INSERT INTO stored (kind, id, sha256) SELECT h.kind, h.id, h.sha256 FROM {held} AS h "
        "JOIN artifacts a ON a.sha256 = h.sha256 WHERE true "
        "ON CONFLICT (kind, id, sha256) DO NOTHING RETURNING kind, id, sha256",
        {},
        {"held": Relation(HELD, sorted(set(held)))},
    )
    if not new:
        return
    sizes = yield from select(
        _Size,
        "SELECT a.sha256, a.size_bytes FROM {new} AS n JOIN artifacts a ON a.sha256 = n.name",
        {},
        {"new": of_names(row.sha256 for row in new)},
    )
    yield from _change(new, {row.sha256: row.size_bytes for row in sizes})


def uncount(sizes: Mapping[str, int]) -> Operation[None]:
    old = yield from select(
        StoredRecord,
        "DELETE FROM stored WHERE sha256 IN (SELECT name FROM {gone} AS g) RETURNING kind, id, sha256",
        {},
        {"gone": of_names(sizes)},
    )
    if old:
        yield from _change(old, {sha256: -size for sha256, size in sizes.items()})


def _change(rows: Sequence[StoredRecord], sizes: Mapping[str, int]) -> Operation[None]:
    yield from change(
        summed(((cast("Holder", row.kind), row.id), sizes[row.sha256]) for row in rows)
    )


def release(dropped: Collection[ArtifactReference]) -> Operation[tuple[str, ...]]:
    """Stop charging accounts that have no reference left; return artifacts that have none at all.

    The caller removes their files after the commit; if it cannot, the next pruning does.
    """
    held = {(*holder_of(row.user_id, row.team_id), row.sha256) for row in dropped}
    if not held:
        return ()
    gone = yield from select(
        StoredRecord,
        "DELETE FROM stored WHERE (kind, id, sha256) IN (SELECT kind, id, sha256 FROM {held} AS h) AND NOT EXISTS ("
        "SELECT 1 FROM artifact_refs r WHERE r.sha256 = stored.sha256 AND (stored.kind = 'team' AND r.team_id = stored.id "
        "OR stored.kind = 'user' AND r.team_id IS NULL AND r.user_id = stored.id)) RETURNING kind, id, sha256",
        {},
        {"held": Relation(HELD, sorted(held))},
    )
    if gone:
        sizes = yield from select(
            _Size,
            "SELECT a.sha256, a.size_bytes FROM {gone} AS n JOIN artifacts a ON a.sha256 = n.name",
            {},
            {"gone": of_names(row.sha256 for row in gone)},
        )
        yield from _change(gone, {row.sha256: -row.size_bytes for row in sizes})
    unused = yield from values(
        str,
        "UPDATE artifacts SET touched_at = 0 WHERE sha256 IN (SELECT name FROM {dropped} AS d) AND NOT EXISTS ("
        "SELECT 1 FROM artifact_refs r WHERE r.sha256 = artifacts.sha256) RETURNING sha256",
        {},
        {"dropped": of_names(row.sha256 for row in dropped)},
    )
    return tuple(sorted(unused))


LAST = Instant((1 << 63) - 1)
NAMED = (
    ("sha256", "text"),
    ("task", "int"),
    ("epoch", "int"),
    ("spec", "int"),
    ("user_id", "int"),
)
STRONG = "('spec', 'payload', 'result', 'log', 'checkpoint')"
SEES = (
    "r.kind <> 'lease' AND (r.team_id IS NULL AND r.user_id = :user "
    "OR r.team_id IN (SELECT id FROM {teams} AS m))"
)
SEES_BY_KEY = (
    "(r.kind = 'upload' AND r.holder = :key "
    "OR r.kind <> 'lease' AND r.team_id IN (SELECT id FROM {teams} AS m))"
)
"""References that an API key for one team sees: those of the team, and uploads by this key."""

WRITES = (
    "t.id = :task AND t.epoch = :epoch AND t.holding = 1 AND (t.node_id = :node OR t.node_id IS NULL AND EXISTS ("
    "SELECT 1 FROM members m WHERE m.task_id = t.id AND m.rank = 0 AND m.epoch = :epoch AND m.node_id = :node "
    "AND m.holding = 1))"
)
"""The node holds the lease; of a gang, that of rank 0."""


class NamedResult(NamedTuple):
    sha256: str
    task: TaskId
    epoch: int
    spec: SpecId
    user_id: UserId


class TaskOwner(NamedTuple):
    user_id: UserId
    team_id: TeamId | None


class ArtifactSize(NamedTuple):
    sha256: str
    size_bytes: int


class StoredBytes(NamedTuple):
    """Bytes of an artifact: their key, and the key that decrypts them (empty: plain). `is_new` False: stored before."""

    object: str = ""
    file_key: bytes = b""
    is_new: bool = True


PLAIN = StoredBytes()


class ArtifactLocation(NamedTuple):
    sha256: str
    object: str
    key_sealed: bytes | None  # opened: the key itself


class _Forgotten(NamedTuple):
    sha256: str
    size_bytes: int
    object: str


def put_artifact(
    sha256: str, size_bytes: int, at: Instant, stored: StoredBytes, account: Account
) -> Operation[None]:
    """Record an artifact. One that is stored already keeps its object; the caller then removes the new one.

    `Unreachable` if its bytes were stored before and have been deleted since: the uploader sends them again.
    """
    if not stored.is_new:
        touched = yield from exists(
            "UPDATE artifacts SET touched_at = :at WHERE sha256 = :sha256 RETURNING sha256",
            {"sha256": sha256, "at": at},
        )
        if not touched:
            raise Unreachable(f"artifact {sha256} was deleted meanwhile; upload it again")
        return
    sealed: bytes | None = None
    if stored.file_key:
        seal = yield from sealing([account])
        sealed = seal.data(account, file_key_place(sha256), stored.file_key)
    yield Statement(
        "INSERT INTO artifacts (sha256, size_bytes, touched_at, object, key_sealed) "
        "VALUES (:sha256, :size, :at, :object, :sealed) "
        "ON CONFLICT (sha256) DO UPDATE SET touched_at = excluded.touched_at",
        {
            "sha256": sha256,
            "size": size_bytes,
            "at": at,
            "object": stored.object,
            "sealed": sealed,
        },
    )


def put_reference(
    sha256: str, kind: str, holder: int, user: UserId, epoch: int = 0, team: int | None = None
) -> Operation[None]:
    yield Statement(
        "INSERT INTO artifact_refs (sha256, kind, holder, user_id, epoch, team_id) "
        "VALUES (:sha256, :kind, :holder, :user, :epoch, :team) "
        "ON CONFLICT (sha256, kind, holder) DO UPDATE SET epoch = excluded.epoch",
        {
            "sha256": sha256,
            "kind": kind,
            "holder": holder,
            "user": user,
            "epoch": epoch,
            "team": team,
        },
    )
    yield from count([(*holder_of(user, team), sha256)])


@operation
def add_artifact(
    sha256: str,
    size_bytes: int,
    user: UserId | None,
    node: NodeId | None,
    task_epoch: tuple[TaskId, int] | None,
    at: Instant,
    key: int | None = None,
    stored: StoredBytes = PLAIN,
) -> Operation[bool]:
    """Record an artifact whose bytes are stored: of a user, or of a node that holds the lease (else False).

    `key`: the API key for one team that uploaded it; the key itself then holds the reference.
    """
    if task_epoch is not None:
        rows = yield from select(
            TaskOwner,
            f"SELECT t.user_id, t.team_id FROM tasks t WHERE {WRITES} /*postgresql FOR UPDATE*/",  # noqa: S608
            {"task": task_epoch[0], "epoch": task_epoch[1], "node": node},
        )
        if not rows:
            return False
        [owner] = rows
        account = holder_of(owner.user_id, owner.team_id)
        yield from put_artifact(sha256, size_bytes, at, stored, account)
        yield from put_reference(
            sha256, "lease", task_epoch[0], owner.user_id, task_epoch[1], owner.team_id
        )
        return True
    if user is None:
        return False
    yield from put_artifact(sha256, size_bytes, at, stored, ("user", user))
    yield from put_reference(sha256, "upload", user if key is None else key, user)
    return True


@operation
def visible(
    sha256: str, user: UserId, teams: Collection[int] = (), key: int | None = None
) -> Operation[int | None]:
    """Size if the user sees the artifact. `key`: of an API key for one team, which is the only one in `teams`."""
    sizes = yield from values(
        int,
        "SELECT a.size_bytes FROM artifacts a WHERE a.sha256 = :sha256 AND EXISTS ("  # noqa: S608
        f"SELECT 1 FROM artifact_refs r WHERE r.sha256 = a.sha256 AND {SEES if key is None else SEES_BY_KEY})",
        {"sha256": sha256, **({"user": user} if key is None else {"key": key})},
        {"teams": of_ids(teams)},
    )
    return sizes[0] if sizes else None


@operation
def visible_to_node(sha256: str, node: NodeId, task: TaskId | None = None) -> Operation[int | None]:
    """Size if the artifact is a function, input, payload or checkpoint of a lease that the node holds.

    An uploading node names the task: an artifact visible through another lease would be missing for this task.
    """
    parameters: dict[str, int | str] = {"sha256": sha256, "node": node}
    parameters |= {} if task is None else {"task": task}
    sizes = yield from values(int, _seen("t.node_id = :node AND t.holding = 1", task), parameters)
    if not sizes:
        sizes = yield from values(int, _seen(MEMBERS, task), parameters)
    return sizes[0] if sizes else None


MEMBERS = "t.id IN (SELECT m.task_id FROM members m WHERE m.node_id = :node AND m.holding = 1)"


def _seen(held: str, task: TaskId | None) -> str:
    one = "" if task is None else "AND t.id = :task "
    return (
        "SELECT a.size_bytes FROM artifacts a WHERE a.sha256 = :sha256 AND EXISTS ("  # noqa: S608
        f"SELECT 1 FROM tasks t WHERE {held} {one}AND ("
        "EXISTS (SELECT 1 FROM artifact_refs r WHERE r.sha256 = a.sha256 AND r.kind = 'spec' AND r.holder = t.spec_id) "
        "OR EXISTS (SELECT 1 FROM artifact_refs r WHERE r.sha256 = a.sha256 AND r.kind = 'payload' AND r.holder = t.id) "
        "OR EXISTS (SELECT 1 FROM artifact_refs r WHERE r.sha256 = a.sha256 AND r.kind = 'checkpoint' AND r.holder = t.id)))"
    )


@operation
def upload_owner(node: NodeId, task: TaskId, epoch: int) -> Operation[TaskOwner | None]:
    """Owner of the task whose lease the node holds, to refuse an upload before its bytes are sent; None: no such lease.

    `add_artifact` is the fence.
    """
    owners = yield from select(
        TaskOwner,
        f"SELECT t.user_id, t.team_id FROM tasks t WHERE {WRITES}",  # noqa: S608
        {"task": task, "epoch": epoch, "node": node},
    )
    return owners[0] if owners else None


@operation
def size_of(sha256: str) -> Operation[int | None]:
    sizes = yield from values(
        int, "SELECT size_bytes FROM artifacts WHERE sha256 = :sha256", {"sha256": sha256}
    )
    return sizes[0] if sizes else None


@operation
def object_of(sha256: str) -> Operation[str | None]:
    """Key of an artifact's bytes, empty if they lie in the folder under the hash; None: there is no such artifact."""
    keys = yield from values(
        str, "SELECT object FROM artifacts WHERE sha256 = :sha256", {"sha256": sha256}
    )
    return keys[0] if keys else None


@operation
def location_of(sha256: str) -> Operation[ArtifactLocation | None]:
    rows = yield from select(
        ArtifactLocation,
        "SELECT sha256, object, key_sealed FROM artifacts WHERE sha256 = :sha256",
        {"sha256": sha256},
    )
    found = yield from opened(rows, FILE_KEY)
    return found[0] if found else None


class _HeldKey(NamedTuple):
    sha256: str
    key_sealed: bytes
    kind: str
    id: int


@operation
def destroy_account_key(account: Account) -> Operation[None]:
    yield from destroy_key(account)


def destroy_key(account: Account) -> Operation[None]:
    """Delete the account's data key. Files that other accounts refer to get their keys sealed for one of these first."""
    keys = yield from account_keys([account])
    for key in keys:
        held = yield from select(
            _HeldKey,
            "SELECT a.sha256, a.key_sealed, s.kind, s.id FROM artifacts a JOIN stored s ON s.sha256 = a.sha256 "
            "WHERE substr(a.key_sealed, 1, :length) = :head AND NOT (s.kind = :kind AND s.id = :id)",
            {
                "head": sealed_by(key),
                "length": len(sealed_by(key)),
                "kind": account[0],
                "id": account[1],
            },
        )
        others = {row.sha256: (cast("Holder", row.kind), row.id) for row in held}
        seal = yield from sealing(set(others.values()))
        opened_keys = yield from opened(list({row.sha256: row for row in held}.values()), FILE_KEY)
        moved = [
            (row.sha256, seal.data(others[row.sha256], file_key_place(row.sha256), row.key_sealed))
            for row in opened_keys
        ]
        if moved:
            yield Statement(
                "UPDATE artifacts SET key_sealed = m.sealed FROM {moved} AS m WHERE artifacts.sha256 = m.sha256",
                {},
                {"moved": Relation((("sha256", "text"), ("sealed", "blob")), moved)},
            )
        # overwritten first: a deleted row's bytes may stay in the database file
        yield Statement(
            "UPDATE account_keys SET wrapped = :zeros WHERE key_id = :id",
            {"zeros": bytes(len(key.wrapped)), "id": key.key_id},
        )
        yield Statement("DELETE FROM account_keys WHERE key_id = :id", {"id": key.key_id})


@operation
def known(sha256: str) -> Operation[bool]:
    sql = "SELECT 1 FROM artifacts WHERE sha256 = :sha256"
    return (yield from exists(sql, {"sha256": sha256}))


def missing(
    sha256s: Sequence[str], user: UserId, team: int | None = None, key: int | None = None
) -> Operation[tuple[str, ...]]:
    """Artifacts that the user, or a team's API key, cannot see. The others cannot be removed until the transaction ends."""
    if not sha256s:
        return ()
    visible = yield from values(
        str,
        "SELECT a.sha256 FROM {wanted} AS w JOIN artifacts a ON a.sha256 = w.name WHERE EXISTS ("  # noqa: S608
        f"SELECT 1 FROM artifact_refs r WHERE r.sha256 = a.sha256 AND {SEES if key is None else SEES_BY_KEY}) "
        "/*postgresql FOR SHARE OF a*/",
        {"user": user} if key is None else {"key": key},
        {"wanted": of_names(sha256s), "teams": of_ids(() if team is None else (team,))},
    )
    found = set(visible)
    return tuple(sha256 for sha256 in dict.fromkeys(sha256s) if sha256 not in found)


def keep(
    kind: str, pairs: Sequence[tuple[str, int]], user: UserId, team: int | None = None
) -> Operation[None]:
    if pairs:
        yield Statement(
            "INSERT INTO artifact_refs (sha256, kind, holder, user_id, team_id) "
            "SELECT p.sha256, CAST(:kind AS TEXT), p.holder, CAST(:user AS BIGINT), CAST(:team AS BIGINT) "
            "FROM {pairs} AS p WHERE true ON CONFLICT (sha256, kind, holder) DO NOTHING",
            {"kind": kind, "user": user, "team": team},
            {"pairs": Relation((("sha256", "text"), ("holder", "int")), sorted(set(pairs)))},
        )
        yield from count([(*holder_of(user, team), sha256) for sha256, _ in pairs])


def missing_results(named: Sequence[NamedResult]) -> Operation[set[NamedResult]]:
    """Results that their node neither uploaded under the lease nor could see through it."""
    if not named:
        return set()
    found = yield from select(
        NamedResult,
        "SELECT n.sha256, n.task, n.epoch, n.spec, n.user_id FROM {named} AS n WHERE EXISTS ("
        "SELECT 1 FROM artifact_refs r WHERE r.sha256 = n.sha256 AND (r.kind = 'lease' AND r.holder = n.task "
        "AND r.epoch = n.epoch OR r.kind = 'spec' AND r.holder = n.spec "
        "OR r.kind IN ('payload', 'checkpoint', 'result') AND r.holder = n.task))",
        {},
        {"named": Relation(NAMED, sorted(set(named)))},
    )
    return set(named).difference(found)


def keep_results(named: Sequence[NamedResult]) -> Operation[None]:
    """Refer from ended tasks to artifacts that their node uploaded under the lease, or could see through it."""
    if not named:
        return
    relation = Relation(NAMED, sorted(set(named)))
    uploaded = yield from select(
        ArtifactReference,
        "UPDATE artifact_refs SET kind = 'result' FROM {named} AS n WHERE artifact_refs.sha256 = n.sha256 "
        "AND artifact_refs.kind = 'lease' AND artifact_refs.holder = n.task AND artifact_refs.epoch = n.epoch "
        "RETURNING artifact_refs.user_id, artifact_refs.team_id, artifact_refs.sha256",
        {},
        {"named": relation},
    )
    yield from count([(*holder_of(row.user_id, row.team_id), row.sha256) for row in uploaded])
    # artifacts visible through the lease are counted already, for the task's own references
    yield Statement(
        "INSERT INTO artifact_refs (sha256, kind, holder, user_id, team_id) "
        "SELECT n.sha256, 'result', n.task, n.user_id, t.team_id FROM {named} AS n "
        "JOIN tasks t ON t.id = n.task WHERE "
        "EXISTS (SELECT 1 FROM artifact_refs r WHERE r.sha256 = n.sha256 AND r.kind = 'spec' AND r.holder = n.spec) OR "
        "EXISTS (SELECT 1 FROM artifact_refs r WHERE r.sha256 = n.sha256 AND r.kind IN ('payload', 'checkpoint') "
        "AND r.holder = n.task) ON CONFLICT (sha256, kind, holder) DO NOTHING",
        {},
        {"named": relation},
    )


@operation
def unreferenced(before: Instant, limit: int) -> Operation[tuple[str, ...]]:
    found = yield from values(
        str,
        "SELECT a.sha256 FROM artifacts a WHERE a.touched_at < :before AND NOT EXISTS ("  # noqa: S608
        f"SELECT 1 FROM artifact_refs r WHERE r.sha256 = a.sha256 AND r.kind IN {STRONG}) "
        "ORDER BY a.touched_at, a.sha256 LIMIT :limit",
        {"before": before, "limit": limit},
    )
    return tuple(found)


@operation
def forget_artifacts(sha256s: Sequence[str], before: Instant = LAST) -> Operation[tuple[str, ...]]:
    """Delete artifacts without a strong reference; return the keys under which the caller removes their bytes."""
    wanted = {"wanted": of_names(sha256s)}
    yield Statement(
        "SELECT a.sha256 FROM artifacts a WHERE a.sha256 IN (SELECT name FROM {wanted} AS w) /*postgresql FOR UPDATE*/",
        {},
        wanted,
    )
    gone = yield from select(
        _Forgotten,
        "DELETE FROM artifacts WHERE sha256 IN (SELECT name FROM {wanted} AS w) AND touched_at < :before AND NOT EXISTS ("  # noqa: S608
        f"SELECT 1 FROM artifact_refs r WHERE r.sha256 = artifacts.sha256 AND r.kind IN {STRONG}) "
        "RETURNING sha256, size_bytes, object",
        {"before": before},
        wanted,
    )
    forgotten = tuple(row.sha256 for row in gone)
    if forgotten:
        yield from uncount({row.sha256: row.size_bytes for row in gone})
        yield Statement(
            "DELETE FROM artifact_refs WHERE sha256 IN (SELECT name FROM {gone} AS g)",
            {},
            {"gone": of_names(forgotten)},
        )
    return tuple(row.object or row.sha256 for row in gone)
