"""Artifacts and who may see them. A hash grants nothing: every reading goes through a reference.

References by `kind` and `holder`: an `upload` is its user's, `lease` is what a node uploaded under (task, epoch) and
nobody sees yet; both are weak, they keep nothing alive. `spec` (a function, inputs), `payload`, `result`, `log` and
`checkpoint` (of a task) are strong. A reference of a team's task is the team's: who made it sees it only through the team.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gpool.core.ids import NodeId, SpecId, TaskId, UserId
from gpool.core.model import Instant
from gpool.server.store.operation import operation
from gpool.server.store.operations.tasks.storage import count, holder_of, uncount
from gpool.server.store.protocol import Operation, Relation, Statement
from gpool.server.store.rows import of_ids, of_names

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

WRITES = (
    "t.id = :task AND t.epoch = :epoch AND t.holding = 1 AND (t.node_id = :node OR t.node_id IS NULL AND EXISTS ("
    "SELECT 1 FROM members m WHERE m.task_id = t.id AND m.rank = 0 AND m.epoch = :epoch AND m.node_id = :node "
    "AND m.holding = 1))"
)
"""The lease is the node's, and so is what the task leaves: of a gang, rank 0's."""


def put_artifact(sha256: str, size_bytes: int, at: Instant) -> Operation[None]:
    yield Statement(
        "INSERT INTO artifacts (sha256, size_bytes, touched_at) VALUES (:sha256, :size, :at) "
        "ON CONFLICT (sha256) DO UPDATE SET touched_at = excluded.touched_at",
        {"sha256": sha256, "size": size_bytes, "at": at},
    )


def put_reference(
    sha256: str, kind: str, holder: int, user: UserId, epoch: int = 0, team: int | None = None
) -> Operation[None]:
    """The artifact is there. What only a lease refers to is not counted yet."""
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
    if kind != "lease":
        yield from count([(*holder_of(user, team), sha256)])


@operation
def add_artifact(
    sha256: str,
    size_bytes: int,
    user: UserId | None,
    node: NodeId | None,
    task_epoch: tuple[TaskId, int] | None,
    at: Instant,
) -> Operation[bool]:
    """The bytes are in the blob store. A user's upload is the user's; a node's is fenced by the lease it names."""
    if task_epoch is not None:
        rows = yield Statement(
            f"SELECT t.user_id, t.team_id FROM tasks t WHERE {WRITES} /*postgresql FOR UPDATE*/",  # noqa: S608
            {"task": task_epoch[0], "epoch": task_epoch[1], "node": node},
        )
        if not rows:
            return False
        yield from put_artifact(sha256, size_bytes, at)
        owner, team = rows[0]
        yield from put_reference(sha256, "lease", task_epoch[0], UserId(owner), task_epoch[1], team)
        return True
    if user is None:
        return False
    yield from put_artifact(sha256, size_bytes, at)
    yield from put_reference(sha256, "upload", user, user)
    return True


@operation
def visible(sha256: str, user: UserId, teams: Collection[int] = ()) -> Operation[int | None]:
    """The size, if it is the user's or one of these teams'."""
    rows = yield Statement(
        "SELECT a.size_bytes FROM artifacts a WHERE a.sha256 = :sha256 AND EXISTS ("  # noqa: S608
        f"SELECT 1 FROM artifact_refs r WHERE r.sha256 = a.sha256 AND {SEES})",
        {"sha256": sha256, "user": user},
        {"teams": of_ids(teams)},
    )
    return rows[0][0] if rows else None


@operation
def visible_to_node(sha256: str, node: NodeId, task: TaskId | None = None) -> Operation[int | None]:
    """Functions, inputs, payloads and checkpoints of leases it holds; of this task's, when one is named.

    A node that uploads names its lease: what it sees through another one would not be there for this task.
    """
    parameters: dict[str, int | str] = {"sha256": sha256, "node": node}
    parameters |= {} if task is None else {"task": task}
    rows = yield Statement(_seen("t.node_id = :node AND t.holding = 1", task), parameters)
    if not rows:
        rows = yield Statement(_seen(MEMBERS, task), parameters)
    return rows[0][0] if rows else None


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
def leave_to_prune(sha256: str, size_bytes: int, at: Instant) -> Operation[None]:
    """Bytes that came and were refused: known, so that they are removed in time, and seen by nobody."""
    yield from put_artifact(sha256, size_bytes, at)


@operation
def may_upload(node: NodeId, task: TaskId, epoch: int) -> Operation[bool]:
    """Whether the lease is the node's, now. Only spares the bytes' way: `add_artifact` is the fence."""
    rows = yield Statement(
        f"SELECT 1 FROM tasks t WHERE {WRITES}",  # noqa: S608
        {"task": task, "epoch": epoch, "node": node},
    )
    return bool(rows)


