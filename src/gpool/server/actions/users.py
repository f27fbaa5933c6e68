"""Management of users by operators: listing, permissions, disabling, quotas, invites."""

from __future__ import annotations

import msgspec

from gpool.core.errors import Forbidden, Invalid
from gpool.core.ids import UserId, decode, encode
from gpool.core.model import Instant, Permission
from gpool.core.permissions import Action, Role, TeamId
from gpool.server.actions import lending, quotas
from gpool.server.actions.accounts.accounts import USER_INVITE_PREFIX, user_document
from gpool.server.actions.accounts.teams import SavedInvite, given, new_invite_token, quota_document
from gpool.server.actions.audit import audited, entry
from gpool.server.identity import authorization
from gpool.server.identity.authorization import account_of, permit
from gpool.server.server import Once, Server
from gpool.server.settings import Settings, span
from gpool.server.store.identity_values import Account, Caller, GivenQuota, UserInvite
from gpool.server.store.operations.identity import accounts as operations
from gpool.server.store.operations.identity import teams as team_operations
from gpool.server.store.protocol import Operation, operation
from gpool.wire.documents import instant_to_datetime
from gpool.wire.identity import UserDocument, UserInviteDocument, UserInviteRequest, UserPatch


async def list_users(server: Server, after: UserId, limit: int) -> list[UserDocument]:
    """The route has checked USERS_LIST."""
    found = await server.store.read(operations.users(after, limit))
    return [user_document(account) for account in found]


async def get_user(server: Server, who: Caller, id_: UserId) -> UserDocument:
    account, quota = await server.store.read(_permitted(id_, who, (Action.USER_READ,)))
    return user_document(account).model_copy(update={"quota": quota_document(quota)})


@operation
def _permitted(
    id_: UserId, who: Caller, actions: tuple[Action, ...]
) -> Operation[tuple[Account, GivenQuota]]:
    account = yield from operations.account(id_)
    for action in actions:
        permit(who, action, account_of(None if account is None else id_), named(id_))
    assert account is not None
    return account, (yield from team_operations.quota_of("user", id_))


def named(id_: UserId) -> str:
    return f"user {encode('user', id_)}"


async def change(
    server: Server, who: Caller, id_: UserId, wanted: UserPatch, once: Once | None
) -> UserDocument:
    actions = asked_for(wanted)
    if not actions:
        raise Invalid("nothing to change; send 'permissions', 'disabled' or 'quota'")
    facts = {
        name: str(value)
        for name, value in wanted.model_dump(exclude_none=True, mode="json").items()
    }
    audit_entry = entry(server.now, who, "user.change", encode("user", id_), **facts)
    change = audited(_change(server.settings, id_, who, wanted, server.now), [audit_entry])
    answered = await server.write_once(who.user, once, change, lambda _: b"")
    server.credentials.forget()
    if answered.value is not None and _ends_lending(wanted):
        await lending.suspend(server, id_)
    if wanted.quota is not None:
        await quotas.refresh(server)
    # A repetition has no value, and no permission was asked for it.
    asked = actions if answered.value is None else ()
    account, quota = await server.store.read(_permitted(id_, who, asked))
    return user_document(account).model_copy(update={"quota": quota_document(quota)})


def _ends_lending(wanted: UserPatch) -> bool:
    if wanted.permissions is not None and Permission.PROVIDER not in wanted.permissions:
        return True
    return bool(wanted.disabled)


def asked_for(wanted: UserPatch) -> tuple[Action, ...]:
    asked = (
        (Action.USER_PERMISSIONS_SET, wanted.permissions is not None),
        (Action.USER_SUSPEND, wanted.disabled is not None),
        (Action.QUOTA_SET, wanted.quota is not None),
    )
    return tuple(action for action, is_asked in asked if is_asked)


@operation
def _change(
    settings: Settings, id_: UserId, who: Caller, wanted: UserPatch, at: Instant
) -> Operation[bool]:
    yield from _permitted(id_, who, asked_for(wanted))
    if wanted.quota is not None:
        quotas.check(given(wanted.quota), settings.user_quota)
    # Statements that may refuse come before the others: the last operator can be neither disabled nor demoted.
    if wanted.disabled is not None:
        yield from operations.set_disabled(id_, wanted.disabled, at)
    if wanted.permissions is not None:
        granted = frozenset(Permission(word) for word in wanted.permissions)
        yield from operations.set_permissions(id_, granted)
    if wanted.quota is not None:
        yield from team_operations.set_quota("user", id_, given(wanted.quota))
    return True


async def invite(
    server: Server, who: Caller, wanted: UserInviteRequest, once: Once | None
) -> UserInviteDocument:
    """The route has checked USER_INVITE."""
    if (wanted.team is None) != (wanted.role is None):
        raise Invalid("'team' and 'role' must be sent together")
    granted = (
        server.settings.new_users_may
        if wanted.permissions is None
        else frozenset(Permission(word) for word in wanted.permissions)
    )
    if Permission.OPERATOR in granted and who.scopes is not None:
        raise Forbidden("not allowed: inviting operators needs a sign-in; no API key can do this")
    token = new_invite_token(server, who, USER_INVITE_PREFIX, once)
    made = UserInvite(
        authorization.hashed(token),
        who.user.id,
        granted,
        Instant(server.now + span(wanted.expires_in_s)),
        server.now,
        None if wanted.team is None else TeamId(decode("team", wanted.team)),
        None if wanted.role is None else Role(wanted.role),
    )
    facts = {"permissions": " ".join(sorted(each.value for each in granted))}
    if wanted.team is not None and wanted.role is not None:
        facts |= {"team": wanted.team, "role": wanted.role}
    inviting = audited(_invite(made), [entry(server.now, who, "user.invite", **facts)])
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
def _invite(made: UserInvite) -> Operation[int]:
    if made.team is not None and (yield from team_operations.team(made.team)) is None:
        raise Invalid(f"there is no team {encode('team', made.team)}")
    yield from operations.create_user_invite(made)
    return made.expires_at
