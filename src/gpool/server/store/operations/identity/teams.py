"""Teams, members, quotas and usage. A team with members has an owner; changes lock the team's row first.

Usage is read from queued tasks and held leases by partial indexes, and from the counter of `tasks.storage`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple, cast

from gpool.core.errors import Conflict, NotFound
from gpool.core.ids import UserId
from gpool.core.model import Instant
from gpool.core.permissions import Role, TeamId
from gpool.core.quotas import QuotaUsage
from gpool.server.store.generated_rows import QuotasRecord, TeamsRecord
from gpool.server.store.identity_values import GivenQuota, Holder, Team, TeamMember
from gpool.server.store.operations.events.outbox import forget_account
from gpool.server.store.operations.identity.named_secrets import forget_secrets
from gpool.server.store.operations.money.accounts import forget_holder
from gpool.server.store.protocol import Operation, Relation, Statement, operation
from gpool.server.store.rows import allocation_from, columns, exists, of_ids, select, values

TEAM = columns(TeamsRecord, TeamsRecord, "t")
QUOTA = columns(QuotasRecord, QuotasRecord, "q")
RANK = "CASE {} WHEN 'owner' THEN 3 WHEN 'member' THEN 2 ELSE 1 END"


class _TeamRole(NamedTuple):
    team_id: TeamId
    role: str


class _NamedRole(NamedTuple):
    id: TeamId
    name: str
    created_at: Instant
    role: str


class _MemberRow(NamedTuple):
    team_id: TeamId
    user_id: UserId
    name: str
    role: str
    since: Instant


class _UsedAllocation(NamedTuple):
    node_id: int
    number: int
    allocation: str


class _QueuedCount(NamedTuple):
    id: int
    queued: int


# ---- teams


@operation
def create_team(team: Team, owner: UserId) -> Operation[None]:
    yield from _take_name(team.id, team.name)
    yield Statement(
        "INSERT INTO teams (id, name, created_at) VALUES (:id, :name, :at)",
        {"id": team.id, "name": team.name, "at": team.created_at},
    )
    yield from put_member(team.id, owner, Role.OWNER, team.created_at)


def _take_name(team: TeamId, name: str) -> Operation[None]:
    """Names are never given to a second team: owners' policies and `on` of tasks name teams."""
    takers = yield from values(
        TeamId, "SELECT team_id FROM team_names WHERE name = :name", {"name": name}
    )
    if any(taker != team for taker in takers):
        is_in_use = yield from exists("SELECT 1 FROM teams WHERE name = :name", {"name": name})
        why = "there is a team" if is_in_use else "another team had the name"
        raise Conflict(f"{why} {name!r} already; choose another name")
    if not takers:
        yield Statement(
            "INSERT INTO team_names (name, team_id) VALUES (:name, :team)",
            {"name": name, "team": team},
        )


def _teams(where: str, **parameters: int | str) -> Operation[tuple[Team, ...]]:
    rows = yield from select(
        TeamsRecord,
        f"SELECT {TEAM} FROM teams t WHERE {where}",  # noqa: S608
        parameters,
    )
    return tuple(Team(*row) for row in rows)


@operation
def team(id: TeamId) -> Operation[Team | None]:
    found = yield from _teams("t.id = :id", id=id)
    return found[0] if found else None


@operation
def team_by_name(name: str) -> Operation[Team | None]:
    found = yield from _teams("t.name = :name", name=name)
    return found[0] if found else None


@operation
def teams(after: int, limit: int) -> Operation[tuple[Team, ...]]:
    return (yield from _teams("t.id > :after ORDER BY t.id LIMIT :limit", after=after, limit=limit))


@operation
def rename_team(id: TeamId, name: str) -> Operation[bool]:
    """The former name stays the team's."""
    if not (yield from _locked(id)):
        return False
    yield from _take_name(id, name)
    return (
        yield from exists(
            "UPDATE teams SET name = :name WHERE id = :id RETURNING id", {"name": name, "id": id}
        )
    )


@operation
def delete_team(id: TeamId) -> Operation[bool]:
    """Delete a team; `Conflict` while it has open tasks. Ended tasks stay, for operators."""
    if not (yield from _locked(id)):
        return False
    busy = yield from exists(
        "SELECT 1 FROM tasks WHERE team_id = :id AND status = 'queued' UNION ALL "
        "SELECT 1 FROM tasks WHERE team_id = :id AND holding = 1 LIMIT 1",
        {"id": id},
    )
    if busy:
        raise Conflict("this team has tasks that are not finished; cancel them first")
    for sql in (
        "DELETE FROM memberships WHERE team_id = :id",
        "DELETE FROM team_invitations WHERE team_id = :id",
        "DELETE FROM quotas WHERE kind = 'team' AND id = :id",
        "DELETE FROM teams WHERE id = :id",
    ):
        yield Statement(sql, {"id": id})
    yield from forget_holder(("team", id))
    yield from forget_account(("team", id))
    yield from forget_secrets(("team", id))
    return True


