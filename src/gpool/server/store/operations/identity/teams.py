"""Teams and who is in them, quotas, and what is in use. A team never loses its last owner while it has members.

Whoever changes a team locks its row first. QuotaUsage is read from what is open: queued tasks and held leases by partial
indexes, storage from a counter that `storage` keeps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gpool.core.errors import Conflict, NotFound
from gpool.core.ids import UserId
from gpool.core.model import Instant
from gpool.core.permissions import Role, TeamId
from gpool.core.quotas import QuotaUsage
from gpool.server.store.identity_values import GivenQuota, Holder, Member, Team
from gpool.server.store.operation import operation
from gpool.server.store.protocol import Operation, Relation, Statement
from gpool.server.store.rows import allocation_from, of_ids

QUOTA = "running_gpu_milli, queued_tasks, storage_bytes, guaranteed_gpu_milli"
"""As `GivenQuota` has them."""
RANK = "CASE {} WHEN 'owner' THEN 3 WHEN 'member' THEN 2 ELSE 1 END"


# ---- teams


@operation
def create_team(team: Team, owner: UserId) -> Operation[None]:
    taken = yield Statement("SELECT 1 FROM teams WHERE name = :name", {"name": team.name})
    if taken:
        raise Conflict(f"there is a team {team.name!r} already; choose another name")
    yield Statement(
        "INSERT INTO teams (id, name, created_at) VALUES (:id, :name, :at)",
        {"id": team.id, "name": team.name, "at": team.created_at},
    )
    yield from put_member(team.id, owner, Role.OWNER, team.created_at)


@operation
def team(id: TeamId) -> Operation[Team | None]:
    rows = yield Statement("SELECT id, name, created_at FROM teams WHERE id = :id", {"id": id})
    return Team(*rows[0]) if rows else None


@operation
def team_by_name(name: str) -> Operation[Team | None]:
    rows = yield Statement(
        "SELECT id, name, created_at FROM teams WHERE name = :name", {"name": name}
    )
    return Team(*rows[0]) if rows else None


@operation
def teams(after: int, limit: int) -> Operation[tuple[Team, ...]]:
    """All teams, for operators; by id."""
    rows = yield Statement(
        "SELECT id, name, created_at FROM teams WHERE id > :after ORDER BY id LIMIT :limit",
        {"after": after, "limit": limit},
    )
    return tuple(Team(*row) for row in rows)


@operation
def rename_team(id: TeamId, name: str) -> Operation[bool]:
    """False: no such team."""
    rows = yield Statement("SELECT id FROM teams WHERE name = :name", {"name": name})
    if rows and rows[0][0] != id:
        raise Conflict(f"there is a team {name!r} already; choose another name")
    renamed = yield Statement(
        "UPDATE teams SET name = :name WHERE id = :id RETURNING id", {"name": name, "id": id}
    )
    return bool(renamed)


@operation
def delete_team(id: TeamId) -> Operation[bool]:
    """Not while it has open tasks. What it did stays in the store, for operators to see."""
    if not (yield from _locked(id)):
        return False
    rows = yield Statement(
        "SELECT 1 FROM tasks WHERE team_id = :id AND status = 'queued' UNION ALL "
        "SELECT 1 FROM tasks WHERE team_id = :id AND holding = 1 LIMIT 1",
        {"id": id},
    )
    if rows:
        raise Conflict("this team has tasks that are not finished; cancel them first")
    for sql in (
        "DELETE FROM memberships WHERE team_id = :id",
        "DELETE FROM quotas WHERE kind = 'team' AND id = :id",
        "DELETE FROM teams WHERE id = :id",
    ):
        yield Statement(sql, {"id": id})
    return True


def _locked(team: TeamId) -> Operation[bool]:
    rows = yield Statement(
        "SELECT 1 FROM teams WHERE id = :id /*postgresql FOR UPDATE*/", {"id": team}
    )
    return bool(rows)


# ---- members


def roles_of(user: UserId) -> Operation[dict[TeamId, Role]]:
    rows = yield Statement(
        "SELECT team_id, role FROM memberships WHERE user_id = :user ORDER BY team_id",
        {"user": user},
    )
    return {TeamId(row[0]): Role(row[1]) for row in rows}


@operation
def teams_of(user: UserId) -> Operation[Mapping[TeamId, Role]]:
    """The role in each team."""
    return (yield from roles_of(user))


@operation
def named_teams_of(user: UserId) -> Operation[tuple[tuple[Team, Role], ...]]:
    """The same, with the teams' names, for a page or a listing."""
    rows = yield Statement(
        "SELECT t.id, t.name, t.created_at, m.role FROM memberships m JOIN teams t ON t.id = m.team_id "
        "WHERE m.user_id = :user ORDER BY t.name",
        {"user": user},
    )
    return tuple((Team(row[0], row[1], row[2]), Role(row[3])) for row in rows)


@operation
def members(team: TeamId) -> Operation[tuple[Member, ...]]:
    rows = yield Statement(
        "SELECT m.team_id, m.user_id, u.name, m.role, m.since FROM memberships m "
        "JOIN users u ON u.id = m.user_id WHERE m.team_id = :team ORDER BY m.since, m.user_id",
        {"team": team},
    )
    return tuple(Member(row[0], row[1], row[2], Role(row[3]), row[4]) for row in rows)


