"""Accounts and the ways into them: a password, wallets, OpenID Connect identities. The last way in cannot be removed.

Whoever changes the ways in locks the user's row first, so that two removals at once cannot both see the other's way.
"""

from __future__ import annotations

from gpool.core.errors import Conflict, Forbidden, NotFound
from gpool.core.ids import UserId
from gpool.core.model import Instant, Permission
from gpool.core.permissions import Role, TeamId
from gpool.server.store.identity_values import Account, LinkedWallet, UserInvite
from gpool.server.store.operation import operation
from gpool.server.store.operations.identity.sessions import end_all
from gpool.server.store.operations.identity.teams import put_member
from gpool.server.store.operations.identity.users import (
    COLUMNS,
    insert_user,
    permissions_text,
    user_from,
)
from gpool.server.store.protocol import Operation, Row, Statement
from gpool.server.store.values import User

ACCOUNT = f"{COLUMNS}, u.password_hash, u.disabled_at"


def _account(row: Row) -> Account:
    return Account(user_from(row), row[4], row[5])


def _accounts(where: str, **parameters: int | str) -> Operation[tuple[Account, ...]]:
    rows = yield Statement(f"SELECT {ACCOUNT} FROM users u {where}", parameters)  # noqa: S608
    return tuple(_account(row) for row in rows)


# ---- coming in


@operation
def register(
    user: User,
    password_hash: str | None,
    wallet: str | None,
    invite_hash: str | None,
    at: Instant,
    oidc: tuple[str, str] | None = None,
) -> Operation[User]:
    """A new account with its first way in. An invite decides the permissions, and may bring a team along."""
    if password_hash is None and wallet is None and oidc is None:
        raise Conflict("an account needs a way in: a password, a wallet or an identity")
    invite = None
    if invite_hash is not None:
        invite = yield from _open_invite(invite_hash, at)
    taken = yield Statement("SELECT 1 FROM users WHERE name = :name", {"name": user.name})
    if taken:
        raise Conflict(f"there is a user {user.name!r} already; choose another name")
    if wallet is not None:
        yield from _free_wallet(wallet)
    if oidc is not None:
        yield from _free_identity(*oidc)
    if invite is not None:
        user = User(user.id, user.name, invite.permissions, user.created_at)
    yield from insert_user(user, password_hash)
    if wallet is not None:
        yield from _put_wallet(user.id, wallet, at, payout=True)
    if oidc is not None:
        yield from _put_identity(user.id, *oidc)
    if invite is not None:
        yield from _use_invite(invite, user.id, at)
    return user


@operation
def create_user_invite(invite: UserInvite) -> Operation[None]:
    yield Statement(
        "INSERT INTO user_invites (hashed, made_by, permissions, team_id, role, expires_at, created_at) "
        "VALUES (:hashed, :made_by, :permissions, :team, :role, :expires_at, :at)",
        {
            "hashed": invite.hashed,
            "made_by": invite.made_by,
            "permissions": permissions_text(invite.permissions),
            "team": invite.team,
            "role": None if invite.role is None else invite.role.value,
            "expires_at": invite.expires_at,
            "at": invite.created_at,
        },
    )


@operation
def join_team(invite_hash: str, user: UserId, at: Instant) -> Operation[tuple[TeamId, Role]]:
    """Somebody with an account redeems an invite to a team. It never lowers a role they have."""
    invite = yield from _open_invite(invite_hash, at)
    if invite.team is None or invite.role is None:
        raise Forbidden("this invite is for a new account, not for a team")
    yield from _use_invite(invite, user, at)
    return invite.team, invite.role