def _locked(team: TeamId) -> Operation[bool]:
    sql = "SELECT 1 FROM teams WHERE id = :id /*postgresql FOR UPDATE*/"
    return (yield from exists(sql, {"id": team}))


# ---- members


def roles_of(user: UserId) -> Operation[dict[TeamId, Role]]:
    rows = yield from select(
        _TeamRole,
        "SELECT team_id, role FROM memberships WHERE user_id = :user ORDER BY team_id",
        {"user": user},
    )
    return {row.team_id: Role(row.role) for row in rows}


@operation
def teams_of(user: UserId) -> Operation[Mapping[TeamId, Role]]:
    return (yield from roles_of(user))


@operation
def named_teams_of(user: UserId) -> Operation[tuple[tuple[Team, Role], ...]]:
    rows = yield from select(
        _NamedRole,
        "SELECT t.id, t.name, t.created_at, m.role FROM memberships m JOIN teams t ON t.id = m.team_id "
        "WHERE m.user_id = :user ORDER BY t.name",
        {"user": user},
    )
    return tuple((Team(row.id, row.name, row.created_at), Role(row.role)) for row in rows)


@operation
def members(team: TeamId) -> Operation[tuple[TeamMember, ...]]:
    rows = yield from select(
        _MemberRow,
        "SELECT m.team_id, m.user_id, u.name, m.role, m.since FROM memberships m "
        "JOIN users u ON u.id = m.user_id WHERE m.team_id = :team ORDER BY m.since, m.user_id",
        {"team": team},
    )
    return tuple(
        TeamMember(row.team_id, row.user_id, row.name, Role(row.role), row.since) for row in rows
    )


def put_member(
    team: TeamId, user: UserId, role: Role, at: Instant, *, raises_only: bool = False
) -> Operation[None]:
    """Add a member or change the role. `raises_only`: a higher role stays."""
    only = ""
    if raises_only:
        only = f" WHERE {RANK.format('memberships.role')} < {RANK.format('excluded.role')}"
    yield Statement(
        "INSERT INTO memberships (team_id, user_id, role, since) VALUES (:team, :user, :role, :at) "  # noqa: S608
        f"ON CONFLICT (team_id, user_id) DO UPDATE SET role = excluded.role{only}",
        {"team": team, "user": user, "role": role.value, "at": at},
    )


@operation
def set_role(team: TeamId, user: UserId, role: Role, at: Instant) -> Operation[None]:
    if not (yield from _locked(team)):
        raise NotFound("there is no such team")
    if not (yield from exists("SELECT 1 FROM users WHERE id = :user", {"user": user})):
        raise NotFound("there is no such user")
    if role is not Role.OWNER:
        yield from _another_owner(team, user)
    yield from put_member(team, user, role, at)


@operation
def remove_member(team: TeamId, user: UserId) -> Operation[bool]:
    if not (yield from _locked(team)):
        return False
    yield from _another_owner(team, user)
    return (
        yield from exists(
            "DELETE FROM memberships WHERE team_id = :team AND user_id = :user RETURNING user_id",
            {"team": team, "user": user},
        )
    )


def _another_owner(team: TeamId, user: UserId) -> Operation[None]:
    owners = yield from values(
        UserId,
        "SELECT user_id FROM memberships WHERE team_id = :team AND role = 'owner'",
        {"team": team},
    )
    if owners == [user]:
        raise Conflict("this is the team's last owner; make somebody else one first")


# ---- quotas


@operation
def set_quota(kind: Holder, id: int, quota: GivenQuota) -> Operation[None]:
    yield Statement(
        "INSERT INTO quotas (kind, id, running_gpu_milli, queued_tasks, storage_bytes, guaranteed_gpu_milli) "
        "VALUES (:kind, :id, :gpus, :tasks, :bytes, :sure) ON CONFLICT (kind, id) DO UPDATE SET "
        "running_gpu_milli = excluded.running_gpu_milli, queued_tasks = excluded.queued_tasks, "
        "storage_bytes = excluded.storage_bytes, guaranteed_gpu_milli = excluded.guaranteed_gpu_milli",
        {
            "kind": kind,
            "id": id,
            "gpus": quota.running_gpu_milli,
            "tasks": quota.queued_tasks,
            "bytes": quota.storage_bytes,
            "sure": quota.guaranteed_gpu_milli,
        },
    )


