"""Users and their API keys. Keys are only ever seen hashed."""

from __future__ import annotations

from gpool.core.errors import Conflict
from gpool.core.ids import UserId
from gpool.core.model import Instant, Permission
from gpool.server.store.operation import operation
from gpool.server.store.protocol import Operation, Row, Statement
from gpool.server.store.values import User

COLUMNS = "u.id, u.name, u.permissions, u.created_at"


def _user(rows: list[Row]) -> User | None:
    for number, name, permissions, created_at in rows:
        granted = frozenset(Permission(word) for word in permissions.split(",") if word)
        return User(UserId(number), name, granted, Instant(created_at))
    return None


@operation
def create_user(user: User) -> Operation[None]:
    taken = yield Statement("SELECT 1 FROM users WHERE name = :name", {"name": user.name})
    if taken:
        raise Conflict(f"there is a user {user.name!r} already; choose another name")
    yield Statement(
        "INSERT INTO users (id, name, permissions, created_at) VALUES (:id, :name, :permissions, :at)",
        {
            "id": user.id,
            "name": user.name,
            "permissions": ",".join(sorted(user.permissions)),
            "at": user.created_at,
        },
    )


@operation
def add_key(key_id: int, user: UserId, name: str, hashed: str, at: Instant) -> Operation[None]:
    yield Statement(
        "INSERT INTO api_keys (id, user_id, name, hashed, created_at) VALUES (:id, :user, :name, :hashed, :at)",
        {"id": key_id, "user": user, "name": name, "hashed": hashed, "at": at},
    )


@operation
def user_by_key(hashed: str) -> Operation[User | None]:
    rows = yield Statement(
        f"SELECT {COLUMNS} FROM api_keys k JOIN users u ON u.id = k.user_id WHERE k.hashed = :hashed",  # noqa: S608
        {"hashed": hashed},
    )
    return _user(rows)


@operation
def user_by_name(name: str) -> Operation[User | None]:
    rows = yield Statement(f"SELECT {COLUMNS} FROM users u WHERE u.name = :name", {"name": name})  # noqa: S608
    return _user(rows)


@operation
def user(id: UserId) -> Operation[User | None]:
    rows = yield Statement(f"SELECT {COLUMNS} FROM users u WHERE u.id = :id", {"id": id})  # noqa: S608
    return _user(rows)