def _open_invite(hashed: str, at: Instant) -> Operation[UserInvite]:
    rows = yield Statement(
        "SELECT made_by, permissions, expires_at, created_at, team_id, role, used_at FROM user_invites "
        "WHERE hashed = :hashed /*postgresql FOR UPDATE*/",
        {"hashed": hashed},
    )
    for made_by, permissions, expires_at, created_at, team, role, used_at in rows:
        if used_at is not None:
            raise Forbidden("this invite was used already; ask for a new one")
        if expires_at <= at:
            raise Forbidden("this invite has expired; ask for a new one")
        if team is not None:
            there = yield Statement(
                "SELECT 1 FROM teams WHERE id = :team /*postgresql FOR SHARE*/", {"team": team}
            )
            if not there:
                raise Forbidden("the team of this invite is gone; ask for a new one")
        granted = frozenset(Permission(word) for word in permissions.split(",") if word)
        return UserInvite(
            hashed,
            UserId(made_by),
            granted,
            expires_at,
            created_at,
            team,
            None if role is None else Role(role),
        )
    raise Forbidden("this invite is not known here; ask for a new one")


def _use_invite(invite: UserInvite, user: UserId, at: Instant) -> Operation[None]:
    yield Statement(
        "UPDATE user_invites SET used_at = :at, used_by = :user WHERE hashed = :hashed AND used_at IS NULL",
        {"at": at, "user": user, "hashed": invite.hashed},
    )
    if invite.team is not None and invite.role is not None:
        yield from put_member(invite.team, user, invite.role, at, raises_only=True)


# ---- finding


@operation
def account(id: UserId) -> Operation[Account | None]:
    found = yield from _accounts("WHERE u.id = :id", id=id)
    return found[0] if found else None


@operation
def account_by_name(name: str) -> Operation[Account | None]:
    found = yield from _accounts("WHERE u.name = :name", name=name)
    return found[0] if found else None


@operation
def user_by_wallet(address: str) -> Operation[Account | None]:
    found = yield from _accounts(
        "JOIN wallets w ON w.user_id = u.id WHERE w.address = :address", address=address
    )
    return found[0] if found else None


@operation
def user_by_oidc(issuer: str, subject: str) -> Operation[Account | None]:
    found = yield from _accounts(
        "JOIN oidc_identities i ON i.user_id = u.id WHERE i.issuer = :issuer AND i.subject = :subject",
        issuer=issuer,
        subject=subject,
    )
    return found[0] if found else None


@operation
def users(after: UserId, limit: int) -> Operation[tuple[Account, ...]]:
    """Oldest first, by id; `after` 0 begins."""
    return (
        yield from _accounts(
            "WHERE u.id > :after ORDER BY u.id LIMIT :limit", after=after, limit=limit
        )
    )


@operation
def wallets_of(user: UserId) -> Operation[tuple[LinkedWallet, ...]]:
    rows = yield Statement(
        "SELECT address, linked_at, payout FROM wallets WHERE user_id = :user ORDER BY linked_at, address",
        {"user": user},
    )
    return tuple(LinkedWallet(row[0], row[1], bool(row[2])) for row in rows)


@operation
def identities_of(user: UserId) -> Operation[tuple[tuple[str, str], ...]]:
    """(issuer, subject) of each."""
    rows = yield Statement(
        "SELECT issuer, subject FROM oidc_identities WHERE user_id = :user ORDER BY issuer, subject",
        {"user": user},
    )
    return tuple((row[0], row[1]) for row in rows)


# ---- ways in


@operation
def link_wallet(user: UserId, address: str, at: Instant) -> Operation[bool]:
    """False: it was this user's already. The first wallet is the payout wallet."""
    yield from _locked(user)
    rows = yield Statement(
        "SELECT user_id FROM wallets WHERE address = :address", {"address": address}
    )
    if rows and rows[0][0] == user:
        return False
    if rows:
        raise Conflict("this wallet belongs to another account; sign in with it, or use another")
    has = yield Statement(
        "SELECT 1 FROM wallets WHERE user_id = :user AND payout = 1", {"user": user}
    )
    yield from _put_wallet(user, address, at, payout=not has)
    return True


