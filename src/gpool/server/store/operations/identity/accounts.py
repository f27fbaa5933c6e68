"""Accounts and login methods: a password, wallets, OpenID Connect identities. The last method cannot be removed.

Changes of login methods lock the user's row first: two concurrent removals would else each find the other's method.
One file past 400 lines: registration, login methods and operators' changes share this lock.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from gpool.core.errors import Conflict, Forbidden, NotFound
from gpool.core.ids import UserId
from gpool.core.model import Instant, Permission
from gpool.core.permissions import Role, TeamId
from gpool.server.store.generated_rows import OidcIdentitiesRecord, UserInvitesRecord, WalletsRecord
from gpool.server.store.identity_values import Account, LinkedWallet, UserInvite
from gpool.server.store.operations.identity.invitations import room_for_team
from gpool.server.store.operations.identity.sessions import end_all
from gpool.server.store.operations.identity.teams import put_member
from gpool.server.store.operations.identity.users import (
    USER,
    UserColumns,
    insert_user,
    permissions_from,
    permissions_text,
    user_from,
)
from gpool.server.store.protocol import Operation, Statement, operation
from gpool.server.store.rows import columns, exists, select, select_pairs, values
from gpool.server.store.values import User

INVITE = columns(UserInvitesRecord, UserInvitesRecord, "i")


class _AccountColumns(NamedTuple):
    password_hash: str | None
    disabled_at: Instant | None


class _PasswordHash(NamedTuple):
    password_hash: str | None


def _accounts(where: str, **parameters: int | str) -> Operation[tuple[Account, ...]]:
    rows = yield from select_pairs(
        UserColumns,
        _AccountColumns,
        f"SELECT {USER}, u.password_hash, u.disabled_at FROM users u {where}",  # noqa: S608
        parameters,
    )
    return tuple(
        Account(user_from(user), account.password_hash, account.disabled_at)
        for user, account in rows
    )


# ---- registration and invites


@operation
def register(
    user: User,
    password_hash: str | None,
    wallet: str | None,
    invite_hash: str | None,
    at: Instant,
    oidc: tuple[str, str] | None = None,
) -> Operation[User]:
    """Create an account with its first login method. An invite sets the permissions, and may add a team."""
    if password_hash is None and wallet is None and oidc is None:
        raise Conflict("an account needs a login method: a password, a wallet or an identity")
    invite = None
    if invite_hash is not None:
        invite = yield from _open_invite(invite_hash, at)
    yield from _check_free_name(user.name)
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
def check_registration(name: str, invite_hash: str | None, at: Instant) -> Operation[None]:
    """Refuse a registration that `register` would refuse, by a read: the password is hashed afterwards."""
    if invite_hash is not None:
        yield from _open_invite(invite_hash, at, lock=False)
    yield from _check_free_name(name)


def _check_free_name(name: str) -> Operation[None]:
    if (yield from exists("SELECT 1 FROM users WHERE name = :name", {"name": name})):
        raise Conflict(f"there is a user {name!r} already; choose another name")
    retired = "SELECT 1 FROM retired_names WHERE hashed = :hashed"
    if (yield from exists(retired, {"hashed": hashed_name(name)})):
        raise Conflict(f"a deleted account had the name {name!r}; choose another name")


def hashed_name(name: str) -> str:
    """Form in which the name of a deleted account is kept."""
    return hashlib.sha256(name.encode()).hexdigest()


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


def invite_maker(invite_hash: str) -> Operation[UserId]:
    """Account that made this invite, which exists."""
    [found] = yield from values(
        UserId, "SELECT made_by FROM user_invites WHERE hashed = :hashed", {"hashed": invite_hash}
    )
    return found


@operation
def join_team(
    invite_hash: str, user: UserId, at: Instant, most: int
) -> Operation[tuple[TeamId, Role]]:
    """Redeem a team invite for an existing account. A higher role stays. `TooMany` past `most` teams."""
    invite = yield from _open_invite(invite_hash, at)
    if invite.team is None or invite.role is None:
        raise Forbidden("this invite is for a new account, not for a team")
    yield from room_for_team(user, invite.team, most)
    yield from _use_invite(invite, user, at)
    return invite.team, invite.role


def _open_invite(hashed: str, at: Instant, *, lock: bool = True) -> Operation[UserInvite]:
    for_update, for_share = (
        ("/*postgresql FOR UPDATE*/", "/*postgresql FOR SHARE*/") if lock else ("", "")
    )
    rows = yield from select(
        UserInvitesRecord,
        f"SELECT {INVITE} FROM user_invites i WHERE i.hashed = :hashed {for_update}",  # noqa: S608
        {"hashed": hashed},
    )
    if not rows:
        raise Forbidden("this invite is not known here; ask for a new one")
    [row] = rows
    if row.used_at is not None:
        raise Forbidden("this invite was used already; ask for a new one")
    if row.expires_at <= at:
        raise Forbidden("this invite has expired; ask for a new one")
    if row.team_id is not None:
        sql = f"SELECT 1 FROM teams WHERE id = :team {for_share}"  # noqa: S608
        if not (yield from exists(sql, {"team": row.team_id})):
            raise Forbidden("the team of this invite was deleted; ask for a new one")
    return UserInvite(
        hashed,
        row.made_by,
        permissions_from(row.permissions),
        row.expires_at,
        row.created_at,
        row.team_id,
        None if row.role is None else Role(row.role),
    )


def _use_invite(invite: UserInvite, user: UserId, at: Instant) -> Operation[None]:
    yield Statement(
        "UPDATE user_invites SET used_at = :at, used_by = :user WHERE hashed = :hashed AND used_at IS NULL",
        {"at": at, "user": user, "hashed": invite.hashed},
    )
    if invite.team is not None and invite.role is not None:
        yield from put_member(invite.team, user, invite.role, at, raises_only=True)


# ---- reading


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
    return (
        yield from _accounts(
            "WHERE u.id > :after ORDER BY u.id LIMIT :limit", after=after, limit=limit
        )
    )


@operation
def wallets_of(user: UserId) -> Operation[tuple[LinkedWallet, ...]]:
    rows = yield from select(
        WalletsRecord,
        f"SELECT {columns(WalletsRecord, WalletsRecord, 'w')} FROM wallets w WHERE w.user_id = :user "  # noqa: S608
        "ORDER BY w.linked_at, w.address",
        {"user": user},
    )
    return tuple(LinkedWallet(row.address, row.linked_at, bool(row.payout)) for row in rows)


@operation
def identities_of(user: UserId) -> Operation[tuple[tuple[str, str], ...]]:
    rows = yield from select(
        OidcIdentitiesRecord,
        "SELECT issuer, subject, user_id FROM oidc_identities WHERE user_id = :user ORDER BY issuer, subject",
        {"user": user},
    )
    return tuple((row.issuer, row.subject) for row in rows)


# ---- login methods


@operation
def link_wallet(user: UserId, address: str, at: Instant) -> Operation[bool]:
    """False if it is this user's already. The first one is the payout wallet."""
    yield from _locked(user)
    owners = yield from values(
        UserId, "SELECT user_id FROM wallets WHERE address = :address", {"address": address}
    )
    if owners == [user]:
        return False
    if owners:
        raise Conflict("this wallet belongs to another account; sign in with it, or use another")
    has = yield from exists(
        "SELECT 1 FROM wallets WHERE user_id = :user AND payout = 1", {"user": user}
    )
    yield from _put_wallet(user, address, at, payout=not has)
    return True


