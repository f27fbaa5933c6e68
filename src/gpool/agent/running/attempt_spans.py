"""Spans of attempts whose submission was traced. Where the agent exports no traces, the context passes on unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gpool.observability.context import current_fields
from gpool.observability.ecs import span_attributes
from gpool.observability.trace_context import SANDBOX_VARIABLE, TraceContext
from gpool.observability.tracing import OpenSpan, SpanRole, Tracing


@dataclass(slots=True)
class AttemptSpan:
    """`failure` is empty once the part succeeded."""

    context: TraceContext | None
    failure: str = ""

    @property
    def variables(self) -> tuple[tuple[str, str], ...]:
        """Variables with which a program in the sandbox continues the trace."""
        return () if self.context is None else ((SANDBOX_VARIABLE, self.context.header),)


@contextmanager
def attempt_span(
    tracing: Tracing | None, name: str, role: SpanRole, parent: TraceContext | None
) -> Iterator[AttemptSpan]:
    begun = begin_span(tracing, name, role, parent)
    if begun is None:
        yield AttemptSpan(parent)
        return
    found = AttemptSpan(begun.context, "ended by the agent")
    try:
        yield found
    finally:
        begun.end(found.failure)


def begin_span(
    tracing: Tracing | None,
    name: str,
    role: SpanRole,
    parent: TraceContext | None,
    **fields: object,
) -> OpenSpan | None:
    """Begin a span with the fields of the work at hand and these; None without a sampled parent or without `tracing`."""
    if tracing is None or parent is None or not parent.is_sampled:
        return None
    return tracing.begin(name, role, parent, span_attributes({**current_fields(), **fields}))
