"""For each alert rule, series with which it fires and series with which it is quiet.

`python -m tests.tools.alert_cases` prints deploy/monitoring/rules_test.yml for `promtool test rules`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from gpool.server.alerts.evaluation import AlertEvaluator
from gpool.server.alerts.rules import RULES, RUNBOOK, AlertRule
from gpool.server.alerts.samples import Labels, Sample

EVERY_S = 60
"""Interval of the samples and of the evaluation in the cases: a quarter of the work of the real one."""
STEPS = 40
"""Samples of each series."""
JOB = '{instance="a",job="gpool"}'
BY_NAME: Mapping[str, AlertRule] = {rule.name: rule for rule in RULES}


@dataclass(frozen=True, slots=True)
class Line:
    """Series that grows by `step` a minute from `start` on."""

    start: float
    step: float = 0.0

    def values(self) -> list[float]:
        return [self.start + self.step * number for number in range(STEPS + 1)]


Given = Mapping[str, Line]


@dataclass(frozen=True, slots=True)
class AlertCase:
    alert: str
    fires: Given
    quiet: Given
    labels: Mapping[str, str]  # of the alert that fires, without the severity


def series_of(name: str, **labels: str) -> str:
    inner = ",".join(f'{label}="{value}"' for label, value in sorted({**_HERE, **labels}.items()))
    return f"{name}{{{inner}}}"


_HERE = {"instance": "a", "job": "gpool"}


def _per_s(rate: float) -> Line:
    return Line(0.0, rate * EVERY_S)


def _histogram(name: str, fast_per_s: float, slow_per_s: float, le: str, **labels: str) -> Given:
    """Observations up to the bound `le`, and beyond it but below 10 (or 2.5) seconds."""
    top = "10" if "http" in name else "2.5"
    return {
        series_of(f"{name}_bucket", le=le, **labels): _per_s(fast_per_s),
        series_of(f"{name}_bucket", le=top, **labels): _per_s(fast_per_s + slow_per_s),
        series_of(f"{name}_bucket", le="+Inf", **labels): _per_s(fast_per_s + slow_per_s),
    }


def _requests(**per_s: float) -> Given:
    names = {status.lstrip("_"): rate for status, rate in per_s.items()}
    return {
        series_of("gpool_http_requests_total", route="/v1/tasks", method="POST", status=status): (
            _per_s(rate)
        )
        for status, rate in names.items()
    }


def _one(name: str, fires: Line, quiet: Line, **labels: str) -> tuple[Given, Given]:
    series = series_of(name, **labels)
    return {series: fires}, {series: quiet}


def _case(
    alert: str, given: tuple[Given, Given], labels: Mapping[str, str] | None = None
) -> AlertCase:
    return AlertCase(alert, given[0], given[1], labels or {})


def _ratio(top: str, below: str, fires: float, quiet: float) -> tuple[Given, Given]:
    pair = (series_of(top), series_of(below))
    return (
        {pair[0]: Line(fires * 1000), pair[1]: Line(1000)},
        {pair[0]: Line(quiet * 1000), pair[1]: Line(1000)},
    )


def _ended(failed: float, succeeded: float) -> Given:
    name = "gpool_tasks_ended_total"
    return {
        series_of(name, status="failed"): _per_s(failed),
        series_of(name, status="succeeded"): _per_s(succeeded),
    }


def _stalled(passes_per_s: float, queued: float) -> Given:
    return {
        series_of("gpool_scheduling_pass_seconds_count"): _per_s(passes_per_s),
        series_of("gpool_tasks_queued"): Line(queued),
    }


def _room(waiting: float, granted_per_s: float) -> Given:
    return {
        series_of("gpool_queue_tasks", reason="next"): Line(waiting),
        series_of("gpool_leases_granted_total"): _per_s(granted_per_s),
    }


def _starts(failed: float, granted: float) -> Given:
    return {
        series_of("gpool_sandbox_failed_starts_total", fault="node"): _per_s(failed),
        series_of("gpool_leases_granted_total"): _per_s(granted),
    }


def _nodes(opened: float, gone: float) -> Given:
    return {
        series_of("gpool_nodes", state="open"): Line(opened),
        series_of("gpool_nodes", state="disconnected"): Line(gone),
    }


CASES: Sequence[AlertCase] = (
    _case("GpoolServerDown", _one("up", Line(0), Line(1)), _HERE),
    _case("GpoolNoLeader", _one("gpool_leader", Line(0), Line(1))),
    _case("GpoolRequestErrors", (_requests(_200=10, _500=0.2), _requests(_200=10, _500=0.05))),
    _case(
        "GpoolRequestsSlow",
        (
            _histogram("gpool_http_request_seconds", 10, 1, "1", route="/v1/tasks"),
            _histogram("gpool_http_request_seconds", 10, 1, "1", route="/v1/artifacts/{sha256}"),
        ),
    ),
    _case("GpoolRequestsRefused", (_requests(_200=10, _429=2), _requests(_200=10, _429=0.5))),
    _case(
        "GpoolOverloaded",
        _one("gpool_requests_shed_total", _per_s(1), Line(5), **{"class": "listing"}),
    ),
    _case("GpoolSchedulerStalled", (_stalled(0, 5), _stalled(1, 5))),
    _case("GpoolStartsDelayed", (_room(3, 0), _room(3, 1))),
    _case(
        "GpoolPassesSlow",
        (
            _histogram("gpool_scheduling_pass_seconds", 1, 0.1, "1"),
            _histogram("gpool_scheduling_pass_seconds", 1, 0.001, "1"),
        ),
    ),
    _case(
        "GpoolTasksUnplaceable",
        (
            {series_of("gpool_queue_tasks", reason="no_such_gpu"): Line(1)},
            {series_of("gpool_queue_tasks", reason="gpus_busy"): Line(1)},
        ),
    ),
    _case("GpoolQueueOld", _one("gpool_queue_older_tasks", Line(2), Line(0), seconds="3600")),
    _case("GpoolNodesLost", _one("gpool_nodes_lost_total", Line(0, 0.5), Line(0, 0.05))),
    _case("GpoolNodesDisconnected", (_nodes(4, 6), _nodes(6, 4))),
    _case("GpoolHeartbeatsLate", _one("gpool_heartbeat_oldest_seconds", Line(25), Line(9))),
    _case(
        "GpoolTasksLost",
        _one("gpool_tasks_requeued_total", Line(0, 1), Line(0, 0.1), reason="lost"),
    ),
    _case("GpoolTasksFail", (_ended(2, 1), _ended(1, 2))),
    _case("GpoolSandboxStartsFail", (_starts(0.2, 1), _starts(0.05, 1))),
    _case(
        "GpoolGpuUnhealthy",
        _one("gpool_gpu_health", Line(2), Line(1), node="nd-1", gpu="0", model="H200"),
        {"node": "nd-1", "gpu": "0"},
    ),
    _case(
        "GpoolStoreFaults",
        _one("gpool_store_faults_total", Line(0, 1), Line(7), kind="unreachable"),
    ),
    _case(
        "GpoolStoreSlow",
        (
            _histogram("gpool_store_commit_seconds", 10, 1, "0.5"),
            _histogram("gpool_store_commit_seconds", 10, 0.01, "0.5"),
        ),
    ),
    _case("GpoolFeedLag", _one("gpool_store_feed_lag_seconds", Line(15), Line(1)), _HERE),
    _case(
        "GpoolLoopBlocked",
        (
            _histogram("gpool_loop_lag_seconds", 2, 0.2, "0.25"),
            _histogram("gpool_loop_lag_seconds", 2, 0.002, "0.25"),
        ),
    ),
    _case(
        "GpoolBackgroundFaults",
        _one("gpool_loop_faults_total", Line(0, 0.5), Line(0, 0.05), loop="prune"),
    ),
    _case(
        "GpoolMemoryHigh",
        _ratio("process_resident_memory_bytes", "gpool_memory_limit_bytes", 0.9, 0.5),
        _HERE,
    ),
    _case("GpoolDescriptorsLow", _ratio("process_open_fds", "process_max_fds", 0.9, 0.5), _HERE),
    _case(
        "GpoolDiskLow", _ratio("gpool_disk_free_bytes", "gpool_disk_reserved_bytes", 1.5, 3), _HERE
    ),
)

Instants = Mapping[int, Sequence[Labels]]
"""By minute: labels of the alerts of one rule that fire then, without the severity."""


def promtool_test(
    name: str,
    values: Mapping[str, Sequence[float]],
    expected: Mapping[str, Instants],
    every_s: int = EVERY_S,
) -> list[str]:
    """One test of a promtool file: its series, and the alerts that fire at the given minutes."""
    lines = [f"  - name: {json.dumps(name)}", f"    interval: {every_s}s", "    input_series:"]
    for series, points in values.items():
        lines.append(f"      - series: {json.dumps(series)}")
        lines.append(f'        values: "{_notation(points)}"')
    lines.append("    alert_rule_test:")
    for alert, instants in expected.items():
        rule = BY_NAME[alert]
        for minute, found in instants.items():
            lines += [f"      - eval_time: {minute}m", f"        alertname: {alert}"]
            if not found:
                lines.append("        exp_alerts: []")
                continue
            lines.append("        exp_alerts:")
            for labels in found:
                shown = {**dict(labels), "severity": rule.severity.value}
                notes = {"summary": rule.summary, "runbook_url": f"{RUNBOOK}#{rule.runbook}"}
                lines.append(f"          - exp_labels: {json.dumps(shown, sort_keys=True)}")
                lines.append(f"            exp_annotations: {json.dumps(notes)}")
    return lines


def _notation(points: Sequence[float]) -> str:
    steps = {after - before for before, after in pairwise(points)}
    if len(steps) == 1 or max(steps) - min(steps) < 1e-9:
        step = (points[-1] - points[0]) / (len(points) - 1)
        return f"{points[0]:g}+{step:g}x{len(points) - 1}"
    return " ".join(repr(point) for point in points)


def promtool_file(tests: Iterable[Sequence[str]], every_s: int = EVERY_S) -> str:
    head = ["rule_files: [rules.yml]", f"evaluation_interval: {every_s}s", "tests:"]
    return "\n".join([*head, *(line for test in tests for line in test)]) + "\n"


_SERIES = re.compile(r"([a-z_]+)\{(.*)\}")
_LABEL = re.compile(r'([a-z]+)="([^"]*)"')


def evaluated(
    values: Mapping[str, Sequence[float]], every_s: int = EVERY_S
) -> dict[str, dict[int, list[Labels]]]:
    """Alerts that the server's own evaluation finds firing over the series, by rule and whole minute."""
    evaluator = AlertEvaluator([replace(rule, is_own=True) for rule in RULES])
    parsed = []
    for series, points in values.items():
        found = _SERIES.fullmatch(series)
        assert found is not None, series
        parsed.append((found[1], dict(_LABEL.findall(found[2])), points))
    firing: dict[str, dict[int, list[Labels]]] = {rule.name: {} for rule in RULES}
    for step in range(max(len(points) for _, _, points in parsed)):
        at_s = step * every_s
        evaluator.evaluate(at_s, [Sample(name, labels, p[step]) for name, labels, p in parsed])
        if at_s % 60 == 0:
            for rule in RULES:
                firing[rule.name][at_s // 60] = [
                    alert.labels for alert in evaluator.firing if alert.rule.name == rule.name
                ]
    return firing


LAST = STEPS * EVERY_S // 60


def committed_file() -> str:
    tests = []
    for case in CASES:
        rule = BY_NAME[case.alert]
        for word, given, found in (
            ("fires", case.fires, [tuple(sorted(case.labels.items()))]),
            ("is quiet", case.quiet, []),
        ):
            values = {series: line.values() for series, line in given.items()}
            tests.append(promtool_test(f"{rule.name} {word}", values, {rule.name: {LAST: found}}))
    note = "# Generated by `make docs` from tests/tools/alert_cases.py; do not edit.\n"
    return note + promtool_file(tests)


if __name__ == "__main__":
    sys.stdout.write(committed_file())
