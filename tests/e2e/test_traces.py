"""One trace from the SDK's call through server and agent into the sandbox, exported to a stub of a collector."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path

from tests.tools.collector import CollectedSpan, SpanCollector, span_collector
from tests.tools.processes import LONG_LEASE, PATIENCE_S, Pool, eventually

PROGRAM = """
import os, gpool
@gpool.task
def context():
    return os.environ.get("TRACEPARENT", "")
@gpool.task
def fails(secret):
    raise ValueError(secret)
client = gpool.Client()
print(context.remote())
done = client.run(["sh", "-c", "echo $TRACEPARENT"], secrets={"HF_TOKEN": SECRET})
print(done.stdout.strip())
try:
    fails.remote("password=" + SECRET)
except ValueError:
    pass
"""


def run_program(pool: Pool, folder: Path, secret: str) -> list[str]:
    file = folder / "program.py"
    file.write_text(f"SECRET = {secret!r}\n{PROGRAM}")
    ran = pool.script(file, folder)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def path_to_root(collector: SpanCollector, span: CollectedSpan) -> list[tuple[str, str]]:
    by_id = {each.span_id: each for each in collector.spans}
    path = [(span.service, span.name)]
    while span.parent_id:
        span = by_id[span.parent_id]
        path.append((span.service, span.name))
    return path


def test_one_trace_connects_the_call_with_its_sandbox(
    tmp_path: Path, require: Callable[[str], None]
) -> None:
    require("bubblewrap")
    require("opentelemetry")
    secret = f"planted{secrets.token_hex(16)}"
    with span_collector() as collector:
        settings = {
            **LONG_LEASE,
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "GPOOL_SERVER_LOG_FORMAT": "json",
            "GPOOL_SERVER_LOG_LEVEL": "debug",
            "GPOOL_AGENT_LOG_FORMAT": "json",
            "GPOOL_AGENT_LOG_LEVEL": "debug",
        }
        with Pool(tmp_path / "pool", settings) as pool:
            seen = run_program(pool, tmp_path, secret)
            eventually(
                "the spans of both sandboxes are exported",
                lambda: {"gpool.call", "gpool.sandbox"} <= {each.name for each in collector.spans},
                PATIENCE_S,
            )
            agent_log = pool.directory / "first.log"
        spans = {each.span_id: each for each in collector.spans}
        for header, path in zip(
            seen,
            (
                [("gpool-agent", "gpool.call")],
                [("gpool-agent", "gpool.sandbox"), ("gpool-agent", "gpool.task")],
            ),
            strict=True,
        ):
            _, trace_id, span_id, flags = header.split("-")
            inner = spans[span_id]  # the span that the program in the sandbox continues
            assert inner.trace_id == trace_id
            assert int(flags, 16) & 1  # sampled
            assert path_to_root(collector, inner) == [
                *path,
                ("gpool-server", "POST /v1/tasks"),
                ("gpool-client", "gpool POST"),
            ]
            assert str(inner.attributes["gpool.task.id"]).startswith("t-")
            assert inner.failure == ""
        # The agent's log lines name the trace too.
        traces = {spans[header.split("-")[2]].trace_id for header in seen}
        logged = {json.loads(line).get("trace.id") for line in agent_log.read_text().splitlines()}
        assert traces & logged
        assert any(
            each.failure == "raised" for each in collector.spans if each.name == "gpool.call"
        )
        assert secret.encode() not in collector.raw
        assert b"/v1/tasks" in collector.raw  # control


def test_a_context_passes_through_a_pool_that_exports_nothing(
    tmp_path: Path, pool: Pool, require: Callable[[str], None]
) -> None:
    require("opentelemetry")
    program = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
trace.set_tracer_provider(TracerProvider())
import os, gpool
@gpool.task
def context():
    return os.environ.get("TRACEPARENT", "")
@gpool.task
def large(data):
    return os.environ.get("TRACEPARENT", "") if len(data) == 300_000 else "cut"
print(repr(context.remote()))
with trace.get_tracer("mine").start_as_current_span("my work") as span:
    print(context.remote(), f"{span.get_span_context().span_id:016x}", large.remote(b"x" * 300_000))
print(repr(context.remote()))
"""
    file = tmp_path / "program.py"
    file.write_text(program)
    ran = pool.script(file, tmp_path)
    assert ran.returncode == 0, ran.stderr
    before, within, after = ran.stdout.splitlines()
    header, span, of_large_arguments = within.split()
    assert header.split("-")[2] == of_large_arguments.split("-")[2] == span
    assert before == after == "''"  # the call before and after it have none
