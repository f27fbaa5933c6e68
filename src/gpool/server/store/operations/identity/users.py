"""Users and their API keys. Keys are only ever seen hashed; one that ended, expired or whose user is disabled opens nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from gpool.core.errors import Conflict
from gpool.core.ids import UserId
from gpool.core.model import Instant, Permission
from gpool.core.permissions import Scope, TeamId
from gpool.server.store.identity_values import ApiKey, Caller
from gpool.server.store.operation import operation
from gpool.server.store.operations.identity.teams import roles_of
from gpool.server.store.protocol import Operation, Relation, Row, Statement
from gpool.server.store.values import User

COLUMNS = "u.id, u.name, u.permissions, u.created_at"
KEY_COLUMNS = "id, user_id, name, scopes, team_id, created_at, expires_at, ended_at, last_used_at"
LIVE_KEY = (
    "k.hashed = :hashed AND k.ended_at IS NULL AND u.disabled_at IS NULL "
    "AND (k.expires_at IS NULL OR k.expires_at > :at)"
)
NEVER = Instant((1 << 63) - 1)
SCOPES = {scope.value: scope for scope in Scope}


def permissions_text(permissions: Iterable[Permission]) -> str:
    return ",".join(sorted(permissions))


def user_from(row: Row) -> User:
    """From `COLUMNS`; what follows them is not looked at."""
    number, name, permissions, created_at = row[:4]
    granted = frozenset(Permission(word) for word in permissions.split(",") if word)
    return User(UserId(number), name, granted, Instant(created_at))


def _user(rows: list[Row]) -> User | None:
    return user_from(rows[0]) if rows else None


def insert_user(user: User, password_hash: str | None = None) -> Operation[None]:
    yield Statement(
        "INSERT INTO users (id, name, permissions, created_at, password_hash) "
        "VALUES (:id, :name, :permissions, :at, :password_hash)",
        {
            "id": user.id,
            "name": user.name,
            "permissions": permissions_text(user.permissions),
            "at": user.created_at,
            "password_hash": password_hash,
        },
    )


@operation
def create_user(user: User) -> Operation[None]:
    taken = yield Statement("SELECT 1 FROM users WHERE name = :name", {"name": user.name})
    if taken:
        raise Conflict(f"there is a user {user.name!r} already; choose another name")
    yield from insert_user(user)


@operation
def user_by_name(name: str) -> Operation[User | None]:
    rows = yield Statement(f"SELECT {COLUMNS} FROM users u WHERE u.name = :name", {"name": name})  # noqa: S608
    return _user(rows)


@operation
def user(id: UserId) -> Operation[User | None]:
    rows = yield Statement(f"SELECT {COLUMNS} FROM users u WHERE u.id = :id", {"id": id})  # noqa: S608
    return _user(rows)


@operation
def caller(id: UserId) -> Operation[Caller | None]:
    """The user behind a sign-in, with their teams; None when there is none, or disabled."""
    rows = yield Statement(
        f"SELECT {COLUMNS} FROM users u WHERE u.id = :id AND u.disabled_at IS NULL",  # noqa: S608
        {"id": id},
    )
    if not rows:
        return None
    return Caller(user_from(rows[0]), (yield from roles_of(id)))


# ---- API keys


def _scopes(text: str | None) -> frozenset[Scope] | None:
    """A scope there is no longer opens nothing."""
    if text is None:
        return None
    words = msgspec.json.decode(text, type=list[str])
    return frozenset(SCOPES[word] for word in words if word in SCOPES)


@operation
def add_key(
    key_id: int,
    user: UserId,
    name: str,
    hashed: str,
    at: Instant,
    *,
    scopes: Iterable[Scope] | None = None,
    expires_at: Instant | None = None,
    team: TeamId | None = None,
) -> Operation[None]:
    """`scopes` None: all. With a team, the key is for that team only."""
    yield Statement(
        "INSERT INTO api_keys (id, user_id, name, hashed, created_at, scopes, expires_at, team_id) "
        "VALUES (:id, :user, :name, :hashed, :at, :scopes, :expires_at, :team)",
        {
            "id": key_id,
            "user": user,
            "name": name,
            "hashed": hashed,
            "at": at,
            "scopes": None if scopes is None else msgspec.json.encode(sorted(scopes)).decode(),
            "expires_at": expires_at,
            "team": team,
        },
    )


@operation
def user_by_key(hashed: str, at: Instant = NEVER) -> Operation[User | None]:
    """Asked without the time, a key that expires some day is taken for expired."""
    rows = yield Statement(
        f"SELECT {COLUMNS} FROM api_keys k JOIN users u ON u.id = k.user_id WHERE {LIVE_KEY}",  # noqa: S608
        {"hashed": hashed, "at": at},
    )
    return _user(rows)


@operation
def caller_by_key(hashed: str, at: Instant) -> Operation[Caller | None]:
    rows = yield Statement(
        f"SELECT {COLUMNS}, k.id, k.scopes, k.team_id FROM api_keys k JOIN users u ON u.id = k.user_id "  # noqa: S608
        f"WHERE {LIVE_KEY}",
        {"hashed": hashed, "at": at},
    )
    if not rows:
        return None
    found = user_from(rows[0])
    key, scopes, team = rows[0][4:]
    teams = yield from roles_of(found.id)
    if team is not None:
        teams = {team: teams[team]} if team in teams else {}
    return Caller(found, teams, _scopes(scopes), key, team)


@operation
def keys_of(user: UserId) -> Operation[tuple[ApiKey, ...]]:
    """Newest first, the ended ones too."""
    rows = yield Statement(
        f"SELECT {KEY_COLUMNS} FROM api_keys WHERE user_id = :user ORDER BY id DESC",  # noqa: S608
        {"user": user},
    )
    return tuple(_key(row) for row in rows)


@operation
def key(id: int) -> Operation[ApiKey | None]:
    rows = yield Statement(f"SELECT {KEY_COLUMNS} FROM api_keys WHERE id = :id", {"id": id})  # noqa: S608
    return _key(rows[0]) if rows else None


def _key(row: Row) -> ApiKey:
    return ApiKey(
        row[0], UserId(row[1]), row[2], _scopes(row[3]), row[4], row[5], row[6], row[7], row[8]
    )


@operation
def end_key(id: int, user: UserId | None, at: Instant) -> Operation[bool]:
    """False: not this user's (None: anybody's), or ended before."""
    mine = "" if user is None else " AND user_id = :user"
    rows = yield Statement(
        f"UPDATE api_keys SET ended_at = :at WHERE id = :id AND ended_at IS NULL{mine} RETURNING id",  # noqa: S608
        {"at": at, "id": id} | ({} if user is None else {"user": user}),
    )
    return bool(rows)


@operation
def touch_keys(used: Sequence[tuple[int, Instant]]) -> Operation[None]:
    """When keys were last used; never moves one back."""
    if used:
        latest: dict[int, int] = {}
        for number, at in used:
            latest[number] = max(at, latest.get(number, 0))
        yield Statement(
            "UPDATE api_keys SET last_used_at = u.at FROM {used} AS u WHERE api_keys.id = u.id "
            "AND (api_keys.last_used_at IS NULL OR api_keys.last_used_at < u.at)",
            {},
            {"used": Relation((("id", "int"), ("at", "int")), sorted(latest.items()))},
        )
