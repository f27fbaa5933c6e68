"""Deleting an account: credentials and names go at once, its tasks in bounded batches, its row last.

A hash of the name stays: nodes lent to `user:NAME` must not be lent to another account that takes the name.
Teams of which the user is the only member go with the account; a team with other members must have another owner. Ids
stay in the audit log and in tasks of other teams.
"""

from __future__ import annotations

from typing import NamedTuple

from gpool.core.errors import Conflict, NotFound
from gpool.core.ids import NodeId, TaskId, UserId, encode
from gpool.core.model import Instant
from gpool.core.permissions import TeamId
from gpool.server.store.operations.events.outbox import forget_account
from gpool.server.store.operations.identity.accounts import hashed_name
from gpool.server.store.operations.identity.named_secrets import forget_secrets
from gpool.server.store.operations.money.accounts import forget_holder
from gpool.server.store.operations.tasks.artifacts import (
    ArtifactReference,
    destroy_key,
    release,
)
from gpool.server.store.operations.tasks.storage import Account, forget_uploads_of
from gpool.server.store.protocol import Operation, Statement, operation
from gpool.server.store.rows import exists, of_ids, select, values

ONLY_MEMBER = "(SELECT COUNT(*) FROM memberships o WHERE o.team_id = m.team_id) = 1"


class _Membership(NamedTuple):
    team_id: TeamId
    name: str
    role: str
    others: int
    other_owners: int


@operation
def delete_account(user: UserId, at: Instant) -> Operation[tuple[NodeId, ...]]:
    """Make the account unusable and nameless; return its nodes. `Conflict` for the last operator or a team's last owner."""
    names = yield from values(
        str,
        "SELECT name FROM users WHERE id = :user AND deleted_at IS NULL /*postgresql FOR UPDATE*/",
        {"user": user},
    )
    if not names:
        raise NotFound("there is no such user")
    operators = yield from values(
        UserId,
        "SELECT id FROM users WHERE permissions LIKE '%operator%' AND disabled_at IS NULL",
    )
    if operators == [user]:
        raise Conflict("this is the last operator; make somebody else one first")
    yield from _check_teams(user)
    for sql in (
        "DELETE FROM memberships WHERE user_id = :user AND "
        "(SELECT COUNT(*) FROM memberships o WHERE o.team_id = memberships.team_id) > 1",
        "DELETE FROM api_keys WHERE user_id = :user",
        "DELETE FROM sessions WHERE user_id = :user",
        "DELETE FROM wallets WHERE user_id = :user",
        "DELETE FROM wallet_changes WHERE user_id = :user",
        "DELETE FROM oidc_identities WHERE user_id = :user",
        "DELETE FROM invites WHERE owner_id = :user",
        "DELETE FROM user_invites WHERE made_by = :user AND used_at IS NULL",
        # the claims end with the nodes (`gpus.lapse`), an operator's decision for this account too
        "UPDATE gpu_bindings SET settled_at = NULL WHERE owner_id = :user",
        "DELETE FROM quotas WHERE kind = 'user' AND id = :user",
        "DELETE FROM usage WHERE kind = 'user' AND id = :user",
        "DELETE FROM idempotency WHERE user_id = :user",
    ):
        yield Statement(sql, {"user": user})
    yield from forget_holder(("user", user))
    yield from forget_account(("user", user))
    yield from forget_secrets(("user", user))
    yield Statement(
        "INSERT INTO retired_names (hashed) VALUES (:hashed) ON CONFLICT (hashed) DO NOTHING",
        {"hashed": hashed_name(names[0])},
    )
    yield Statement(
        "UPDATE users SET name = :name, permissions = '', password_hash = NULL, "
        "disabled_at = :at, deleted_at = :at WHERE id = :user",
        {"name": f"deleted {encode('user', user)}", "at": at, "user": user},
    )
    nodes = yield from values(
        NodeId, "SELECT id FROM nodes WHERE owner_id = :user ORDER BY id", {"user": user}
    )
    return tuple(nodes)


