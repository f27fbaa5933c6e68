"""Named secrets of users and teams, sealed; opens none. They go with their user or team."""

from __future__ import annotations

from collections.abc import Iterable

from gpool.core.errors import Conflict, NotFound
from gpool.server.store.generated_rows import NamedSecretsRecord
from gpool.server.store.protocol import Operation, Relation, Statement, operation
from gpool.server.store.rows import columns, exists, of_names, select, values
from gpool.server.store.sealing import Account

MOST = 100
"""Secrets of a user or team."""

SECRET = columns(NamedSecretsRecord, NamedSecretsRecord, "s")
WHOSE = "holder_kind = :kind AND holder_id = :id"


@operation
def put_secret(row: NamedSecretsRecord) -> Operation[None]:
    """Store a secret, or replace the value of that name. `Conflict` beyond `MOST` of the account."""
    yield from _lock((row.holder_kind, row.holder_id))
    names = yield from values(
        str,
        f"SELECT name FROM named_secrets WHERE {WHOSE}",  # noqa: S608
        {"kind": row.holder_kind, "id": row.holder_id},
    )
    if len(names) >= MOST and row.name not in names:
        raise Conflict(
            f"an account has at most {MOST} stored secrets; delete one with: gpool secret rm NAME"
        )
    marks = ", ".join(f":{name}" for name in row._fields)
    yield Statement(
        f"INSERT INTO named_secrets ({', '.join(row._fields)}) VALUES ({marks}) "  # noqa: S608
        "ON CONFLICT (holder_kind, holder_id, name) "
        "DO UPDATE SET sealed = excluded.sealed, updated_at = excluded.updated_at",
        row._asdict(),
    )


def _lock(holder: tuple[str, int]) -> Operation[None]:
    """Keep the account until the commit: its deletion deletes the secrets before its row."""
    table = "teams" if holder[0] == "team" else "users"
    lives = "" if holder[0] == "team" else "AND deleted_at IS NULL "
    found = yield from exists(
        f"SELECT 1 FROM {table} WHERE id = :id {lives}/*postgresql FOR UPDATE*/",  # noqa: S608
        {"id": holder[1]},
    )
    if not found:
        raise NotFound("the account was deleted meanwhile")


@operation
def delete_secret(holder: Account, name: str) -> Operation[None]:
    """`NotFound` if there is none of this name."""
    found = yield from exists(
        f"DELETE FROM named_secrets WHERE {WHOSE} AND name = :name RETURNING name",  # noqa: S608
        {"kind": holder[0], "id": holder[1], "name": name},
    )
    if not found:
        raise NotFound(f"no stored secret {name!r}")


@operation
def secrets_of(holders: Iterable[Account]) -> Operation[list[NamedSecretsRecord]]:
    """All secrets of these accounts: of users first, then by account and name."""
    return (
        yield from select(
            NamedSecretsRecord,
            f"SELECT {SECRET} FROM {{holders}} AS h JOIN named_secrets s "  # noqa: S608
            "ON s.holder_kind = h.kind AND s.holder_id = h.id ORDER BY s.holder_kind DESC, s.holder_id, s.name",
            {},
            {"holders": _holders(holders)},
        )
    )


@operation
def secrets_named(
    holders: Iterable[Account], names: Iterable[str]
) -> Operation[list[NamedSecretsRecord]]:
    """Secrets of these accounts with one of the names: of users first."""
    return (
        yield from select(
            NamedSecretsRecord,
            f"SELECT {SECRET} FROM {{holders}} AS h CROSS JOIN {{names}} AS n JOIN named_secrets s "  # noqa: S608
            "ON s.holder_kind = h.kind AND s.holder_id = h.id AND s.name = n.name ORDER BY s.holder_kind DESC, s.name",
            {},
            {"holders": _holders(holders), "names": of_names(names)},
        )
    )


def _holders(holders: Iterable[Account]) -> Relation:
    return Relation((("kind", "text"), ("id", "int")), list(holders))


def forget_secrets(holder: Account) -> Operation[None]:
    """Delete all secrets of an account: a step of its deletion."""
    yield Statement(
        f"DELETE FROM named_secrets WHERE {WHOSE}",  # noqa: S608
        {"kind": holder[0], "id": holder[1]},
    )
