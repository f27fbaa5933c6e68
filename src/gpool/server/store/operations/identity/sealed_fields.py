"""Sealed (encrypted) fields: data keys, task secrets, paging over all sealed fields for re-keying. Opens none.

A sealed field names its data key (`identity.envelope`: a version byte, then eight bytes of key id).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from gpool.core.errors import Conflict, Invalid
from gpool.core.ids import SpecId
from gpool.core.model import Instant
from gpool.server.store.generated_rows import (
    AccountKeysRecord,
    DataKeysRecord,
    TaskSecretsRecord,
)
from gpool.server.store.identity_values import Holder
from gpool.server.store.protocol import Operation, Relation, Statement, operation
from gpool.server.store.rows import columns, exists, of_ids, select, values
from gpool.server.store.values import DataKey, SealedField, SealedSecrets

KEY_ID_AT, KEY_ID_BYTES = 2, 8
LAST = Instant((1 << 63) - 1)
DATA_KEY = columns(DataKeysRecord, DataKeysRecord, "k")
ACCOUNT_KEY = columns(AccountKeysRecord, AccountKeysRecord, "k")


@dataclass(frozen=True, slots=True)
class SealedColumn:
    """Column of sealed fields, named by the primary key of the row, its parts joined by `/`."""

    table: str
    column: str
    parts: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        return " || '/' || ".join(f"CAST({part} AS TEXT)" for part, _ in self.parts)

    def key(self, name: str) -> tuple[int | str, ...]:
        words = name.split("/", len(self.parts) - 1)
        try:
            return tuple(
                int(word) if kind == "int" else word
                for word, (_, kind) in zip(words, self.parts, strict=True)
            )
        except ValueError as exc:
            raise Invalid(f"{name!r} names no row of {self.table}") from exc


SEALED_COLUMNS = {
    column.table: column
    for column in (
        SealedColumn("sessions", "seed_sealed", (("id", "text"),)),
        SealedColumn("signing_keys", "sealed", (("kid", "text"),)),
        SealedColumn("receipt_keys", "sealed", (("id", "text"),)),
        SealedColumn("task_secrets", "sealed", (("spec_id", "int"), ("name", "text"))),
        SealedColumn("gangs", "secret_sealed", (("task_id", "int"),)),
        SealedColumn("server_secrets", "sealed", (("name", "text"),)),
        SealedColumn("destinations", "sealed", (("id", "int"),)),
        SealedColumn(
            "named_secrets",
            "sealed",
            (("holder_kind", "text"), ("holder_id", "int"), ("name", "text")),
        ),
    )
}
"""All sealed columns, in the order of paging."""


class _RetiredAt(NamedTuple):
    retired_at: Instant | None


class _KeyCount(NamedTuple):
    key: bytes
    fields: int


class _NamedField(NamedTuple):
    name: str
    sealed: bytes


# ---- data keys


@operation
def put_data_key(key: DataKey) -> Operation[None]:
    yield Statement(
        "INSERT INTO data_keys (id, wrapped, created_at) VALUES (:id, :wrapped, :at)",
        {"id": key.id.hex(), "wrapped": key.wrapped, "at": key.created_at},
    )


@operation
def data_keys() -> Operation[tuple[DataKey, ...]]:
    """Data keys, oldest first; a retired key may still seal fields."""
    rows = yield from select(
        DataKeysRecord,
        f"SELECT {DATA_KEY} FROM data_keys k ORDER BY k.created_at, k.id",  # noqa: S608
    )
    return tuple(
        DataKey(bytes.fromhex(row.id), bytes(row.wrapped), row.created_at, row.retired_at)
        for row in rows
    )


@operation
def rewrap_data_key(id: bytes, old: bytes, new: bytes) -> Operation[bool]:
    return (
        yield from exists(
            "UPDATE data_keys SET wrapped = :new WHERE id = :id AND wrapped = :old RETURNING id",
            {"id": id.hex(), "old": old, "new": new},
        )
    )


@operation
def account_key_page(after: str, limit: int) -> Operation[list[AccountKeysRecord]]:
    """Keys of accounts by their ids, after `after`."""
    return (
        yield from select(
            AccountKeysRecord,
            f"SELECT {ACCOUNT_KEY} FROM account_keys k WHERE k.key_id > :after ORDER BY k.key_id LIMIT :limit",  # noqa: S608
            {"after": after, "limit": limit},
        )
    )


@operation
def rewrap_account_key(key_id: str, old: bytes, new: bytes) -> Operation[bool]:
    return (
        yield from exists(
            "UPDATE account_keys SET wrapped = :new WHERE key_id = :id AND wrapped = :old RETURNING key_id",
            {"id": key_id, "old": old, "new": new},
        )
    )


class _KeyAccount(NamedTuple):
    kind: str
    id: int


@operation
def keys_without_account(limit: int) -> Operation[tuple[tuple[Holder, int], ...]]:
    """Deleted users and teams whose key is left and whose last task is gone."""
    rows = yield from select(
        _KeyAccount,
        "SELECT k.kind, k.id FROM account_keys k WHERE k.kind = 'team' "
        "AND NOT EXISTS (SELECT 1 FROM teams t WHERE t.id = k.id) "
        "AND NOT EXISTS (SELECT 1 FROM tasks t WHERE t.team_id = k.id) UNION ALL "
        "SELECT k.kind, k.id FROM account_keys k WHERE k.kind = 'user' "
        "AND NOT EXISTS (SELECT 1 FROM users u WHERE u.id = k.id) "
        "AND NOT EXISTS (SELECT 1 FROM tasks t WHERE t.user_id = k.id AND t.team_id IS NULL) LIMIT :limit",
        {"limit": limit},
    )
    return tuple((cast("Holder", row.kind), row.id) for row in rows)


@operation
def retire_data_key(id: bytes, at: Instant) -> Operation[bool]:
    return (
        yield from exists(
            "UPDATE data_keys SET retired_at = :at WHERE id = :id AND retired_at IS NULL RETURNING id",
            {"id": id.hex(), "at": at},
        )
    )


@operation
def retire_data_keys(at: Instant, before: Instant = LAST) -> Operation[int]:
    """Retire the data keys that were made before then; return their number."""
    retired = yield from values(
        str,
        "UPDATE data_keys SET retired_at = :at WHERE retired_at IS NULL AND created_at < :before RETURNING id",
        {"at": at, "before": before},
    )
    return len(retired)


@operation
def forget_data_key(id: bytes) -> Operation[bool]:
    rows = yield from select(
        _RetiredAt,
        "SELECT retired_at FROM data_keys WHERE id = :id /*postgresql FOR UPDATE*/",
        {"id": id.hex()},
    )
    if not rows:
        return False
    if rows[0].retired_at is None:
        raise Conflict("this data key is in use; retire it first")
    for column in SEALED_COLUMNS.values():
        needed = yield from exists(
            f"SELECT 1 FROM {column.table} "  # noqa: S608
            f"WHERE substr({column.column}, {KEY_ID_AT}, {KEY_ID_BYTES}) = :id LIMIT 1",
            {"id": id},
        )
        if needed:
            raise Conflict(f"{column.table} still has fields sealed with this data key")
    yield Statement("DELETE FROM data_keys WHERE id = :id", {"id": id.hex()})
    return True


# ---- task secrets


def insert_secrets(spec: SpecId, secrets: Sequence[tuple[str, bytes]]) -> Operation[None]:
    if secrets:
        yield Statement(
            "INSERT INTO task_secrets (spec_id, name, sealed) "
            "SELECT CAST(:spec AS BIGINT), s.name, s.sealed FROM {secrets} AS s",
            {"spec": spec},
            {"secrets": Relation((("name", "text"), ("sealed", "blob")), list(secrets))},
        )


@operation
def put_secrets(spec: SpecId, secrets: Sequence[tuple[str, bytes]]) -> Operation[None]:
    """Store (name, sealed) of each secret; `Conflict` if the spec has secrets already."""
    sql = "SELECT 1 FROM task_secrets WHERE spec_id = :spec"
    if (yield from exists(sql, {"spec": spec})):
        raise Conflict("this spec has its secrets already")
    yield from insert_secrets(spec, secrets)


@operation
def secrets_of(
    specs: Collection[SpecId],
) -> Operation[dict[SpecId, tuple[tuple[str, bytes], ...]]]:
    rows = yield from select(
        TaskSecretsRecord,
        "SELECT s.spec_id, s.name, s.sealed FROM {specs} AS i JOIN task_secrets s ON s.spec_id = i.id "
        "ORDER BY s.spec_id, s.name",
        {},
        {"specs": of_ids(specs)},
    )
    found: dict[SpecId, tuple[tuple[str, bytes], ...]] = {}
    for row in rows:
        found[row.spec_id] = (*found.get(row.spec_id, ()), (row.name, bytes(row.sealed)))
    return found


def secrets_to_open(specs: Collection[SpecId]) -> Operation[SealedSecrets]:
    if not specs:
        return SealedSecrets()
    fields = yield from secrets_of(specs)
    return SealedSecrets(fields, (yield from data_keys()) if fields else ())


# ---- secrets of the server


@operation
def server_secret(name: str) -> Operation[bytes | None]:
    found = yield from values(
        bytes, "SELECT sealed FROM server_secrets WHERE name = :name", {"name": name}
    )
    return bytes(found[0]) if found else None


@operation
def put_server_secret(name: str, sealed: bytes) -> Operation[None]:
    """Store a secret unless a replica has stored it before."""
    yield Statement(
        "INSERT INTO server_secrets (name, sealed) VALUES (:name, :sealed) ON CONFLICT (name) DO NOTHING",
        {"name": name, "sealed": sealed},
    )


@operation
def drop_server_secret(name: str, sealed: bytes) -> Operation[None]:
    """Delete a secret unless another replica has replaced it meanwhile."""
    yield Statement(
        "DELETE FROM server_secrets WHERE name = :name AND sealed = :sealed",
        {"name": name, "sealed": sealed},
    )


# ---- re-keying


@operation
def sealed_counts() -> Operation[dict[bytes, int]]:
    counts: dict[bytes, int] = {}
    for column in SEALED_COLUMNS.values():
        rows = yield from select(
            _KeyCount,
            f"SELECT substr({column.column}, {KEY_ID_AT}, {KEY_ID_BYTES}), COUNT(*) FROM {column.table} "  # noqa: S608
            f"WHERE {column.column} IS NOT NULL GROUP BY substr({column.column}, {KEY_ID_AT}, {KEY_ID_BYTES})",
        )
        for row in rows:
            counts[bytes(row.key)] = counts.get(bytes(row.key), 0) + row.fields
    return counts


@operation
def sealed_fields(after: SealedField | None, limit: int) -> Operation[tuple[SealedField, ...]]:
    found: list[SealedField] = []
    tables = list(SEALED_COLUMNS)
    begun = 0 if after is None else tables.index(after.table)
    for table in tables[begun:]:
        column = SEALED_COLUMNS[table]
        names = ", ".join(name for name, _ in column.parts)
        where = f"{column.column} IS NOT NULL"
        parameters: dict[str, int | str] = {"limit": limit - len(found)}
        if after is not None and after.table == table:
            spots = ", ".join(f":part_{i}" for i in range(len(column.parts)))
            where += f" AND ({names}) > ({spots})"
            parameters |= {f"part_{i}": part for i, part in enumerate(column.key(after.row))}
        rows = yield from select(
            _NamedField,
            f"SELECT {column.name}, {column.column} FROM {table} WHERE {where} ORDER BY {names} LIMIT :limit",  # noqa: S608
            parameters,
        )
        found += [SealedField(table, row.name, column.column, bytes(row.sealed)) for row in rows]
        if len(found) >= limit:
            break
    return tuple(found)


@operation
def replace_sealed(changes: Sequence[tuple[SealedField, bytes]]) -> Operation[int]:
    replaced = 0
    for table in sorted({field.table for field, _ in changes}):
        column = SEALED_COLUMNS[table]
        match = " AND ".join(f"{table}.{name} = c.{name}" for name, _ in column.parts)
        rows = [
            (*column.key(field.row), field.sealed, new)
            for field, new in changes
            if field.table == table
        ]
        done = yield from values(
            int,
            f"UPDATE {table} SET {column.column} = c.new FROM {{changes}} AS c "  # noqa: S608
            f"WHERE {match} AND {table}.{column.column} = c.old RETURNING 1",
            {},
            {"changes": Relation((*column.parts, ("old", "blob"), ("new", "blob")), sorted(rows))},
        )
        replaced += len(done)
    return replaced
