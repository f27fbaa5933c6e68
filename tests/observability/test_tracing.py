"""Trace contexts as W3C defines them; OpenTelemetry is loaded only on request."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.observability.trace_context import TraceContext

IDS = st.integers(min_value=1)


@given(IDS.filter(lambda n: n < 1 << 128), IDS.filter(lambda n: n < 1 << 64), st.integers(0, 255))
def test_a_context_is_read_as_it_was_written(trace: int, span: int, flags: int) -> None:
    context = TraceContext(f"{trace:032x}", f"{span:016x}", flags)
    assert TraceContext.parse(context.header) == context
    assert context.is_sampled == bool(flags & 1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
        "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
        "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\n",
    ],
)
def test_an_invalid_context_is_none(text: str) -> None:
    assert TraceContext.parse(text) is None


LOADED = """
import logging, sys
import gpool.client.transport as transport
made = transport.ApiTransport("http://127.0.0.1:1", "")
print(made._tracing is not None, "opentelemetry.sdk" in sys.modules)
"""
BLOCKED = 'import sys; sys.modules["opentelemetry"] = None\n'
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("program", "variables", "told", "warned"),
    [
        (LOADED, {}, "False False", False),
        (LOADED, ENDPOINT, "True True", False),
        (LOADED, {**ENDPOINT, "OTEL_SDK_DISABLED": "true"}, "False False", False),
        (BLOCKED + LOADED, ENDPOINT, "False False", True),
    ],
)
def test_opentelemetry_is_loaded_if_an_endpoint_is_set(
    program: str, variables: dict[str, str], told: str, warned: bool
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == told
    assert ("gpool[otel]" in done.stderr) is warned
