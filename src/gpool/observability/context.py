"""The work at hand of a thread or asyncio task, for the fields of its log lines. Holds a reference; computes nothing.

A line asks for the fields when it is written, so that work without log lines costs one context variable.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from gpool.observability.trace_context import TraceContext

REQUEST_ID = "X-Request-Id"
"""Header of requests and responses."""
WORK = "gpool.request_work"
"""Key of a request's scope under which its `Work` is kept."""


class Work(Protocol):
    @property
    def trace(self) -> TraceContext | None:
        """The span that this work belongs to."""
        ...

    def log_fields(self) -> Mapping[str, object]:
        """Names of `ecs.NAMED` with their values."""
        ...


_work: ContextVar[Work | None] = ContextVar("gpool_work", default=None)


def begin_work(work: Work) -> None:
    """For the rest of this asyncio task or thread, and those it starts."""
    _work.set(work)


class AtWork:  # a generator would cost a microsecond more in each request
    """Work at hand within the block."""

    __slots__ = ("_token", "_work")

    def __init__(self, work: Work) -> None:
        self._work = work

    def __enter__(self) -> None:
        self._token = _work.set(self._work)

    def __exit__(self, *_: object) -> None:
        _work.reset(self._token)


def current_trace() -> TraceContext | None:
    work = _work.get()
    return None if work is None else work.trace


def current_fields() -> Mapping[str, object]:
    work = _work.get()
    return {} if work is None else work.log_fields()


@dataclass(frozen=True, slots=True)
class NamedWork:
    """Work whose fields are known at its start."""

    fields: Mapping[str, object]
    trace: TraceContext | None = None

    def log_fields(self) -> Mapping[str, object]:
        return self.fields


def begin_part(trace: TraceContext | None = None, **fields: object) -> None:
    """Add fields to those of the work at hand, for the rest of this asyncio task and those it starts."""
    traced = {} if trace is None else {"trace": trace.trace_id, "span": trace.span_id}
    _work.set(NamedWork({**current_fields(), **fields, **traced}, trace))
