"""Storage used by each user and team: counted once per artifact, in the transaction that adds or drops its references.

A sum over all references would cost a row each; the counter costs one row, or one per shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpool.server.store.generated_rows import StoredRecord
from gpool.server.store.identity_values import Holder
from gpool.server.store.protocol import Operation, Relation, Statement
from gpool.server.store.queries import select
from gpool.server.store.rows import of_names

HELD = (("kind", "text"), ("id", "int"), ("sha256", "text"))
CHANGED = (("kind", "text"), ("id", "int"), ("change", "int"))
SHARD = "0 /*postgresql + pg_backend_pid() % 16*/"
"""One shard per database session, so that concurrent writers rarely wait for each other's row."""


class _Size(NamedTuple):
    sha256: str
    size_bytes: int


def holder_of(user: int, team: int | None) -> tuple[Holder, int]:
    return ("user", user) if team is None else ("team", team)


def count(held: Sequence[tuple[Holder, int, str]]) -> Operation[None]:
    if not held:
        return
    new = yield from select(
        StoredRecord,
        "INSERT INTO stored (kind, id, sha256) SELECT h.kind, h.id, h.sha256 FROM {held} AS h "
        "JOIN artifacts a ON a.sha256 = h.sha256 WHERE true "
        "ON CONFLICT (kind, id, sha256) DO NOTHING RETURNING kind, id, sha256",
        {},
        {"held": Relation(HELD, sorted(set(held)))},
    )
    if not new:
        return
    sizes = yield from select(
        _Size,
        "SELECT a.sha256, a.size_bytes FROM {new} AS n JOIN artifacts a ON a.sha256 = n.name",
        {},
        {"new": of_names(row.sha256 for row in new)},
    )
    yield from _change(new, {row.sha256: row.size_bytes for row in sizes})


def uncount(sizes: Mapping[str, int]) -> Operation[None]:
    old = yield from select(
        StoredRecord,
        "DELETE FROM stored WHERE sha256 IN (SELECT name FROM {gone} AS g) RETURNING kind, id, sha256",
        {},
        {"gone": of_names(sizes)},
    )
    if old:
        yield from _change(old, {sha256: -size for sha256, size in sizes.items()})


def _change(rows: Sequence[StoredRecord], sizes: Mapping[str, int]) -> Operation[None]:
    changes: Counter[tuple[str, int]] = Counter()
    for kind, number, sha256 in rows:
        changes[kind, number] += sizes[sha256]
    yield Statement(
        f"INSERT INTO storage (kind, id, shard, size_bytes) SELECT c.kind, c.id, {SHARD}, c.change "  # noqa: S608
        "FROM {changes} AS c WHERE true ON CONFLICT (kind, id, shard) "
        "DO UPDATE SET size_bytes = storage.size_bytes + excluded.size_bytes",
        {},
        {
            "changes": Relation(
                CHANGED, [(*holder, change) for holder, change in sorted(changes.items())]
            )
        },
    )
