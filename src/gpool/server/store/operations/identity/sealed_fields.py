"""Sealed fields: data keys, task secrets, and every sealed field in turn for re-keying. Never sees one opened.

A sealed field names the data key it was sealed with (`identity.envelope`: a version byte, then eight bytes of key id).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gpool.core.errors import Conflict, Invalid
from gpool.core.ids import SpecId
from gpool.core.model import Instant
from gpool.server.store.operation import operation
from gpool.server.store.protocol import Operation, Relation, Row, Statement
from gpool.server.store.rows import of_ids
from gpool.server.store.sealed_values import DataKey, SealedField, SealedSecrets

KEY_ID_AT, KEY_ID_BYTES = 2, 8


@dataclass(frozen=True, slots=True)
class Place:
    """A column of sealed fields. The row's name is its primary key; of two parts, the first is a number."""

    table: str
    column: str
    parts: tuple[tuple[str, str], ...]

    def name(self, row: Row) -> str:
        return "/".join(str(part) for part in row[: len(self.parts)])

    def key(self, name: str) -> tuple[int | str, ...]:
        words = name.split("/", len(self.parts) - 1)
        try:
            return tuple(
                int(word) if kind == "int" else word
                for word, (_, kind) in zip(words, self.parts, strict=True)
            )
        except ValueError as exc:
            raise Invalid(f"{name!r} names no row of {self.table}") from exc


PLACES = {
    place.table: place
    for place in (
        Place("sessions", "seed_sealed", (("id", "text"),)),
        Place("signing_keys", "sealed", (("kid", "text"),)),
        Place("task_secrets", "sealed", (("spec_id", "int"), ("name", "text"))),
        Place("gangs", "secret_sealed", (("task_id", "int"),)),
    )
}
"""Where sealed fields lie, in the order they are gone through."""


# ---- data keys


@operation
def put_data_key(key: DataKey) -> Operation[None]:
    yield Statement(
        "INSERT INTO data_keys (id, wrapped, created_at) VALUES (:id, :wrapped, :at)",
        {"id": key.id.hex(), "wrapped": key.wrapped, "at": key.created_at},
    )


@operation
def data_keys() -> Operation[tuple[DataKey, ...]]:
    """Oldest first, the retired ones too: something may still be sealed with them."""
    rows = yield Statement(
        "SELECT id, wrapped, created_at, retired_at FROM data_keys ORDER BY created_at, id"
    )
    return tuple(DataKey(bytes.fromhex(row[0]), bytes(row[1]), row[2], row[3]) for row in rows)


@operation
def rewrap_data_key(id: bytes, old: bytes, new: bytes) -> Operation[bool]:
    """The same key under another master key, if it is still as it was read."""
    rows = yield Statement(
        "UPDATE data_keys SET wrapped = :new WHERE id = :id AND wrapped = :old RETURNING id",
        {"id": id.hex(), "old": old, "new": new},
    )
    return bool(rows)


@operation
def retire_data_key(id: bytes, at: Instant) -> Operation[bool]:
    """Nothing new is sealed with it."""
    rows = yield Statement(
        "UPDATE data_keys SET retired_at = :at WHERE id = :id AND retired_at IS NULL RETURNING id",
        {"id": id.hex(), "at": at},
    )
    return bool(rows)


@operation
def retire_data_keys(at: Instant) -> Operation[int]:
    """All that seal at the moment: a rotation. Gives how many."""
    rows = yield Statement(
        "UPDATE data_keys SET retired_at = :at WHERE retired_at IS NULL RETURNING id", {"at": at}
    )
    return len(rows)


@operation
def forget_data_key(id: bytes) -> Operation[bool]:
    """Only a retired key that no field needs any more. False: no such key."""
    rows = yield Statement(
        "SELECT retired_at FROM data_keys WHERE id = :id /*postgresql FOR UPDATE*/",
        {"id": id.hex()},
    )
    if not rows:
        return False
    if rows[0][0] is None:
        raise Conflict("this data key is in use; retire it first")
    for place in PLACES.values():
        needed = yield Statement(
            f"SELECT 1 FROM {place.table} "  # noqa: S608
            f"WHERE substr({place.column}, {KEY_ID_AT}, {KEY_ID_BYTES}) = :id LIMIT 1",
            {"id": id},
        )
        if needed:
            raise Conflict(f"{place.table} still has fields sealed with this data key")
    yield Statement("DELETE FROM data_keys WHERE id = :id", {"id": id.hex()})
    return True


# ---- task secrets