@operation
def unlink_wallet(user: UserId, address: str) -> Operation[bool]:
    """False: it is not this user's. When the payout wallet goes, there is none until one is named."""
    yield from _locked(user)
    rows = yield Statement(
        "SELECT 1 FROM wallets WHERE address = :address AND user_id = :user",
        {"address": address, "user": user},
    )
    if not rows:
        return False
    yield from _another_way_in(user)
    yield Statement(
        "DELETE FROM wallets WHERE address = :address AND user_id = :user",
        {"address": address, "user": user},
    )
    return True


@operation
def set_payout_wallet(user: UserId, address: str | None) -> Operation[bool]:
    """None: no payouts. False: the wallet is not this user's, nothing was written."""
    yield from _locked(user)
    if address is not None:
        rows = yield Statement(
            "SELECT 1 FROM wallets WHERE address = :address AND user_id = :user",
            {"address": address, "user": user},
        )
        if not rows:
            return False
    yield Statement(
        "UPDATE wallets SET payout = CASE WHEN address = :address THEN 1 ELSE 0 END WHERE user_id = :user",
        {"address": address or "", "user": user},
    )
    return True


@operation
def payout_wallet(user: UserId) -> Operation[str | None]:
    rows = yield Statement(
        "SELECT address FROM wallets WHERE user_id = :user AND payout = 1", {"user": user}
    )
    return rows[0][0] if rows else None


@operation
def link_oidc(user: UserId, issuer: str, subject: str) -> Operation[bool]:
    """False: it was this user's already."""
    yield from _locked(user)
    rows = yield Statement(
        "SELECT user_id FROM oidc_identities WHERE issuer = :issuer AND subject = :subject",
        {"issuer": issuer, "subject": subject},
    )
    if rows and rows[0][0] == user:
        return False
    if rows:
        raise Conflict("this identity belongs to another account; sign in with it, or use another")
    yield from _put_identity(user, issuer, subject)
    return True


@operation
def unlink_oidc(user: UserId, issuer: str, subject: str) -> Operation[bool]:
    """False: it is not this user's."""
    yield from _locked(user)
    named = {"issuer": issuer, "subject": subject, "user": user}
    mine = "issuer = :issuer AND subject = :subject AND user_id = :user"
    rows = yield Statement(f"SELECT 1 FROM oidc_identities WHERE {mine}", named)  # noqa: S608
    if not rows:
        return False
    yield from _another_way_in(user)
    yield Statement(f"DELETE FROM oidc_identities WHERE {mine}", named)  # noqa: S608
    return True


@operation
def set_password(user: UserId, password_hash: str | None) -> Operation[None]:
    """None takes it away, if there is another way in. Ending the sessions is the caller's wish, not ours."""
    had = yield from _locked(user)
    if password_hash is None and had is not None:
        yield from _another_way_in(user)
    yield Statement(
        "UPDATE users SET password_hash = :password_hash WHERE id = :user",
        {"password_hash": password_hash, "user": user},
    )


@operation
def rehash_password(user: UserId, old: str, new: str) -> Operation[bool]:
    """The same password under newer parameters, unless it was changed meanwhile."""
    rows = yield Statement(
        "UPDATE users SET password_hash = :new WHERE id = :user AND password_hash = :old RETURNING id",
        {"new": new, "user": user, "old": old},
    )
    return bool(rows)


def _locked(user: UserId) -> Operation[str | None]:
    """Nobody else changes this user's ways in until the commit; gives the password's hash."""
    rows = yield Statement(
        "SELECT password_hash FROM users WHERE id = :user /*postgresql FOR UPDATE*/", {"user": user}
    )
    if not rows:
        raise NotFound("there is no such user")
    found: str | None = rows[0][0]
    return found


def _another_way_in(user: UserId) -> Operation[None]:
    rows = yield Statement(
        "SELECT (SELECT COUNT(*) FROM users WHERE id = :user AND password_hash IS NOT NULL) + "
        "(SELECT COUNT(*) FROM wallets WHERE user_id = :user) + "
        "(SELECT COUNT(*) FROM oidc_identities WHERE user_id = :user)",
        {"user": user},
    )
    if rows[0][0] < 2:
        raise Conflict("this is the last way into the account; add another one first")