def put_member(
    team: TeamId, user: UserId, role: Role, at: Instant, *, raises_only: bool = False
) -> Operation[None]:
    """For other operations to include. `raises_only`: a higher role that is there stays."""
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
    """Makes a member of somebody who is none, or changes the role."""
    if not (yield from _locked(team)):
        raise NotFound("there is no such team")
    there = yield Statement("SELECT 1 FROM users WHERE id = :user", {"user": user})
    if not there:
        raise NotFound("there is no such user")
    if role is not Role.OWNER:
        yield from _another_owner(team, user)
    yield from put_member(team, user, role, at)


@operation
def remove_member(team: TeamId, user: UserId) -> Operation[bool]:
    """False: not a member."""
    if not (yield from _locked(team)):
        return False
    yield from _another_owner(team, user)
    rows = yield Statement(
        "DELETE FROM memberships WHERE team_id = :team AND user_id = :user RETURNING user_id",
        {"team": team, "user": user},
    )
    return bool(rows)


def _another_owner(team: TeamId, user: UserId) -> Operation[None]:
    """Refuses when this user is the only owner."""
    rows = yield Statement(
        "SELECT user_id FROM memberships WHERE team_id = :team AND role = 'owner'", {"team": team}
    )
    if [row[0] for row in rows] == [user]:
        raise Conflict("this is the team's last owner; make somebody else one first")


# ---- quotas


@operation
def set_quota(kind: Holder, id: int, quota: GivenQuota) -> Operation[None]:
    yield Statement(
        f"INSERT INTO quotas (kind, id, {QUOTA}) "  # noqa: S608
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
    """What was set; nothing set is the default in everything."""
    rows = yield Statement(
        f"SELECT {QUOTA} FROM quotas WHERE kind = :kind AND id = :id",  # noqa: S608
        {"kind": kind, "id": id},
    )
    return GivenQuota(*rows[0]) if rows else GivenQuota()


@operation
def quotas_of(
    holders: Collection[tuple[Holder, int]],
) -> Operation[dict[tuple[Holder, int], GivenQuota]]:
    """What was set of these."""
    rows = yield Statement(
        f"SELECT q.kind, q.id, {QUOTA} FROM {{holders}} AS h JOIN quotas q ON q.kind = h.kind AND q.id = h.id",  # noqa: S608
        {},
        {"holders": Relation((("kind", "text"), ("id", "int")), sorted(holders))},
    )
    return {(row[0], row[1]): GivenQuota(*row[2:]) for row in rows}


@operation
def quotas() -> Operation[dict[tuple[Holder, int], GivenQuota]]:
    """All that were set: the scheduler keeps to what they say of GPUs."""
    rows = yield Statement(f"SELECT kind, id, {QUOTA} FROM quotas")  # noqa: S608
    return {(row[0], row[1]): GivenQuota(*row[2:]) for row in rows}


@operation
def usage_of(kind: Holder, id: int) -> Operation[QuotaUsage]:
    """A user's tasks count for the user, whoever they are for; a team's for the team too. Storage counts for its owner."""
    whose = "team_id" if kind == "team" else "user_id"
    lines = yield Statement(
        "SELECT node_id, allocation_number, MIN(allocation) FROM tasks "  # noqa: S608
        f"WHERE holding = 1 AND {whose} = :id AND node_id IS NOT NULL GROUP BY node_id, allocation_number UNION ALL "
        "SELECT m.node_id, m.allocation_number, m.allocation FROM tasks t JOIN members m ON m.task_id = t.id "
        f"WHERE t.holding = 1 AND t.{whose} = :id AND t.node_id IS NULL",
        {"id": id},
    )
    queued = yield Statement(
        f"SELECT COUNT(*) FROM tasks WHERE status = 'queued' AND {whose} = :id",  # noqa: S608
        {"id": id},
    )
    stored = yield Statement(
        "SELECT COALESCE(SUM(size_bytes), 0) FROM storage WHERE kind = :kind AND id = :id",
        {"kind": kind, "id": id},
    )
    running = sum(
        part.share_milli
        for _, number, text in lines
        for part in allocation_from(number, text).slices
    )
    return QuotaUsage(running, queued[0][0], int(stored[0][0]))


@operation
def hold_account(kind: Holder, id: int) -> Operation[None]:
    """Until the commit nobody else who asks for it passes: before a usage is compared with a quota. Users before teams."""
    table = "teams" if kind == "team" else "users"
    yield Statement(f"SELECT 1 FROM {table} WHERE id = :id /*postgresql FOR UPDATE*/", {"id": id})  # noqa: S608


@operation
def queued_of(
    most: Mapping[tuple[Holder, int], int],
) -> Operation[dict[tuple[Holder, int], int]]:
    """How many tasks of each wait, counted no further than past the most of them. Until the commit nobody else is told."""
    found = dict.fromkeys(most, 0)
    kinds: tuple[tuple[Holder, str, str], ...] = (
        ("user", "users", "user_id"),
        ("team", "teams", "team_id"),
    )
    for (
        kind,
        table,
        column,
    ) in kinds:  # locks are taken in one order: users before teams, each by id
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
        rows = yield Statement(
            f"SELECT w.id, (SELECT COUNT(*) FROM (SELECT 1 FROM tasks t WHERE t.status = 'queued' "  # noqa: S608
            f"AND t.{column} = w.id LIMIT :most) AS q) FROM {{wanted}} AS w",
            {"most": max(limits.values()) + 1},
            wanted,
        )
        found.update({(kind, id_): int(count) for id_, count in rows})
    return found