@operation
def size_of(sha256: str) -> Operation[int | None]:
    """Whoever sees it: for operators."""
    rows = yield Statement(
        "SELECT size_bytes FROM artifacts WHERE sha256 = :sha256", {"sha256": sha256}
    )
    return rows[0][0] if rows else None


@operation
def known(sha256: str) -> Operation[bool]:
    rows = yield Statement("SELECT 1 FROM artifacts WHERE sha256 = :sha256", {"sha256": sha256})
    return bool(rows)


def missing(
    sha256s: Sequence[str], user: UserId, team: int | None = None
) -> Operation[tuple[str, ...]]:
    """Which of them the user cannot see. Those found stay until the transaction ends."""
    if not sha256s:
        return ()
    rows = yield Statement(
        "SELECT a.sha256 FROM {wanted} AS w JOIN artifacts a ON a.sha256 = w.name WHERE EXISTS ("  # noqa: S608
        f"SELECT 1 FROM artifact_refs r WHERE r.sha256 = a.sha256 AND {SEES}) "
        "/*postgresql FOR SHARE OF a*/",
        {"user": user},
        {"wanted": of_names(sha256s), "teams": of_ids(() if team is None else (team,))},
    )
    found = {row[0] for row in rows}
    return tuple(sha256 for sha256 in dict.fromkeys(sha256s) if sha256 not in found)


def keep(
    kind: str, pairs: Sequence[tuple[str, int]], user: UserId, team: int | None = None
) -> Operation[None]:
    """Strong references for (sha256, holder) that `missing` has found."""
    if pairs:
        yield Statement(
            "INSERT INTO artifact_refs (sha256, kind, holder, user_id, team_id) "
            "SELECT p.sha256, CAST(:kind AS TEXT), p.holder, CAST(:user AS BIGINT), CAST(:team AS BIGINT) "
            "FROM {pairs} AS p WHERE true ON CONFLICT (sha256, kind, holder) DO NOTHING",
            {"kind": kind, "user": user, "team": team},
            {"pairs": Relation((("sha256", "text"), ("holder", "int")), sorted(set(pairs)))},
        )
        yield from count([(*holder_of(user, team), sha256) for sha256, _ in pairs])


def keep_results(named: Sequence[tuple[str, TaskId, int, SpecId, UserId]]) -> Operation[None]:
    """References from ended tasks to what their node uploaded under that lease, or could see through it anyway."""
    if not named:
        return
    relation = Relation(NAMED, sorted(set(named)))
    uploaded = yield Statement(
        "UPDATE artifact_refs SET kind = 'result' FROM {named} AS n WHERE artifact_refs.sha256 = n.sha256 "
        "AND artifact_refs.kind = 'lease' AND artifact_refs.holder = n.task AND artifact_refs.epoch = n.epoch "
        "RETURNING artifact_refs.user_id, artifact_refs.team_id, artifact_refs.sha256",
        {},
        {"named": relation},
    )
    yield from count([(*holder_of(user, team), sha256) for user, team, sha256 in uploaded])
    # what it could see is counted already: for the task's own references
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
    """Nothing strong holds them and nobody has uploaded them since."""
    rows = yield Statement(
        "SELECT a.sha256 FROM artifacts a WHERE a.touched_at < :before AND NOT EXISTS ("  # noqa: S608
        f"SELECT 1 FROM artifact_refs r WHERE r.sha256 = a.sha256 AND r.kind IN {STRONG}) "
        "ORDER BY a.touched_at, a.sha256 LIMIT :limit",
        {"before": before, "limit": limit},
    )
    return tuple(row[0] for row in rows)


@operation
def forget_artifacts(sha256s: Sequence[str], before: Instant = LAST) -> Operation[tuple[str, ...]]:
    """Drops those that still nothing strong holds and nobody has uploaded since; only the bytes of these may go."""
    wanted = {"wanted": of_names(sha256s)}
    yield Statement(
        "SELECT a.sha256 FROM artifacts a WHERE a.sha256 IN (SELECT name FROM {wanted} AS w) /*postgresql FOR UPDATE*/",
        {},
        wanted,
    )
    rows = yield Statement(
        "DELETE FROM artifacts WHERE sha256 IN (SELECT name FROM {wanted} AS w) AND touched_at < :before AND NOT EXISTS ("  # noqa: S608
        f"SELECT 1 FROM artifact_refs r WHERE r.sha256 = artifacts.sha256 AND r.kind IN {STRONG}) "
        "RETURNING sha256, size_bytes",
        {"before": before},
        wanted,
    )
    forgotten = tuple(row[0] for row in rows)
    if forgotten:
        yield from uncount(dict(rows))
        yield Statement(
            "DELETE FROM artifact_refs WHERE sha256 IN (SELECT name FROM {gone} AS g)",
            {},
            {"gone": of_names(forgotten)},
        )
    return forgotten
