"""Operations that can be run again: after a rollback of its group, an operation starts over from its first step."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import wraps
from inspect import GEN_CREATED, getgeneratorstate, isgenerator
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

from gpool.core.errors import InternalFault
from gpool.server.store.protocol import Operation, Statement

T = TypeVar("T")
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
