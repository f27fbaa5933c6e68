"""Teams: creation, changes, members, invites. `core.permissions` defines roles; the store keeps at least one owner."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from gpool.core.errors import Invalid, NotFound
from gpool.core.ids import UserId, encode
from gpool.core.model import Instant, Permission
from gpool.core.permissions import Action, ObjectKind, Role, TeamId, Thing, missing
from gpool.core.quotas import Quota
from gpool.server.actions import quotas
from gpool.server.actions.accounts.accounts import USER_INVITE_PREFIX
from gpool.server.actions.audit import audited, entry
from gpool.server.actions.owners import refresh_owners
from gpool.server.identity import authorization
from gpool.server.identity.authorization import own, permit
from gpool.server.server import Once, Server
from gpool.server.settings import span
from gpool.server.store.identity_values import Caller, GivenQuota, Team, TeamMember, UserInvite
from gpool.server.store.operations.identity import accounts
from gpool.server.store.operations.identity import invitations as invitation_operations
from gpool.server.store.operations.identity import teams as operations
from gpool.server.store.protocol import Operation, operation
from gpool.wire.documents import instant_to_datetime
from gpool.wire.identity import (
    QuotaDocument,
    TeamDocument,
    TeamInviteRequest,
    TeamMemberDocument,
    TeamPatch,
    UserInviteDocument,
)

TEAM_INVITE_PREFIX = "gpt_"


class _SavedTeam(msgspec.Struct, frozen=True):
    id: int


class SavedInvite(msgspec.Struct, frozen=True):
    """Answer stored under its Idempotency-Key, without the token, which is derived again."""

    expires_at: int


# ---- reading


async def list_teams(server: Server, who: Caller) -> list[TeamDocument]:
    permit(who, Action.TEAMS_LIST, own(who))
    found = await server.store.read(operations.named_teams_of(who.user.id))
    return [document(team, role) for team, role in found if team.id in who.teams]


async def list_all_teams(
    server: Server, who: Caller, after: TeamId, limit: int
) -> list[TeamDocument]:
    """The route has checked USERS_LIST."""
    found = await server.store.read(operations.teams(after, limit))
    return [document(team, who.teams.get(team.id)) for team in found]


async def get_team(server: Server, who: Caller, id_: TeamId) -> TeamDocument:
    team, quota = await server.store.read(permitted(id_, who, Action.TEAM_READ))
    return document(team, who.teams.get(id_), quota)


async def members(server: Server, who: Caller, id_: TeamId) -> list[TeamMemberDocument]:
    found = await server.store.read(_members(id_, who))
    return [_member(each) for each in found]


@operation
def permitted(id_: TeamId, who: Caller, action: Action) -> Operation[tuple[Team, GivenQuota]]:
    team = yield from operations.team(id_)
    permit(who, action, _thing(team), named(id_))
    assert team is not None
    return team, (yield from operations.quota_of("team", id_))


@operation
def _members(id_: TeamId, who: Caller) -> Operation[tuple[TeamMember, ...]]:
    yield from permitted(id_, who, Action.TEAM_READ)
    return (yield from operations.members(id_))


def _thing(team: Team | None) -> Thing:
    return missing(ObjectKind.TEAM) if team is None else Thing(ObjectKind.TEAM, team=team.id)


def named(id_: TeamId) -> str:
    return f"team {encode('team', id_)}"


# ---- changes


async def create_team(server: Server, who: Caller, name: str, once: Once | None) -> TeamDocument:
    permit(who, Action.TEAM_MAKE, own(who))
    team = Team(TeamId(server.ids.next()), name, server.now)
    audit_entry = entry(server.now, who, "team.make", encode("team", team.id), name=name)
    making = audited(_make(team, who.user.id, server.settings.user_own_teams), [audit_entry])
    answered = await server.write_once(
        who.user, once, making, lambda id_: msgspec.json.encode(_SavedTeam(id_))
    )
    server.credentials.forget()
    await refresh_owners(server, [who.user.id])
    id_ = TeamId(msgspec.json.decode(answered.body, type=_SavedTeam).id)
    found = await server.store.read(operations.team(id_))
    return document(found or team, Role.OWNER)


@operation
def _make(team: Team, owner: UserId, most: int) -> Operation[int]:
    yield from invitation_operations.room_for_own_team(owner, most)
    yield from operations.create_team(team, owner)
    return team.id


async def change(
    server: Server, who: Caller, id_: TeamId, wanted: TeamPatch, once: Once | None
) -> TeamDocument:
    if wanted.name is None and wanted.quota is None:
        raise Invalid("nothing to change; send 'name' or 'quota'")
    facts = {
        name: str(value)
        for name, value in wanted.model_dump(exclude_none=True, mode="json").items()
    }
    audit_entry = entry(server.now, who, "team.change", encode("team", id_), **facts)
    change = audited(_change(id_, who, wanted, server.settings.team_quota), [audit_entry])
    answered = await server.write_once(who.user, once, change, lambda _: b"")
    if answered.value is None:  # a repetition, for which no permission was asked
        team, quota = await server.store.read(permitted(id_, who, Action.TEAM_CHANGE))
    else:
        team, quota = answered.value
    if wanted.quota is not None:
        await quotas.refresh(server)
    return document(team, who.teams.get(id_), quota)


@operation
def _change(
    id_: TeamId, who: Caller, wanted: TeamPatch, usual: Quota
) -> Operation[tuple[Team, GivenQuota]]:
    team, quota = yield from permitted(id_, who, Action.TEAM_CHANGE)
    if wanted.quota is not None:
        permit(who, Action.QUOTA_SET, Thing(ObjectKind.ACCOUNT, team=id_), named(id_))
        quotas.check(given(wanted.quota), usual)
    if wanted.name is not None:
        yield from operations.rename_team(id_, wanted.name)  # may refuse, so before other writes
        team = replace(team, name=wanted.name)
    if wanted.quota is not None:
        quota = given(wanted.quota)
        yield from operations.set_quota("team", id_, quota)
    return team, quota


async def delete(server: Server, who: Caller, id_: TeamId, once: Once | None) -> None:
    members = await server.store.read(operations.members(id_))
    audit_entry = entry(server.now, who, "team.delete", encode("team", id_))
    await server.write_once(
        who.user, once, audited(_delete(id_, who), [audit_entry]), lambda _: b""
    )
    server.credentials.forget()
    await refresh_owners(server, [member.user for member in members])


@operation
def _delete(id_: TeamId, who: Caller) -> Operation[bool]:
    yield from permitted(id_, who, Action.TEAM_DELETE)
    return (yield from operations.delete_team(id_))


# ---- members


async def member(server: Server, id_: TeamId, user: UserId) -> TeamMemberDocument:
    """The caller has checked the permission; `NotFound` if the user is no member."""
    for each in await server.store.read(operations.members(id_)):
        if each.user == user:
            return _member(each)
    raise _no_member(id_, user)


async def change_role(
    server: Server, who: Caller, id_: TeamId, user: UserId, role: Role, once: Once | None
) -> TeamMemberDocument:
    facts = {"user": encode("user", user), "role": role.value}
    audit_entry = entry(server.now, who, "team.role", encode("team", id_), **facts)
    change = audited(_change_role(id_, who, user, role, server.now), [audit_entry])
    await server.write_once(who.user, once, change, lambda _: b"")
    server.credentials.forget()
    return await member(server, id_, user)


@operation
def _change_role(
    id_: TeamId, who: Caller, user: UserId, role: Role, at: Instant
) -> Operation[bool]:
    yield from permitted(id_, who, Action.TEAM_ROLE_SET)
    if id_ not in (yield from operations.teams_of(user)):
        raise _no_member(id_, user)
    yield from operations.set_role(id_, user, role, at)
    return True


async def remove_member(
    server: Server, who: Caller, id_: TeamId, user: UserId, once: Once | None
) -> None:
    facts = {"user": encode("user", user), "role": "none"}
    audit_entry = entry(server.now, who, "team.role", encode("team", id_), **facts)
    change = audited(_remove_member(id_, who, user), [audit_entry])
    await server.write_once(who.user, once, change, lambda _: b"")
    server.credentials.forget()
    await refresh_owners(server, [user])


@operation
def _remove_member(id_: TeamId, who: Caller, user: UserId) -> Operation[bool]:
    if user == who.user.id:
        member = id_ in (yield from operations.teams_of(user))
        membership = (
            Thing(ObjectKind.MEMBERSHIP, owner=user) if member else missing(ObjectKind.MEMBERSHIP)
        )
        permit(who, Action.TEAM_LEAVE, membership, named(id_))
    else:
        yield from permitted(id_, who, Action.TEAM_ROLE_SET)
    if not (yield from operations.remove_member(id_, user)):
        raise _no_member(id_, user)
    return True


def _no_member(id_: TeamId, user: UserId) -> NotFound:
    return NotFound(f"no user {encode('user', user)} in {named(id_)}")


# ---- invites


async def invite(
    server: Server, who: Caller, id_: TeamId, wanted: TeamInviteRequest, once: Once | None
) -> UserInviteDocument:
    token = new_invite_token(server, who, TEAM_INVITE_PREFIX, once)
    expires_at = Instant(server.now + span(wanted.expires_in_s))
    made = UserInvite(
        authorization.hashed(token),
        who.user.id,
        frozenset[Permission](),
        expires_at,
        server.now,
        id_,
        Role(wanted.role),
    )
    audit_entry = entry(server.now, who, "team.invite", encode("team", id_), role=wanted.role)
    inviting = audited(_invite(id_, who, made), [audit_entry])
    answered = await server.write_once(
        who.user, once, inviting, lambda at: msgspec.json.encode(SavedInvite(at))
    )
    saved = msgspec.json.decode(answered.body, type=SavedInvite)
    return UserInviteDocument(
        token=token,
        expires_at=instant_to_datetime(Instant(saved.expires_at)),
        url=server.settings.url,
        fingerprint=server.pinned,
    )


@operation
def _invite(id_: TeamId, who: Caller, made: UserInvite) -> Operation[int]:
    yield from permitted(id_, who, Action.TEAM_INVITE)
    yield from accounts.create_user_invite(made)
    return made.expires_at


def new_invite_token(server: Server, who: Caller, prefix: str, once: Once | None) -> str:
    if once is None:
        return authorization.fresh(prefix)
    parts = ("invite", str(who.user.id), once.key, once.fingerprint)
    return server.credentials.derived(prefix, *parts)


async def join(server: Server, who: Caller, token: str, once: Once | None) -> TeamDocument:
    if not token.startswith((TEAM_INVITE_PREFIX, USER_INVITE_PREFIX)):
        raise Invalid("the token is not an invite to a team; one begins with gpt_")
    now = server.now
    answered = await server.write_once(
        who.user,
        once,
        audited(
            _join(authorization.hashed(token), who.user.id, server.settings.user_teams, now),
            lambda id_: [entry(now, who, "team.join", encode("team", id_), via="token")],
        ),
        lambda id_: msgspec.json.encode(_SavedTeam(id_)),
    )
    server.credentials.forget()
    await refresh_owners(server, [who.user.id])
    id_ = TeamId(msgspec.json.decode(answered.body, type=_SavedTeam).id)
    return await as_member(server, who, id_)


async def as_member(server: Server, who: Caller, id_: TeamId) -> TeamDocument:
    """Team that the caller has just joined."""
    team, role = await server.store.read(_as_member(id_, who.user.id))
    if team is None:
        raise NotFound(f"no {named(id_)} of yours")
    return document(team, role)


@operation
def _join(hashed: str, user: UserId, most: int, at: Instant) -> Operation[int]:
    team, _ = yield from accounts.join_team(hashed, user, at, most)
    return team


@operation
def _as_member(id_: TeamId, user: UserId) -> Operation[tuple[Team | None, Role | None]]:
    team = yield from operations.team(id_)
    roles = yield from operations.teams_of(user)
    return team, roles.get(id_)


# ---- documents


def document(team: Team, role: Role | None, quota: GivenQuota | None = None) -> TeamDocument:
    return TeamDocument(
        id=encode("team", team.id),
        name=team.name,
        created_at=instant_to_datetime(team.created_at),
        role=None if role is None else role.value,
        quota=None if quota is None else quota_document(quota),
    )


def _member(member: TeamMember) -> TeamMemberDocument:
    return TeamMemberDocument(
        user=encode("user", member.user),
        name=member.name,
        role=member.role.value,
        since=instant_to_datetime(member.since),
    )


def quota_document(quota: GivenQuota) -> QuotaDocument:
    return QuotaDocument(
        running_gpus=_gpus(quota.running_gpu_milli),
        queued_tasks=quota.queued_tasks,
        storage_bytes=quota.storage_bytes,
        guaranteed_gpus=_gpus(quota.guaranteed_gpu_milli),
    )


def given(quota: QuotaDocument) -> GivenQuota:
    return GivenQuota(
        _milli(quota.running_gpus),
        quota.queued_tasks,
        quota.storage_bytes,
        _milli(quota.guaranteed_gpus),
    )


def _gpus(milli: int | None) -> float | None:
    return None if milli is None else milli / 1000


def _milli(gpus: float | None) -> int | None:
    return None if gpus is None else round(gpus * 1000)
