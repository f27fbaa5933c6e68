"""The store's door. An operation is a generator that yields statements and is sent their rows.

Written once, an operation is driven by a thread over SQLite, by asyncpg over PostgreSQL, and step by step in the
World: build and read are pure, the drivers only carry. Everything an operation does is one transaction, or part of a
larger one: `write` hands it to the one writer, which commits many at once and answers each after the commit.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """Rows bound as a table named in the statement as `{name}`: set-based writes without a statement a row."""

    columns: tuple[tuple[str, str], ...]  # (name, "int" | "text" | "blob")
    rows: Sequence[Row]


@dataclass(frozen=True, slots=True)
class Statement:
    """SQL that both databases understand, `:name` parameters, and relations as `{name}`."""

    sql: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    relations: Mapping[str, Relation] = field(default_factory=dict)


Operation = Generator[Statement, list[Row], T]


class Store(Protocol):
    async def write(self, operation: Operation[T]) -> T:
        """Runs in the next group; returns after its commit. An exception fails only this operation."""
        ...

    async def read(self, operation: Operation[T]) -> T:
        """Runs on a reader's connection, in one snapshot."""
        ...

    async def close(self) -> None: ...