def insert_secrets(spec: SpecId, secrets: Sequence[tuple[str, bytes]]) -> Operation[None]:
    """For other operations to include. The spec must have none yet."""
    if secrets:
        yield Statement(
            "INSERT INTO task_secrets (spec_id, name, sealed) "
            "SELECT CAST(:spec AS BIGINT), s.name, s.sealed FROM {secrets} AS s",
            {"spec": spec},
            {"secrets": Relation((("name", "text"), ("sealed", "blob")), list(secrets))},
        )


@operation
def put_secrets(spec: SpecId, secrets: Sequence[tuple[str, bytes]]) -> Operation[None]:
    """(name, sealed) of each. A submission with secrets does this itself."""
    there = yield Statement("SELECT 1 FROM task_secrets WHERE spec_id = :spec", {"spec": spec})
    if there:
        raise Conflict("this spec has its secrets already")
    yield from insert_secrets(spec, secrets)


@operation
def secrets_of(
    specs: Collection[SpecId],
) -> Operation[dict[SpecId, tuple[tuple[str, bytes], ...]]]:
    """(name, sealed) by spec; specs without secrets are left out."""
    rows = yield Statement(
        "SELECT s.spec_id, s.name, s.sealed FROM {specs} AS i JOIN task_secrets s ON s.spec_id = i.id "
        "ORDER BY s.spec_id, s.name",
        {},
        {"specs": of_ids(specs)},
    )
    found: dict[SpecId, tuple[tuple[str, bytes], ...]] = {}
    for spec, name, sealed in rows:
        found[spec] = (*found.get(spec, ()), (name, bytes(sealed)))
    return found


def secrets_to_open(specs: Collection[SpecId]) -> Operation[SealedSecrets]:
    """For other operations to include: the secrets of these specs, and the data keys to open them with."""
    if not specs:
        return SealedSecrets()
    fields = yield from secrets_of(specs)
    return SealedSecrets(fields, (yield from data_keys()) if fields else ())


# ---- re-keying


@operation
def sealed_counts() -> Operation[dict[bytes, int]]:
    """How many fields each data key seals. Looks at all of them."""
    counts: dict[bytes, int] = {}
    for place in PLACES.values():
        rows = yield Statement(
            f"SELECT substr({place.column}, {KEY_ID_AT}, {KEY_ID_BYTES}), COUNT(*) FROM {place.table} "  # noqa: S608
            f"WHERE {place.column} IS NOT NULL GROUP BY substr({place.column}, {KEY_ID_AT}, {KEY_ID_BYTES})"
        )
        for key, count in rows:
            counts[bytes(key)] = counts.get(bytes(key), 0) + count
    return counts


@operation
def sealed_fields(after: SealedField | None, limit: int) -> Operation[tuple[SealedField, ...]]:
    """Every sealed field once: table by table, by primary key. `after` is the last of the page before."""
    found: list[SealedField] = []
    tables = list(PLACES)
    begun = 0 if after is None else tables.index(after.table)
    for table in tables[begun:]:
        place = PLACES[table]
        names = ", ".join(name for name, _ in place.parts)
        where = f"{place.column} IS NOT NULL"
        parameters: dict[str, int | str] = {"limit": limit - len(found)}
        if after is not None and after.table == table:
            spots = ", ".join(f":part_{i}" for i in range(len(place.parts)))
            where += f" AND ({names}) > ({spots})"
            parameters |= {f"part_{i}": part for i, part in enumerate(place.key(after.row))}
        rows = yield Statement(
            f"SELECT {names}, {place.column} FROM {table} WHERE {where} ORDER BY {names} LIMIT :limit",  # noqa: S608
            parameters,
        )
        found += [SealedField(table, place.name(row), place.column, bytes(row[-1])) for row in rows]
        if len(found) >= limit:
            break
    return tuple(found)


@operation
def replace_sealed(changes: Sequence[tuple[SealedField, bytes]]) -> Operation[int]:
    """Each field as it was read, and what it becomes, if it is still so. Gives how many were."""
    replaced = 0
    for table in sorted({field.table for field, _ in changes}):
        place = PLACES[table]
        match = " AND ".join(f"{table}.{name} = c.{name}" for name, _ in place.parts)
        rows = [
            (*place.key(field.row), field.sealed, new)
            for field, new in changes
            if field.table == table
        ]
        done = yield Statement(
            f"UPDATE {table} SET {place.column} = c.new FROM {{changes}} AS c "  # noqa: S608
            f"WHERE {match} AND {table}.{place.column} = c.old RETURNING 1",
            {},
            {"changes": Relation((*place.parts, ("old", "blob"), ("new", "blob")), sorted(rows))},
        )
        replaced += len(done)
    return replaced
