"""Typed results of statements. Operations read rows through these functions, never by position.

A row type is a NamedTuple: generated from the schema (`generated_rows`), or beside its query.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar, cast

from gpool.core.errors import InternalFault
from gpool.server.store.protocol import Operation, Parameters, Relations, Statement

R = TypeVar("R", bound=NamedTuple)
S = TypeVar("S", bound=NamedTuple)
V = TypeVar("V")
NONE: Mapping[str, Any] = {}

_new = cast("Any", tuple.__new__)
"""Faster than `_make`, which checks the width of every row: here the first row's is checked."""


def select(
    row: type[R], sql: str, parameters: Parameters = NONE, relations: Relations = NONE
) -> Operation[list[R]]:
    rows = yield Statement(sql, parameters, relations)
    assert isinstance(rows, list)
    if rows and len(rows[0]) != len(row._fields):
        raise InternalFault(f"a statement returned {len(rows[0])} columns for {row.__name__}")
    return list(map(partial(_new, row), rows))


def select_pairs(
    first: type[R],
    second: type[S],
    sql: str,
    parameters: Parameters = NONE,
    relations: Relations = NONE,
) -> Operation[list[tuple[R, S]]]:
    rows = yield Statement(sql, parameters, relations)
    assert isinstance(rows, list)
    width = len(first._fields)
    if rows and len(rows[0]) != width + len(second._fields):
        names = f"{first.__name__} and {second.__name__}"
        raise InternalFault(f"a statement returned {len(rows[0])} columns for {names}")
    return [(_new(first, row[:width]), _new(second, row[width:])) for row in rows]


def values(
    kind: type[V],  # noqa: ARG001 - names the result's type
    sql: str,
    parameters: Parameters = NONE,
    relations: Relations = NONE,
) -> Operation[list[V]]:
    rows = yield Statement(sql, parameters, relations)
    assert isinstance(rows, list)
    return [value for (value,) in rows]


def exists(sql: str, parameters: Parameters = NONE, relations: Relations = NONE) -> Operation[bool]:
    return bool((yield Statement(sql, parameters, relations)))


def columns(row: type[NamedTuple], record: type[NamedTuple], alias: str) -> str:
    """Columns of one table as SQL, for a row type with some or all of them.

    Raises at import where a field is not a column of that type, so a row type cannot differ from the schema. A field may
    leave out `| None` where the query selects no NULL.
    """
    for name in row._fields:
        wanted, there = _type(row, name), _type(record, name)
        if wanted not in (there, there.removesuffix(" | None")):
            raise InternalFault(f"{row.__name__}.{name} is {wanted}; {record.__name__} has {there}")
    return ", ".join(f"{alias}.{name}" for name in row._fields)


@lru_cache(maxsize=64)
def relation_columns(row: type[NamedTuple]) -> tuple[tuple[str, str], ...]:
    kinds = {"str": "text", "bytes": "blob"}
    return tuple(
        (name, kinds.get(_type(row, name).removesuffix(" | None"), "int")) for name in row._fields
    )


def _type(row: type[NamedTuple], name: str) -> str:
    found = row.__annotations__.get(name, "no such column")
    return str(getattr(found, "__forward_arg__", found))