@operation
def unlink_wallet(user: UserId, address: str, at: Instant) -> Operation[bool]:
    """False if it is not this user's. A removed payout wallet is not replaced."""
    yield from _locked(user)
    if not (yield from _has_wallet(user, address)):
        return False
    yield from _another_login(user)
    was_payout = (yield from payout_wallet(user)) == address
    yield Statement(
        "DELETE FROM wallets WHERE address = :address AND user_id = :user",
        {"address": address, "user": user},
    )
    if was_payout:
        yield from _note_payout(user, None, at)
    return True


@operation
def set_payout_wallet(user: UserId, address: str | None, at: Instant) -> Operation[bool]:
    yield from _locked(user)
    if address is not None and not (yield from _has_wallet(user, address)):
        return False
    if (yield from payout_wallet(user)) == address:
        return True
    yield Statement(
        "UPDATE wallets SET payout = CASE WHEN address = :address THEN 1 ELSE 0 END WHERE user_id = :user",
        {"address": address or "", "user": user},
    )
    yield from _note_payout(user, address, at)
    return True


@operation
def payout_wallet(user: UserId) -> Operation[str | None]:
    found = yield from values(
        str, "SELECT address FROM wallets WHERE user_id = :user AND payout = 1", {"user": user}
    )
    return found[0] if found else None


