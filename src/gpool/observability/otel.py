"""`tracing` by OpenTelemetry's SDK: spans are batched and sent as OTLP over HTTP from a thread. Needs the extra `otel`.

Uses a provider of its own and leaves the global one to the application.
"""

from __future__ import annotations

import os

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from gpool.observability.redaction import REDACTED, Redactor, is_secret_name
from gpool.observability.trace_context import TraceContext
from gpool.observability.tracing import Attributes, SpanRole

_KINDS = {
    SpanRole.CLIENT: SpanKind.CLIENT,
    SpanRole.SERVER: SpanKind.SERVER,
    SpanRole.CONSUMER: SpanKind.CONSUMER,
    SpanRole.INTERNAL: SpanKind.INTERNAL,
}


class OtelSpan:
    def __init__(self, span: Span, redactor: Redactor) -> None:
        self._span, self._redactor = span, redactor
        found = span.get_span_context()
        self.context = TraceContext(
            f"{found.trace_id:032x}", f"{found.span_id:016x}", int(found.trace_flags)
        )

    def set(self, name: str, value: str | int | bool) -> None:
        if self._span.is_recording():
            self._span.set_attribute(name, self._shown(name, value))

    def end(self, failure: str = "") -> None:
        if failure and self._span.is_recording():
            self._span.set_status(Status(StatusCode.ERROR, self._redactor.text(failure)))
        self._span.end()

    def _shown(self, name: str, value: str | int | bool) -> str | int | bool:
        if is_secret_name(name.rpartition(".")[2]):
            return REDACTED
        return self._redactor.text(value) if isinstance(value, str) else value


class OtelTracing:
    def __init__(self, service: str, version: str, redactor: Redactor) -> None:
        named = os.environ.get("OTEL_SERVICE_NAME", service)
        resource = Resource.create({"service.name": named, "service.version": version})
        self._redactor = redactor
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("gpool", version)

    def begin(
        self,
        name: str,
        role: SpanRole,
        parent: TraceContext | None,
        attributes: Attributes,
    ) -> OtelSpan:
        above = None
        if parent is not None:
            remote = SpanContext(
                int(parent.trace_id, 16),
                int(parent.span_id, 16),
                is_remote=True,
                trace_flags=TraceFlags(parent.flags),
            )
            above = set_span_in_context(NonRecordingSpan(remote))
        started = self._tracer.start_span(name, above, _KINDS[role])
        span = OtelSpan(started, self._redactor)
        for key, value in attributes.items():
            span.set(key, value)
        return span

    def close(self) -> None:
        self._provider.shutdown()