def _check_teams(user: UserId) -> Operation[None]:
    rows = yield from select(
        _Membership,
        "SELECT m.team_id, t.name, m.role, (SELECT COUNT(*) FROM memberships o WHERE o.team_id = m.team_id "
        "AND o.user_id <> m.user_id), (SELECT COUNT(*) FROM memberships o WHERE o.team_id = m.team_id "
        "AND o.user_id <> m.user_id AND o.role = 'owner') FROM memberships m JOIN teams t ON t.id = m.team_id "
        "WHERE m.user_id = :user ORDER BY t.name",
        {"user": user},
    )
    stuck = [
        row.name for row in rows if row.role == "owner" and row.others and not row.other_owners
    ]
    if stuck:
        raise Conflict(
            f"you are the last owner of {', '.join(repr(name) for name in stuck)}, which has other members; "
            "make one of them an owner, or delete the team, then delete your account"
        )


@operation
def deleted_accounts(limit: int) -> Operation[tuple[UserId, ...]]:
    """Deleted accounts whose tasks or rows are not all gone yet."""
    found = yield from values(
        UserId,
        "SELECT id FROM users WHERE deleted_at IS NOT NULL ORDER BY deleted_at LIMIT :limit",
        {"limit": limit},
    )
    return tuple(found)


@operation
def accounts_of(user: UserId) -> Operation[tuple[Account, ...]]:
    """The user, and the teams of which the user is the only member."""
    teams = yield from values(
        TeamId,
        f"SELECT m.team_id FROM memberships m WHERE m.user_id = :user AND {ONLY_MEMBER}",  # noqa: S608
        {"user": user},
    )
    return (("user", user), *(("team", team) for team in sorted(teams)))


@operation
def open_tasks_of(account: Account, limit: int) -> Operation[tuple[TaskId, ...]]:
    """Tasks to cancel: queued, or held and not cancelled yet."""
    whose = "t.team_id = :id" if account[0] == "team" else "t.user_id = :id AND t.team_id IS NULL"
    found = yield from values(
        TaskId,
        f"SELECT t.id FROM tasks t WHERE t.status = 'queued' AND {whose} UNION ALL "  # noqa: S608
        f"SELECT t.id FROM tasks t WHERE t.holding = 1 AND t.status IN ('leased', 'running') AND {whose} LIMIT :limit",
        {"id": account[1], "limit": limit},
    )
    return tuple(found)


@operation
def finish_deletion(account: Account) -> Operation[tuple[str, ...] | None]:
    """Delete what is left of an account without tasks; return artifacts to remove. None: it still has tasks."""
    kind, number = account
    whose = "team_id = :id" if kind == "team" else "user_id = :id AND team_id IS NULL"
    if (yield from exists(f"SELECT 1 FROM tasks WHERE {whose} LIMIT 1", {"id": number})):  # noqa: S608
        return None
    dropped: list[ArtifactReference] = []
    if kind == "user":
        yield from forget_uploads_of(f"u{number}")
        dropped = yield from select(
            ArtifactReference,
            "DELETE FROM artifact_refs WHERE kind = 'upload' AND holder = :id RETURNING user_id, team_id, sha256",
            {"id": number},
        )
    unused = yield from release(dropped)
    batches = yield from values(
        int,
        f"SELECT id FROM batches WHERE {whose}",  # noqa: S608
        {"id": number},
    )
    yield Statement(
        "DELETE FROM batches WHERE id IN (SELECT id FROM {batches} AS i)",
        {},
        {"batches": of_ids(batches)},
    )
    yield Statement(
        "DELETE FROM storage WHERE kind = :kind AND id = :id", {"kind": kind, "id": number}
    )
    yield Statement(
        "DELETE FROM stored WHERE kind = :kind AND id = :id", {"kind": kind, "id": number}
    )
    yield from destroy_key(account)
    if kind == "team":
        for sql in (
            "DELETE FROM memberships WHERE team_id = :id",
            "DELETE FROM quotas WHERE kind = 'team' AND id = :id",
            "DELETE FROM usage WHERE kind = 'team' AND id = :id",
            "DELETE FROM teams WHERE id = :id",
        ):
            yield Statement(sql, {"id": number})
        yield from forget_holder(("team", number))
        yield from forget_account(("team", number))
        yield from forget_secrets(("team", number))
    else:
        yield Statement("DELETE FROM gpu_bindings WHERE owner_id = :id", {"id": number})
        yield Statement(
            "DELETE FROM users WHERE id = :id AND deleted_at IS NOT NULL", {"id": number}
        )
    return unused
