"""Interface of the store: statements, operations and the `Store` protocol. Depends on no database driver.

An operation is a generator that yields statements and is sent their rows, all in one transaction. Written once, it is
driven by a thread over SQLite, by asyncpg over PostgreSQL, step by step in the World.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Row = tuple[Any, ...]
"""A row bound in a relation, or as a driver returns it. Operations read typed rows instead (`queries`)."""

Parameters = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Relation:
    """Rows bound as a table, `{name}` in the statement: one statement writes or looks up many rows."""

    columns: tuple[tuple[str, str], ...]  # (name, "int" | "text" | "blob")
    rows: Sequence[Row]


Relations = Mapping[str, Relation]


@dataclass(frozen=True, slots=True)
class Statement:
    """SQL for both databases, with `:name` parameters and relations as `{name}`."""

    sql: str
    parameters: Parameters = field(default_factory=dict)
    relations: Relations = field(default_factory=dict)


Operation = Generator[Statement, object, T]
"""The rows sent back are `object` on purpose: `queries` turns them into typed rows, and mypy rejects any other use."""


class Store(Protocol):
    async def write(self, operation: Operation[T]) -> T:
        """Run the operation in the next group; return after its commit. An exception fails this operation only."""
        ...

    async def read(self, operation: Operation[T]) -> T:
        """Run the operation on a reader's connection, in one snapshot."""
        ...

    async def close(self) -> None: ...
