"""Invitations of users to teams, which wait for the invited user's consent; limits of teams per account.

An invitation is stored whether or not its invitee exists, so that an owner cannot find out.
"""

from __future__ import annotations

from typing import NamedTuple

from gpool.core.errors import NotFound, TooMany
from gpool.core.ids import UserId
from gpool.core.model import Instant
from gpool.core.permissions import Role, TeamId
from gpool.server.store.identity_values import Team, TeamInvitation
from gpool.server.store.operations.identity.teams import hold_account, put_member
from gpool.server.store.protocol import Operation, Statement, operation
from gpool.server.store.rows import exists, select, values

MAX_PENDING = 200
"""Pending invitations of one team."""
MAX_LISTED = 200


class _InvitationRow(NamedTuple):
    team_id: TeamId
    name: str
    team_created_at: Instant
    invitee: str
    role: str
    inviter: str
    created_at: Instant
    expires_at: Instant


class _Offered(NamedTuple):
    invitee: str
    role: str


def put_invitation(
    invitation: TeamInvitation, user: UserId | None, maker: UserId
) -> Operation[None]:
    """Invite, or change the role of the same invitation. `TooMany` past `MAX_PENDING` of the team."""
    team, at = invitation.team.id, invitation.created_at
    yield Statement(
        "DELETE FROM team_invitations WHERE team_id = :team AND expires_at <= :at",
        {"team": team, "at": at},
    )
    [pending] = yield from values(
        int,
        "SELECT COUNT(*) FROM team_invitations WHERE team_id = :team AND invitee <> :invitee",
        {"team": team, "invitee": invitation.invitee},
    )
    if pending >= MAX_PENDING:
        raise TooMany(
            f"the team has {pending} invitations that nobody has accepted yet, the most allowed; withdraw some"
        )
    yield Statement(
        "INSERT INTO team_invitations (team_id, invitee, user_id, role, made_by, created_at, expires_at) "
        "VALUES (:team, :invitee, :user, :role, :maker, :at, :expires_at) ON CONFLICT (team_id, invitee) "
        "DO UPDATE SET user_id = excluded.user_id, role = excluded.role, made_by = excluded.made_by, "
        "created_at = excluded.created_at, expires_at = excluded.expires_at",
        {
            "team": team,
            "invitee": invitation.invitee,
            "user": user,
            "role": invitation.role.value,
            "maker": maker,
            "at": at,
            "expires_at": invitation.expires_at,
        },
    )


@operation
def invitations_of_team(team: TeamId, at: Instant) -> Operation[tuple[TeamInvitation, ...]]:
    return (yield from _invitations("i.team_id = :id", team, at))


@operation
def invitations_of_user(user: UserId, at: Instant) -> Operation[tuple[TeamInvitation, ...]]:
    return (yield from _invitations("i.user_id = :id", user, at))


def _invitations(where: str, id_: int, at: Instant) -> Operation[tuple[TeamInvitation, ...]]:
    rows = yield from select(
        _InvitationRow,
        "SELECT i.team_id, t.name, t.created_at, i.invitee, i.role, COALESCE(u.name, ''), i.created_at, i.expires_at "  # noqa: S608
        "FROM team_invitations i JOIN teams t ON t.id = i.team_id LEFT JOIN users u ON u.id = i.made_by "
        f"WHERE {where} AND i.expires_at > :at ORDER BY i.created_at DESC, i.invitee LIMIT :most",
        {"id": id_, "at": at, "most": MAX_LISTED},
    )
    return tuple(
        TeamInvitation(
            Team(row.team_id, row.name, row.team_created_at),
            row.invitee,
            Role(row.role),
            row.inviter,
            row.created_at,
            row.expires_at,
        )
        for row in rows
    )


@operation
def accept(team: TeamId, user: UserId, most: int, at: Instant) -> Operation[Role]:
    """Join by invitation; `NotFound` without one. A higher role stays. `TooMany` past `most` teams."""
    rows = yield from select(
        _Offered,
        "SELECT invitee, role FROM team_invitations WHERE team_id = :team AND user_id = :user AND expires_at > :at "
        "ORDER BY created_at DESC LIMIT 1",
        {"team": team, "user": user, "at": at},
    )
    if not rows:
        raise NotFound("there is no such invitation for you; it was withdrawn, or it expired")
    yield from room_for_team(user, team, most)
    yield Statement(
        "DELETE FROM team_invitations WHERE team_id = :team AND user_id = :user",
        {"team": team, "user": user},
    )
    role = Role(rows[0].role)
    yield from put_member(team, user, role, at, raises_only=True)
    return role


@operation
def decline(team: TeamId, user: UserId) -> Operation[bool]:
    return (
        yield from exists(
            "DELETE FROM team_invitations WHERE team_id = :team AND user_id = :user RETURNING team_id",
            {"team": team, "user": user},
        )
    )


@operation
def withdraw(team: TeamId, invitee: str) -> Operation[bool]:
    return (
        yield from exists(
            "DELETE FROM team_invitations WHERE team_id = :team AND invitee = :invitee RETURNING team_id",
            {"team": team, "invitee": invitee},
        )
    )


# ---- limits


def room_for_team(user: UserId, team: TeamId, most: int) -> Operation[None]:
    """`TooMany` if the user is in `most` other teams. Locks the account until the commit."""
    yield from hold_account("user", user)
    [count] = yield from values(
        int,
        "SELECT COUNT(*) FROM memberships WHERE user_id = :user AND team_id <> :team",
        {"user": user, "team": team},
    )
    if count >= most:
        raise TooMany(
            f"the account is in {count} teams, and {most} are allowed here; leave one with: gpool team leave TEAM"
        )


def room_for_own_team(user: UserId, most: int) -> Operation[None]:
    """`TooMany` if the user owns `most` teams. Locks the account until the commit."""
    yield from hold_account("user", user)
    [count] = yield from values(
        int,
        "SELECT COUNT(*) FROM memberships WHERE user_id = :user AND role = 'owner'",
        {"user": user},
    )
    if count >= most:
        raise TooMany(
            f"the account owns {count} teams, and {most} are allowed here; delete one with: gpool team delete TEAM"
        )