def _free_wallet(address: str) -> Operation[None]:
    rows = yield Statement("SELECT 1 FROM wallets WHERE address = :address", {"address": address})
    if rows:
        raise Conflict("this wallet belongs to an account already; sign in with it")


def _free_identity(issuer: str, subject: str) -> Operation[None]:
    rows = yield Statement(
        "SELECT 1 FROM oidc_identities WHERE issuer = :issuer AND subject = :subject",
        {"issuer": issuer, "subject": subject},
    )
    if rows:
        raise Conflict("this identity belongs to an account already; sign in with it")


def _put_wallet(user: UserId, address: str, at: Instant, *, payout: bool) -> Operation[None]:
    yield Statement(
        "INSERT INTO wallets (address, user_id, linked_at, payout) VALUES (:address, :user, :at, :payout)",
        {"address": address, "user": user, "at": at, "payout": int(payout)},
    )


def _put_identity(user: UserId, issuer: str, subject: str) -> Operation[None]:
    yield Statement(
        "INSERT INTO oidc_identities (issuer, subject, user_id) VALUES (:issuer, :subject, :user)",
        {"issuer": issuer, "subject": subject, "user": user},
    )


# ---- what operators change


@operation
def set_permissions(user: UserId, permissions: frozenset[Permission]) -> Operation[bool]:
    """False: no such user. The last operator who can act stays one."""
    if Permission.OPERATOR not in permissions:
        yield from _another_operator(user)
    rows = yield Statement(
        "UPDATE users SET permissions = :permissions WHERE id = :user RETURNING id",
        {"permissions": permissions_text(permissions), "user": user},
    )
    return bool(rows)


@operation
def set_disabled(user: UserId, disabled: bool, at: Instant) -> Operation[bool]:
    """False: no such user. Who is disabled is signed out everywhere; their keys sleep until they are enabled."""
    if disabled:
        yield from _another_operator(user)
    rows = yield Statement(
        "UPDATE users SET disabled_at = CASE WHEN :disabled = 1 THEN COALESCE(disabled_at, :at) ELSE NULL END "
        "WHERE id = :user RETURNING id",
        {"disabled": int(disabled), "at": at, "user": user},
    )
    if rows and disabled:
        yield from end_all(user, "disabled", at)
    return bool(rows)


def _another_operator(user: UserId) -> Operation[None]:
    """Refuses when this user is the only one who can run the pool."""
    rows = yield Statement(
        "SELECT id FROM users WHERE permissions LIKE '%operator%' AND disabled_at IS NULL "
        "ORDER BY id /*postgresql FOR UPDATE*/"
    )
    if [row[0] for row in rows] == [user]:
        raise Conflict("this is the last operator; make somebody else one first")


# ---- nonces of wallet sign-ins


@operation
def put_nonce(nonce: str, expires_at: Instant) -> Operation[None]:
    yield Statement(
        "INSERT INTO sign_in_nonces (nonce, expires_at) VALUES (:nonce, :expires_at)",
        {"nonce": nonce, "expires_at": expires_at},
    )


@operation
def take_nonce(nonce: str, at: Instant) -> Operation[bool]:
    """True once, and only before it expires."""
    rows = yield Statement(
        "DELETE FROM sign_in_nonces WHERE nonce = :nonce RETURNING expires_at", {"nonce": nonce}
    )
    return bool(rows) and rows[0][0] > at


@operation
def forget_nonces(before: Instant, limit: int) -> Operation[int]:
    rows = yield Statement(
        "DELETE FROM sign_in_nonces WHERE nonce IN (SELECT nonce FROM sign_in_nonces "
        "WHERE expires_at < :before ORDER BY expires_at LIMIT :limit) RETURNING nonce",
        {"before": before, "limit": limit},
    )
    return len(rows)
