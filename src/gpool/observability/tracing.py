"""Spans around work, exported if an OTLP endpoint is configured and the extra `otel` is installed; else None.

Callers keep the `Tracing` they were given and test it for None, so that untraced work costs one comparison.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from enum import Enum, auto
from importlib import import_module
from typing import Protocol

from gpool.observability.redaction import Redactor
from gpool.observability.trace_context import TraceContext

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""OpenTelemetry's own variables; one of them switches traces on."""

NOT_INSTALLED = "traces are not exported: install OpenTelemetry with: pip install 'gpool[otel]'"

Attributes = Mapping[str, str | int | bool]


class SpanRole(Enum):
    """The span kinds of OpenTelemetry."""

    CLIENT = auto()
    SERVER = auto()
    CONSUMER = auto()
    INTERNAL = auto()


class OpenSpan(Protocol):
    @property
    def context(self) -> TraceContext: ...

    def set(self, name: str, value: str | int | bool) -> None: ...

    def end(self, failure: str = "") -> None:
        """End now; a failure's text marks the span as failed."""
        ...


class Tracing(Protocol):
    def begin(
        self,
        name: str,
        role: SpanRole,
        parent: TraceContext | None,
        attributes: Attributes,
    ) -> OpenSpan:
        """Start a span beneath `parent`; without one, in a new trace."""
        ...

    def close(self) -> None:
        """Export what is left, for a few seconds at most."""
        ...


def ambient_trace() -> TraceContext | None:
    """The application's own current span, if it uses OpenTelemetry."""
    module = sys.modules.get("opentelemetry.trace")
    if module is None:
        return None
    found = module.get_current_span().get_span_context()
    if not found.is_valid:
        return None
    return TraceContext(f"{found.trace_id:032x}", f"{found.span_id:016x}", int(found.trace_flags))


def is_requested() -> bool:
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    return any(os.environ.get(name) for name in ENDPOINTS)


def open_tracing(service: str, version: str, redactor: Redactor) -> Tracing | None:
    """None if traces are not requested. `ImportError` if they are and OpenTelemetry is not installed."""
    if not is_requested():
        return None
    tracing: Tracing = import_module("gpool.observability.otel").OtelTracing(
        service, version, redactor
    )
    return tracing