@operation
def set_password(user: UserId, password_hash: str | None) -> Operation[None]:
    """Set the password; None removes it, if there is another login method. The caller may end sessions."""
    had = yield from _locked(user)
    if password_hash is None and had is not None:
        yield from _another_login(user)
    yield Statement(
        "UPDATE users SET password_hash = :password_hash WHERE id = :user",
        {"password_hash": password_hash, "user": user},
    )


@operation
def rehash_password(user: UserId, old: str, new: str) -> Operation[bool]:
    """No effect if the password was changed meanwhile."""
    return (
        yield from exists(
            "UPDATE users SET password_hash = :new WHERE id = :user AND password_hash = :old RETURNING id",
            {"new": new, "user": user, "old": old},
        )
    )


def _locked(user: UserId) -> Operation[str | None]:
    rows = yield from select(
        _PasswordHash,
        "SELECT password_hash FROM users WHERE id = :user /*postgresql FOR UPDATE*/",
        {"user": user},
    )
    if not rows:
        raise NotFound("there is no such user")
    return rows[0].password_hash


def _has_wallet(user: UserId, address: str) -> Operation[bool]:
    return (
        yield from exists(
            "SELECT 1 FROM wallets WHERE address = :address AND user_id = :user",
            {"address": address, "user": user},
        )
    )


def _another_login(user: UserId) -> Operation[None]:
    [count] = yield from values(
        int,
        "SELECT (SELECT COUNT(*) FROM users WHERE id = :user AND password_hash IS NOT NULL) + "
        "(SELECT COUNT(*) FROM wallets WHERE user_id = :user) + "
        "(SELECT COUNT(*) FROM oidc_identities WHERE user_id = :user)",
        {"user": user},
    )
    if count < 2:
        raise Conflict("this is the last login method of the account; add another one first")


def _free_wallet(address: str) -> Operation[None]:
    sql = "SELECT 1 FROM wallets WHERE address = :address"
    if (yield from exists(sql, {"address": address})):
        raise Conflict("this wallet belongs to an account already; sign in with it")


def _free_identity(issuer: str, subject: str) -> Operation[None]:
    taken = yield from exists(
        "SELECT 1 FROM oidc_identities WHERE issuer = :issuer AND subject = :subject",
        {"issuer": issuer, "subject": subject},
    )
    if taken:
        raise Conflict("this identity belongs to an account already; sign in with it")


def _put_wallet(user: UserId, address: str, at: Instant, *, payout: bool) -> Operation[None]:
    yield Statement(
        "INSERT INTO wallets (address, user_id, linked_at, payout) VALUES (:address, :user, :at, :payout)",
        {"address": address, "user": user, "at": at, "payout": int(payout)},
    )
    if payout:
        yield from _note_payout(user, address, at)


def _note_payout(user: UserId, address: str | None, at: Instant) -> Operation[None]:
    """Add to the history of the user's payout wallet."""
    yield Statement(
        "INSERT INTO wallet_changes (user_id, number, at, address) SELECT CAST(:user AS BIGINT), "
        "COALESCE(MAX(w.number), 0) + 1, CAST(:at AS BIGINT), CAST(:address AS TEXT) "
        "FROM wallet_changes w WHERE w.user_id = :user",
        {"user": user, "at": at, "address": address},
    )