@operation
def quota_of(kind: Holder, id: int) -> Operation[GivenQuota]:
    return (yield from quotas_of([(kind, id)])).get((kind, id), GivenQuota())


@operation
def quotas_of(
    holders: Collection[tuple[Holder, int]],
) -> Operation[dict[tuple[Holder, int], GivenQuota]]:
    rows = yield from select(
        QuotasRecord,
        f"SELECT {QUOTA} FROM {{holders}} AS h JOIN quotas q ON q.kind = h.kind AND q.id = h.id",  # noqa: S608
        {},
        {"holders": Relation((("kind", "text"), ("id", "int")), sorted(holders))},
    )
    return dict(map(_given, rows))


@operation
def quotas() -> Operation[dict[tuple[Holder, int], GivenQuota]]:
    rows = yield from select(QuotasRecord, f"SELECT {QUOTA} FROM quotas q")  # noqa: S608
    return dict(map(_given, rows))


def _given(row: QuotasRecord) -> tuple[tuple[Holder, int], GivenQuota]:
    quota = GivenQuota(
        row.running_gpu_milli, row.queued_tasks, row.storage_bytes, row.guaranteed_gpu_milli
    )
    return (cast("Holder", row.kind), row.id), quota


@operation
def usage_of(kind: Holder, id: int) -> Operation[QuotaUsage]:
    """A team's task counts for team and user; storage counts for its owner only."""
    whose = "team_id" if kind == "team" else "user_id"
    held = yield from select(
        _UsedAllocation,
        "SELECT node_id, allocation_number, MIN(allocation) FROM tasks "  # noqa: S608
        f"WHERE holding = 1 AND {whose} = :id AND node_id IS NOT NULL GROUP BY node_id, allocation_number UNION ALL "
        "SELECT m.node_id, m.allocation_number, m.allocation FROM tasks t JOIN members m ON m.task_id = t.id "
        f"WHERE t.holding = 1 AND t.{whose} = :id AND t.node_id IS NULL",
        {"id": id},
    )
    [queued] = yield from values(
        int,
        f"SELECT COUNT(*) FROM tasks WHERE status = 'queued' AND {whose} = :id",  # noqa: S608
        {"id": id},
    )
    [stored] = yield from values(
        int,
        "SELECT COALESCE(SUM(size_bytes), 0) FROM storage WHERE kind = :kind AND id = :id",
        {"kind": kind, "id": id},
    )
    running = sum(
        part.share_milli
        for row in held
        for part in allocation_from(row.number, row.allocation).slices
    )
    return QuotaUsage(running, queued, int(stored))


@operation
def hold_account(kind: Holder, id: int) -> Operation[None]:
    """Lock a user or team until the commit, before comparing usage with quota. Lock users before teams."""
    table = "teams" if kind == "team" else "users"
    yield Statement(f"SELECT 1 FROM {table} WHERE id = :id /*postgresql FOR UPDATE*/", {"id": id})  # noqa: S608


@operation
def queued_of(
    most: Mapping[tuple[Holder, int], int],
) -> Operation[dict[tuple[Holder, int], int]]:
    """Count queued tasks by account, up to one more than the largest limit; lock the accounts until the commit."""
    found = dict.fromkeys(most, 0)
    kinds: tuple[tuple[Holder, str, str], ...] = (
        ("user", "users", "user_id"),
        ("team", "teams", "team_id"),
    )
    for kind, table, column in kinds:  # one lock order for all: users before teams, each by id
        limits = {id_: limit for (of, id_), limit in most.items() if of == kind}
        if not limits:
            continue
        wanted = {"wanted": of_ids(limits)}
        yield Statement(
            f"SELECT 1 FROM {{wanted}} AS w JOIN {table} a ON a.id = w.id "  # noqa: S608
            "/*postgresql ORDER BY a.id FOR UPDATE OF a*/",
            {},
            wanted,
        )
        rows = yield from select(
            _QueuedCount,
            f"SELECT w.id, (SELECT COUNT(*) FROM (SELECT 1 FROM tasks t WHERE t.status = 'queued' "  # noqa: S608
            f"AND t.{column} = w.id AND t.parent_id IS NULL LIMIT :most) AS q) FROM {{wanted}} AS w",
            {"most": max(limits.values()) + 1},
            wanted,
        )
        found.update({(kind, row.id): row.queued for row in rows})
    return found
