"""Interface of the store: statements, the `Store` protocol, and operations that can be run again after a rollback.
Depends on no driver.

An operation is a generator that yields statements and is sent their rows, all in one transaction. Written once, it is
driven by a thread over SQLite, by asyncpg over PostgreSQL, step by step in the World.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from inspect import GEN_CREATED, getgeneratorstate, isgenerator
from types import TracebackType
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from gpool.core.errors import InternalFault

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
    plain_insert: str = ""
    """SQL with a `?` for each column that does the same for one row of the only relation; SQLite runs it for each row."""


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


P = ParamSpec("P")

BRIEF_ROWS = 8


class Replayable(Generator[Statement, object, T], Generic[T]):
    __slots__ = ("_make", "_running", "is_brief")

    def __init__(self, make: Callable[[], Operation[T]]) -> None:
        self._make = make
        self._running: Operation[T] | None = None
        self.is_brief = False

    def fresh(self) -> Operation[T]:
        return self._make()

    def send(self, value: Any, /) -> Statement:
        if self._running is None:
            self._running = self._make()
        return self._running.send(value)

    def throw(self, typ: Any, val: Any = None, tb: TracebackType | None = None, /) -> Statement:
        if self._running is None:
            self._running = self._make()
        error = typ if isinstance(typ, BaseException) else (val or typ())
        return self._running.throw(error.with_traceback(tb or error.__traceback__))

    def close(self) -> None:
        if self._running is not None:
            self._running.close()


def operation(function: Callable[P, Operation[T]]) -> Callable[P, Operation[T]]:
    """Mark a generator function as an operation: its only effects are its statements, so it may run more than once."""

    @wraps(function)
    def made(*args: P.args, **kwargs: P.kwargs) -> Operation[T]:
        return Replayable(lambda: function(*args, **kwargs))

    return made


def brief(op: Operation[T], rows: int = 1) -> Operation[T]:
    """Mark an operation that finds its few `rows` by key. A store may then run it in the event loop's thread.

    Up to `BRIEF_ROWS` rows, passing it to a thread and back takes longer than running it.
    """
    if rows <= BRIEF_ROWS and isinstance(op, Replayable):
        op.is_brief = True
    return op


def is_brief(op: Operation[T]) -> bool:
    return isinstance(op, Replayable) and op.is_brief


def again(op: Operation[T]) -> Operation[T]:
    """Fresh run of the operation. A bare generator that has run raises: it would look done."""
    if isinstance(op, Replayable):
        return op.fresh()
    if isgenerator(op) and getgeneratorstate(op) != GEN_CREATED:
        raise InternalFault("an operation without @operation cannot be run again; mark it")
    return op