def _put_identity(user: UserId, issuer: str, subject: str) -> Operation[None]:
    yield Statement(
        "INSERT INTO oidc_identities (issuer, subject, user_id) VALUES (:issuer, :subject, :user)",
        {"issuer": issuer, "subject": subject, "user": user},
    )


# ---- operators' changes


@operation
def set_permissions(user: UserId, permissions: frozenset[Permission]) -> Operation[bool]:
    """False: no such user. `Conflict` for the last enabled operator."""
    if Permission.OPERATOR not in permissions:
        yield from _another_operator(user)
    return (
        yield from exists(
            "UPDATE users SET permissions = :permissions WHERE id = :user RETURNING id",
            {"permissions": permissions_text(permissions), "user": user},
        )
    )


@operation
def set_disabled(user: UserId, disabled: bool, at: Instant) -> Operation[bool]:
    """False: no such user. Disabling ends all sessions; keys work again once enabled."""
    if disabled:
        yield from _another_operator(user)
    found = yield from exists(
        "UPDATE users SET disabled_at = CASE WHEN :disabled = 1 THEN COALESCE(disabled_at, :at) ELSE NULL END "
        "WHERE id = :user RETURNING id",
        {"disabled": int(disabled), "at": at, "user": user},
    )
    if found and disabled:
        yield from end_all(user, "disabled", at)
    return found


def _another_operator(user: UserId) -> Operation[None]:
    operators = yield from values(
        UserId,
        "SELECT id FROM users WHERE permissions LIKE '%operator%' AND disabled_at IS NULL "
        "ORDER BY id /*postgresql FOR UPDATE*/",
    )
    if operators == [user]:
        raise Conflict("this is the last operator; make somebody else one first")


# ---- nonces of wallet sign-ins and one-time links


@operation
def put_nonce(nonce: str, purpose: str, expires_at: Instant) -> Operation[None]:
    yield Statement(
        "INSERT INTO sign_in_nonces (nonce, purpose, expires_at) VALUES (:nonce, :purpose, :expires_at)",
        {"nonce": nonce, "purpose": purpose, "expires_at": expires_at},
    )


@operation
def take_nonce(nonce: str, purpose: str, at: Instant) -> Operation[bool]:
    """Use the nonce, once and for the purpose it was issued for."""
    expiries = yield from values(
        Instant,
        "DELETE FROM sign_in_nonces WHERE nonce = :nonce AND purpose = :purpose RETURNING expires_at",
        {"nonce": nonce, "purpose": purpose},
    )
    return any(expires_at > at for expires_at in expiries)


@operation
def is_open_nonce(nonce: str, purpose: str, at: Instant) -> Operation[bool]:
    """Whether `take_nonce` would find it, without using it."""
    return (
        yield from exists(
            "SELECT 1 FROM sign_in_nonces WHERE nonce = :nonce AND purpose = :purpose AND expires_at > :at",
            {"nonce": nonce, "purpose": purpose, "at": at},
        )
    )


@operation
def claim_nonce(nonce: str, purpose: str, expires_at: Instant, at: Instant) -> Operation[bool]:
    """Insert the nonce or renew an expired one; False while an earlier claim lasts."""
    return (
        yield from exists(
            "INSERT INTO sign_in_nonces (nonce, purpose, expires_at) VALUES (:nonce, :purpose, :expires_at) "
            "ON CONFLICT (nonce) DO UPDATE SET expires_at = excluded.expires_at "
            "WHERE sign_in_nonces.expires_at <= :at RETURNING nonce",
            {"nonce": nonce, "purpose": purpose, "expires_at": expires_at, "at": at},
        )
    )


@operation
def forget_nonces(before: Instant, limit: int) -> Operation[int]:
    deleted = yield from values(
        str,
        "DELETE FROM sign_in_nonces WHERE nonce IN (SELECT nonce FROM sign_in_nonces "
        "WHERE expires_at < :before ORDER BY expires_at LIMIT :limit) RETURNING nonce",
        {"before": before, "limit": limit},
    )
    return len(deleted)
