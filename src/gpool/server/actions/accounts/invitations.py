"""Membership by consent: owners invite, the invited user accepts or declines. Names cannot be probed this way."""

from __future__ import annotations

import msgspec

from gpool.core.errors import NotFound
from gpool.core.ids import UserId, decode, encode
from gpool.core.model import SECOND, Instant, Span
from gpool.core.permissions import Action, Role, TeamId
from gpool.server.actions.accounts import teams
from gpool.server.actions.accounts.teams import named, permitted
from gpool.server.actions.audit import audited, entry
from gpool.server.actions.owners import refresh_owners
from gpool.server.identity.audit import AuditEntry
from gpool.server.identity.authorization import own, permit
from gpool.server.server import Once, Server
from gpool.server.store.identity_values import Caller, TeamInvitation
from gpool.server.store.operations.identity import invitations as operations
from gpool.server.store.operations.identity import teams as team_operations
from gpool.server.store.operations.identity import users
from gpool.server.store.protocol import Operation, operation
from gpool.wire.documents import instant_to_datetime
from gpool.wire.identity import InvitationDocument, TeamDocument, TeamMemberDocument

LIFE = Span(14 * 86_400 * SECOND)


class _SavedMembership(msgspec.Struct, frozen=True):
    """Answer stored under its Idempotency-Key. `user` 0: invited, not a member."""

    user: int
    expires_at: int = 0


async def set_member(
    server: Server, who: Caller, id_: TeamId, user: str, role: Role, once: Once | None
) -> TeamMemberDocument | InvitationDocument:
    """Change the role of a member; invite anybody else. The answer is the same whether or not the account exists."""
    now = server.now
    expires_at = Instant(now + LIFE)

    def recorded(found: UserId | None) -> list[AuditEntry]:
        thing = encode("team", id_)
        if found is None:
            return [entry(now, who, "team.invite", thing, user=user, role=role.value)]
        return [entry(now, who, "team.role", thing, user=encode("user", found), role=role.value)]

    change = audited(_set_member(id_, who, user, role, now, expires_at), recorded)
    kept = await server.write_once(
        who.user,
        once,
        change,
        lambda found: msgspec.json.encode(_SavedMembership(found or 0, expires_at)),
    )
    saved = msgspec.json.decode(kept.body, type=_SavedMembership)
    team = await server.store.read(team_operations.team(id_))
    if team is None:
        raise NotFound(f"no {named(id_)} of yours")
    if not saved.user:
        made = TeamInvitation(team, user, role, who.user.name, now, Instant(saved.expires_at))
        return _document(made)
    server.credentials.forget()
    return await teams.member(server, id_, UserId(saved.user))


@operation
def _set_member(
    id_: TeamId, who: Caller, user: str, role: Role, at: Instant, expires_at: Instant
) -> Operation[UserId | None]:
    team, _ = yield from permitted(id_, who, Action.TEAM_ROLE_SET)
    if user.startswith("u-"):
        found = yield from users.user(UserId(decode("user", user)))
    else:
        found = yield from users.user_by_name(user)
    if found is not None and id_ in (yield from team_operations.teams_of(found.id)):
        yield from team_operations.set_role(id_, found.id, role, at)
        return found.id
    made = TeamInvitation(team, user, role, who.user.name, at, expires_at)
    yield from operations.put_invitation(made, None if found is None else found.id, who.user.id)
    return None


# ---- pending invitations of a team


async def list_of_team(server: Server, who: Caller, id_: TeamId) -> list[InvitationDocument]:
    return [_document(each) for each in await server.store.read(_of_team(id_, who, server.now))]


@operation
def _of_team(id_: TeamId, who: Caller, at: Instant) -> Operation[tuple[TeamInvitation, ...]]:
    yield from permitted(id_, who, Action.TEAM_READ)
    return (yield from operations.invitations_of_team(id_, at))


async def withdraw(
    server: Server, who: Caller, id_: TeamId, invitee: str, once: Once | None
) -> None:
    facts = {"user": invitee[:64], "role": "none"}
    audit_entry = entry(server.now, who, "team.invite", encode("team", id_), **facts)
    withdrawing = audited(_withdraw(id_, who, invitee), [audit_entry])
    await server.write_once(who.user, once, withdrawing, lambda _: b"")


@operation
def _withdraw(id_: TeamId, who: Caller, invitee: str) -> Operation[bool]:
    yield from permitted(id_, who, Action.TEAM_INVITE)
    if not (yield from operations.withdraw(id_, invitee)):
        raise NotFound(f"no invitation of {invitee[:64]!r} to {named(id_)}")
    return True


# ---- invitations of the caller


async def list_own(server: Server, who: Caller) -> list[InvitationDocument]:
    permit(who, Action.TEAMS_LIST, own(who))
    found = await server.store.read(operations.invitations_of_user(who.user.id, server.now))
    return [_document(each) for each in found]


async def accept(server: Server, who: Caller, id_: TeamId, once: Once | None) -> TeamDocument:
    """The route has checked TEAM_JOIN."""
    audit_entry = entry(server.now, who, "team.join", encode("team", id_), via="invitation")
    most = server.settings.user_teams
    accepting = audited(operations.accept(id_, who.user.id, most, server.now), [audit_entry])
    await server.write_once(who.user, once, accepting, lambda _: b"")
    server.credentials.forget()
    await refresh_owners(server, [who.user.id])
    return await teams.as_member(server, who, id_)


async def decline(server: Server, who: Caller, id_: TeamId, once: Once | None) -> None:
    """The route has checked TEAM_JOIN."""
    audit_entry = entry(server.now, who, "team.decline", encode("team", id_))
    declining = audited(_decline(id_, who), [audit_entry])
    await server.write_once(who.user, once, declining, lambda _: b"")


@operation
def _decline(id_: TeamId, who: Caller) -> Operation[bool]:
    if not (yield from operations.decline(id_, who.user.id)):
        raise NotFound(f"no invitation of yours to {named(id_)}")
    return True


def _document(invitation: TeamInvitation) -> InvitationDocument:
    return InvitationDocument(
        team=encode("team", invitation.team.id),
        team_name=invitation.team.name,
        user=invitation.invitee,
        role=invitation.role.value,
        invited_by=invitation.inviter,
        expires_at=instant_to_datetime(invitation.expires_at),
    )
