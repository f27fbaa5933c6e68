"""Accounts: registration, the caller's own account, passwords, API keys."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from gpool.core.errors import Conflict, Forbidden, Invalid
from gpool.core.ids import UserId, decode, encode
from gpool.core.model import Instant, Permission
from gpool.core.permissions import Action, ObjectKind, Role, Scope, TeamId, Thing, missing
from gpool.server.actions.audit import audited, entry
from gpool.server.identity import authorization
from gpool.server.identity.authorization import own, permit
from gpool.server.identity.passwords import Match, acceptable
from gpool.server.identity.refresh_tokens import FamilyEnd
from gpool.server.server import Once, Server
from gpool.server.settings import span
from gpool.server.store.identity_values import Account, ApiKey, Caller, LinkedWallet, Team
from gpool.server.store.operations.identity import accounts as operations
from gpool.server.store.operations.identity import audit as audit_operations
from gpool.server.store.operations.identity import sessions as session_operations
from gpool.server.store.operations.identity import teams as team_operations
from gpool.server.store.operations.identity import users as key_operations
from gpool.server.store.protocol import Operation, again, operation
from gpool.server.store.read_cache import UNFOLLOWED_S
from gpool.server.store.values import User
from gpool.wallet.signing import from_bytes
from gpool.wire.documents import instant_to_datetime
from gpool.wire.identity import (
    KeyDocument,
    KeyMade,
    KeyRequest,
    MeDocument,
    OwnTeam,
    UserDocument,
    UserRequest,
)

USUAL_SCOPES = frozenset(Scope) - {Scope.ADMIN}
"""Default scopes of a key; `admin` must be named explicitly."""


class _SavedKey(msgspec.Struct, frozen=True):
    """Answer stored under its Idempotency-Key, without the key, which is derived again."""

    id: int


async def list_keys(server: Server, who: Caller) -> list[KeyDocument]:
    permit(who, Action.KEYS_LIST, own(who))
    return [_document(key) for key in await server.store.read(key_operations.keys_of(who.user.id))]


async def create_key(
    server: Server, who: Caller, request: KeyRequest, once: Once | None
) -> KeyMade:
    permit(who, Action.KEY_MAKE, own(who))
    scopes = (
        USUAL_SCOPES
        if request.scopes is None
        else frozenset(Scope(word) for word in request.scopes)
    )
    if Scope.ADMIN in scopes and Permission.OPERATOR not in who.user.permissions:
        raise Forbidden("the scope 'admin' is only for keys of operators")
    team = None if request.team is None else TeamId(decode("team", request.team))
    if team is not None:
        is_member = (
            Thing(ObjectKind.TEAM, team=team) if team in who.teams else missing(ObjectKind.TEAM)
        )
        permit(who, Action.TEAM_READ, is_member, f"team {request.team}")
    if once is None:
        key = authorization.fresh(authorization.USER_PREFIX)
    else:
        parts = ("key", str(who.user.id), once.key, once.fingerprint)
        key = server.credentials.derived(authorization.USER_PREFIX, *parts)
    now = server.now
    made = ApiKey(
        id=server.ids.next(),
        user=who.user.id,
        name=request.name,
        scopes=scopes,
        team=team,
        created_at=now,
        expires_at=None
        if request.expires_in_s is None
        else Instant(now + span(request.expires_in_s)),
        ended_at=None,
        last_used_at=None,
    )
    words = None if scopes is None else " ".join(sorted(scope.value for scope in scopes))
    audit_entry = entry(
        now,
        who,
        "key.make",
        encode("key", made.id),
        name=made.name,
        scopes=words or "all",
        **({} if request.team is None else {"team": request.team}),
    )
    answered = await server.write_once(
        who.user,
        once,
        audited(_add(made, authorization.hashed(key)), [audit_entry]),
        lambda id_: msgspec.json.encode(_SavedKey(id_)),
    )
    saved = msgspec.json.decode(answered.body, type=_SavedKey)
    found = await server.store.read(key_operations.key(saved.id))
    return KeyMade(**_document(found or made).model_dump(), key=key)


@operation
def _add(key: ApiKey, hashed: str) -> Operation[int]:
    yield from key_operations.add_key(
        key.id,
        key.user,
        key.name,
        hashed,
        key.created_at,
        scopes=key.scopes,
        expires_at=key.expires_at,
        team=key.team,
    )
    return key.id


async def revoke_key(server: Server, who: Caller, id_: int, once: Once | None) -> None:
    audit_entry = entry(server.now, who, "key.end", encode("key", id_))
    ending = audited(_end(id_, who, server.now), [audit_entry])
    await server.write_once(who.user, once, ending, lambda _: b"")
    server.credentials.forget()


@operation
def _end(id_: int, who: Caller, at: Instant) -> Operation[bool]:
    found = yield from key_operations.key(id_)
    thing = missing(ObjectKind.KEY) if found is None else Thing(ObjectKind.KEY, owner=found.user)
    permit(who, Action.KEY_END, thing, f"key {encode('key', id_)}")
    yield from key_operations.end_key(id_, None, at)
    return True


def _document(key: ApiKey) -> KeyDocument:
    def when(at: Instant | None) -> object:
        return None if at is None else instant_to_datetime(at)

    return KeyDocument.model_validate(
        {
            "id": encode("key", key.id),
            "name": key.name,
            "scopes": None if key.scopes is None else sorted(scope.value for scope in key.scopes),
            "team": None if key.team is None else encode("team", key.team),
            "created_at": when(key.created_at),
            "expires_at": when(key.expires_at),
            "ended_at": when(key.ended_at),
            "last_used_at": when(key.last_used_at),
        }
    )


USER_INVITE_PREFIX = "gpv_"
"""Prefix of invites that create accounts; invites to a team (`gpt_`) need an existing account."""


@dataclass(frozen=True, slots=True)
class FirstCredential:
    password_hash: str | None = None
    wallet: str | None = None  # lower-case hex
    identity: tuple[str, str] | None = None  # issuer, subject


def may_register(server: Server, invite: str | None) -> None:
    policy = server.settings.registers
    if invite is not None and not invite.startswith(USER_INVITE_PREFIX):
        raise Forbidden("this invite does not create accounts; ask an operator for one that does")
    if policy == "closed" and invite is None:
        raise Forbidden("registration is closed on this server; ask an operator for an invite")
    if policy == "invite" and invite is None:
        raise Forbidden("registration needs an invite on this server; ask an operator for one")


async def register(server: Server, request: UserRequest) -> UserDocument:
    may_register(server, request.invite)
    for provider in server.settings.oidc:
        if request.name.startswith(f"{provider.name}-"):
            raise Conflict(
                f"names that begin with '{provider.name}-' are for accounts of that identity provider; choose another"
            )
    acceptable(request.name, request.password)
    invite_hash = None if request.invite is None else authorization.hashed(request.invite)
    await server.store.read(operations.check_registration(request.name, invite_hash, server.now))
    hashed = await server.identity.passwords.hash(request.name, request.password)
    made = await create(server, request.name, FirstCredential(password_hash=hashed), request.invite)
    return user_document(Account(made, hashed, None))


async def create(server: Server, name: str, first: FirstCredential, invite: str | None) -> User:
    now = server.now
    user = User(UserId(server.ids.next()), name, server.settings.new_users_may, now)
    invite_hash = None if invite is None else authorization.hashed(invite)
    registering = operations.register(
        user,
        first.password_hash,
        first.wallet,
        invite_hash,
        now,
        first.identity,
    )
    return await server.write(_recorded(registering, invite_hash, now))


@operation
def _recorded(
    registering: Operation[User], invite_hash: str | None, at: Instant
) -> Operation[User]:
    """Registration with its audit entry: permissions, and whose invite it was."""
    user = yield from again(registering)
    facts = {
        "name": user.name,
        "permissions": " ".join(sorted(each.value for each in user.permissions)),
    }
    if invite_hash is not None:
        facts["invited_by"] = encode("user", (yield from operations.invite_maker(invite_hash)))
    made = entry(at, user, "register", encode("user", user.id), **facts)
    yield from audit_operations.append_all([made])
    return user


# ---- the caller's account


@dataclass(frozen=True, slots=True)
class _OwnAccount:
    account: Account | None
    wallets: tuple[LinkedWallet, ...]
    identities: tuple[tuple[str, str], ...]
    teams: tuple[tuple[Team, Role], ...]


async def me(server: Server, who: Caller) -> MeDocument:
    permit(who, Action.ME_READ, own(who))
    reading = _everything_of(who.user.id)
    found = await server.reads.read(
        server.store, ("me", who.user.id), reading, max_age_s=UNFOLLOWED_S
    )
    payout = next((wallet.address for wallet in found.wallets if wallet.payout), None)
    return MeDocument(
        id=encode("user", who.user.id),
        name=who.user.name,
        wallets=[checksummed(wallet.address) for wallet in found.wallets],
        permissions=sorted(permission.value for permission in who.user.permissions),
        has_password=found.account is not None and found.account.password_hash is not None,
        identities=[issuer for issuer, _ in found.identities],
        payout_wallet=None if payout is None else checksummed(payout),
        teams=[
            OwnTeam(id=encode("team", team.id), name=team.name, role=role.value)
            for team, role in found.teams
            if team.id in who.teams
        ],
        scopes=None if who.scopes is None else sorted(scope.value for scope in who.scopes),
    )


@operation
def _everything_of(user: UserId) -> Operation[_OwnAccount]:
    account = yield from operations.account(user)
    wallets = yield from operations.wallets_of(user)
    identities = yield from operations.identities_of(user)
    teams = yield from team_operations.named_teams_of(user)
    return _OwnAccount(account, wallets, identities, teams)


async def change_password(
    server: Server, who: Caller, old: str | None, new: str, once: Once | None
) -> None:
    permit(who, Action.PASSWORD_CHANGE, own(who))
    account = await server.store.read(operations.account(who.user.id))
    stored = None if account is None else account.password_hash
    if stored is not None:
        if old is None:
            raise Invalid("'old' is required: the current password")
        async with server.guard.sign_in(who.user.name, who.address) as guess:
            if isinstance(await server.identity.passwords.verify(stored, old), Match):
                guess.succeeded()
        if not guess.right:
            raise Forbidden("'old' is not the current password")
    hashed = await server.identity.passwords.hash(who.user.name, new)
    change = _change_password(who, stored, hashed, server.now)
    audit_entry = entry(server.now, who, "password.set", encode("user", who.user.id))
    await server.write_once(who.user, once, audited(change, [audit_entry]), lambda _: b"")
    server.credentials.forget()


@operation
def _change_password(who: Caller, before: str | None, after: str, at: Instant) -> Operation[bool]:
    account = yield from operations.account(who.user.id)
    if account is None or account.password_hash != before:
        raise Forbidden("the password was changed by another request; try again")
    yield from operations.set_password(who.user.id, after)
    yield from session_operations.end_sessions_of(
        who.user.id, FamilyEnd.REVOKED.value, at, keep=who.session
    )
    return True


def checksummed(address: str) -> str:
    return from_bytes(bytes.fromhex(address.removeprefix("0x")))


def user_document(account: Account) -> UserDocument:
    user = account.user
    return UserDocument(
        id=encode("user", user.id),
        name=user.name,
        permissions=sorted(permission.value for permission in user.permissions),
        created_at=instant_to_datetime(user.created_at),
        disabled_at=None
        if account.disabled_at is None
        else instant_to_datetime(account.disabled_at),
        has_password=account.password_hash is not None,
    )
