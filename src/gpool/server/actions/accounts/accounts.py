"""Accounts: registration (by setting or invite), the caller's own account, password changes."""

from __future__ import annotations

from dataclasses import dataclass

from gpool.core.errors import Forbidden, Invalid
from gpool.core.ids import UserId, encode
from gpool.core.model import Instant
from gpool.core.permissions import Action, Role
from gpool.server.actions.operators.audit import audited, entry
from gpool.server.identity import credentials
from gpool.server.identity.authorization import own, permit
from gpool.server.identity.passwords import Match
from gpool.server.identity.tokens.refresh import FamilyEnd
from gpool.server.server import Once, Server
from gpool.server.store.identity_values import Account, Caller, LinkedWallet, Team
from gpool.server.store.operation import operation
from gpool.server.store.operations.identity import accounts as operations
from gpool.server.store.operations.identity import sessions as session_operations
from gpool.server.store.operations.identity import teams as team_operations
from gpool.server.store.protocol import Operation
from gpool.server.store.values import User
from gpool.wallet.address import from_bytes
from gpool.wire.documents import instant_to_datetime
from gpool.wire.identity import MeDocument, OwnTeam, UserDocument, UserRequest

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
    hashed = await server.identity.passwords.hash(request.name, request.password)
    made = await create(server, request.name, FirstCredential(password_hash=hashed), request.invite)
    return user_document(Account(made, hashed, None))


async def create(server: Server, name: str, first: FirstCredential, invite: str | None) -> User:
    now = server.now
    user = User(UserId(server.ids.next()), name, server.settings.new_users_may, now)
    invite_hash = None if invite is None else credentials.hashed(invite)
    registering = operations.register(
        user,
        first.password_hash,
        first.wallet,
        invite_hash,
        now,
        first.identity,
    )
    audit_entry = entry(now, user, "register", encode("user", user.id), name=name)
    return await server.write(audited(registering, [audit_entry]))


# ---- the caller's account


@dataclass(frozen=True, slots=True)
class _OwnAccount:
    account: Account | None
    wallets: tuple[LinkedWallet, ...]
    identities: tuple[tuple[str, str], ...]
    teams: tuple[tuple[Team, Role], ...]


async def me(server: Server, who: Caller) -> MeDocument:
    permit(who, Action.ME_READ, own(who))
    found = await server.store.read(_everything_of(who.user.id))
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
