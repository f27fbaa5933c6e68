"""Users and API keys. Keys are stored hashed; a key is live unless it ended, expired, or its user is disabled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from gpool.core.errors import Conflict
from gpool.core.ids import UserId
from gpool.core.model import Instant, Permission
from gpool.core.permissions import Scope, TeamId
from gpool.server.store.generated_rows import ApiKeysRecord, UsersRecord
from gpool.server.store.identity_values import ApiKey, Caller
from gpool.server.store.operations.identity.teams import roles_of
from gpool.server.store.protocol import Operation, Relation, Statement, operation
from gpool.server.store.rows import columns, exists, select, select_pairs
from gpool.server.store.values import User


class UserColumns(NamedTuple):
    id: UserId
    name: str
    permissions: str
    created_at: Instant


class _KeyColumns(NamedTuple):
    id: int
    scopes: str | None
    team_id: TeamId | None


USER = columns(UserColumns, UsersRecord, "u")
KEY = columns(ApiKeysRecord, ApiKeysRecord, "k")
LIVE_KEY = (
    "k.hashed = :hashed AND k.ended_at IS NULL AND u.disabled_at IS NULL "
    "AND (k.expires_at IS NULL OR k.expires_at > :at)"
)
NEVER = Instant((1 << 63) - 1)
SCOPES = {scope.value: scope for scope in Scope}


def permissions_text(permissions: Iterable[Permission]) -> str:
    return ",".join(sorted(permissions))


def permissions_from(text: str) -> frozenset[Permission]:
    return frozenset(Permission(word) for word in text.split(",") if word)


def user_from(row: UserColumns) -> User:
    return User(row.id, row.name, permissions_from(row.permissions), row.created_at)


def _user(source: str, **parameters: int | str) -> Operation[User | None]:
    rows = yield from select(UserColumns, f"SELECT {USER} FROM {source}", parameters)  # noqa: S608
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
    taken = yield from exists("SELECT 1 FROM users WHERE name = :name", {"name": user.name})
    if taken:
        raise Conflict(f"there is a user {user.name!r} already; choose another name")
    yield from insert_user(user)


@operation
def user_by_name(name: str) -> Operation[User | None]:
    return (yield from _user("users u WHERE u.name = :name", name=name))


@operation
def user(id: UserId) -> Operation[User | None]:
    return (yield from _user("users u WHERE u.id = :id", id=id))


@operation
def names_of(ids: Sequence[UserId]) -> Operation[dict[UserId, str]]:
    rows = yield from select(
        UserColumns,
        f"SELECT {USER} FROM {{wanted}} AS w JOIN users u ON u.id = w.id",  # noqa: S608
        {},
        {"wanted": Relation((("id", "int"),), tuple((id_,) for id_ in ids))},
    )
    return {row.id: row.name for row in rows}


@operation
def caller(id: UserId) -> Operation[Caller | None]:
    found = yield from _user("users u WHERE u.id = :id AND u.disabled_at IS NULL", id=id)
    return None if found is None else Caller(found, (yield from roles_of(id)))


# ---- API keys


def _scopes(text: str | None) -> frozenset[Scope] | None:
    """Decode scopes; those that no longer exist are ignored."""
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
    """User of a live key. Without a time, a key with an expiry date counts as expired."""
    source = f"api_keys k JOIN users u ON u.id = k.user_id WHERE {LIVE_KEY}"
    return (yield from _user(source, hashed=hashed, at=at))


@operation
def caller_by_key(hashed: str, at: Instant) -> Operation[Caller | None]:
    rows = yield from select_pairs(
        UserColumns,
        _KeyColumns,
        f"SELECT {USER}, k.id, k.scopes, k.team_id FROM api_keys k JOIN users u ON u.id = k.user_id "  # noqa: S608
        f"WHERE {LIVE_KEY}",
        {"hashed": hashed, "at": at},
    )
    if not rows:
        return None
    [(found, key)] = rows
    teams, team = (yield from roles_of(found.id)), key.team_id
    if team is not None:
        teams = {team: teams[team]} if team in teams else {}
    return Caller(user_from(found), teams, _scopes(key.scopes), key.id, team)


@operation
def keys_of(user: UserId) -> Operation[tuple[ApiKey, ...]]:
    rows = yield from select(
        ApiKeysRecord,
        f"SELECT {KEY} FROM api_keys k WHERE k.user_id = :user ORDER BY k.id DESC",  # noqa: S608
        {"user": user},
    )
    return tuple(_key(row) for row in rows)


@operation
def key(id: int) -> Operation[ApiKey | None]:
    rows = yield from select(
        ApiKeysRecord,
        f"SELECT {KEY} FROM api_keys k WHERE k.id = :id",  # noqa: S608
        {"id": id},
    )
    return _key(rows[0]) if rows else None


def _key(row: ApiKeysRecord) -> ApiKey:
    return ApiKey(
        row.id,
        row.user_id,
        row.name,
        _scopes(row.scopes),
        row.team_id,
        row.created_at,
        row.expires_at,
        row.ended_at,
        row.last_used_at,
    )


@operation
def end_key(id: int, user: UserId | None, at: Instant) -> Operation[bool]:
    mine = "" if user is None else " AND user_id = :user"
    return (
        yield from exists(
            f"UPDATE api_keys SET ended_at = :at WHERE id = :id AND ended_at IS NULL{mine} RETURNING id",  # noqa: S608
            {"at": at, "id": id} | ({} if user is None else {"user": user}),
        )
    )


@operation
def touch_keys(used: Sequence[tuple[int, Instant]]) -> Operation[None]:
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
