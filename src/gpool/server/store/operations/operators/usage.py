"""What users and teams had lately, kept for the next scheduler. It knows neither shares nor half-lives: `fair_share` does."""

from __future__ import annotations

from collections.abc import Mapping

from gpool.core.model import Instant
from gpool.server.store.operation import operation
from gpool.server.store.protocol import Operation, Relation, Statement

COLUMNS = (("kind", "text"), ("id", "int"), ("value", "int"))


@operation
def usage() -> Operation[dict[tuple[str, int], tuple[int, Instant]]]:
    """By kind and id: the value, and as of when."""
    rows = yield Statement("SELECT kind, id, value, at FROM usage")
    return {(kind, id_): (value, Instant(at)) for kind, id_, value, at in rows}


@operation
def put_usage(values: Mapping[tuple[str, int], int], at: Instant) -> Operation[None]:
    """A value that was told later stays: another scheduler may have taken over."""
    rows = [(kind, id_, value) for (kind, id_), value in sorted(values.items())]
    yield Statement(
        "INSERT INTO usage (kind, id, value, at) SELECT t.kind, t.id, t.value, :at FROM {told} AS t WHERE true "
        "ON CONFLICT (kind, id) DO UPDATE SET value = excluded.value, at = excluded.at "
        "WHERE usage.at < excluded.at",
        {"at": at},
        {"told": Relation(COLUMNS, rows)},
    )


@operation
def forget_usage(before: Instant) -> Operation[None]:
    """What was told so long ago that nothing is left of it."""
    yield Statement("DELETE FROM usage WHERE at < :before", {"before": before})
