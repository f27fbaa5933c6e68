"""How much each user and team stores: every artifact once for each of them, counted in the transaction of its references.

A sum over references would cost as much as there are references; this costs one row, or one for each shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from gpool.server.store.identity_values import Holder
from gpool.server.store.protocol import Operation, Relation, Statement
from gpool.server.store.rows import of_names

HELD = (("kind", "text"), ("id", "int"), ("sha256", "text"))
CHANGED = (("kind", "text"), ("id", "int"), ("change", "int"))
SHARD = "0 /*postgresql + pg_backend_pid() % 16*/"
"""Each replica's writer has its own connection, so two of them rarely meet on a row."""


def holder_of(user: int, team: int | None) -> tuple[Holder, int]:
    return ("user", user) if team is None else ("team", team)


def count(held: Sequence[tuple[Holder, int, str]]) -> Operation[None]:
    """(kind, id, sha256) of artifacts that are there; those counted before are not counted again."""
    if not held:
        return
    new = yield Statement(
        "INSERT INTO stored (kind, id, sha256) SELECT h.kind, h.id, h.sha256 FROM {held} AS h "
        "JOIN artifacts a ON a.sha256 = h.sha256 WHERE true "
        "ON CONFLICT (kind, id, sha256) DO NOTHING RETURNING kind, id, sha256",
        {},
        {"held": Relation(HELD, sorted(set(held)))},
    )
    if not new:
        return
    sizes = yield Statement(
        "SELECT a.sha256, a.size_bytes FROM {new} AS n JOIN artifacts a ON a.sha256 = n.name",
        {},
        {"new": of_names(row[2] for row in new)},
    )
    yield from _change(new, dict(sizes))


def uncount(sizes: Mapping[str, int]) -> Operation[None]:
    """These artifacts are gone, for everybody."""
    old = yield Statement(
        "DELETE FROM stored WHERE sha256 IN (SELECT name FROM {gone} AS g) RETURNING kind, id, sha256",
        {},
        {"gone": of_names(sizes)},
    )
    if old:
        yield from _change(old, {sha256: -size for sha256, size in sizes.items()})


def _change(rows: Sequence[tuple[str, int, str]], sizes: Mapping[str, int]) -> Operation[None]:
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
