"""The alert rules, one for each failure that users notice. `python -m gpool.server.alerts.rules [RUNBOOK]` prints
deploy/monitoring/rules.yml; RUNBOOK is the address of docs/runbook.md for the links. A threshold is explained there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpool.server.alerts.expressions import (
    Aggregate,
    Compared,
    CounterRate,
    Expression,
    Quantile,
    Ratio,
    Value,
    While,
    duration,
)
from gpool.server.alerts.samples import Selector
from gpool.server.metrics import catalogue
from gpool.server.metrics.catalogue import MetricKind, MetricSpec

RUNBOOK = "docs/runbook.md"
EVERY_S = 15
"""Interval of the evaluation, here and in the generated rules."""


class Severity(StrEnum):
    CRITICAL = "critical"  # users are affected: act now
    WARNING = "warning"  # users are or will be affected: act today
    INFO = "info"  # users notice, and the pool works as it should


@dataclass(frozen=True, slots=True)
class AlertRule:
    """`hold_s`: how long the condition holds before the alert fires. `is_own`: a server can evaluate it by itself."""

    name: str
    severity: Severity
    condition: Expression
    hold_s: int
    summary: str
    is_own: bool = True

    @property
    def runbook(self) -> str:
        """Anchor of its section in the runbook."""
        return self.name.lower()


def _series(spec: MetricSpec, *matchers: tuple[str, str, str], part: str = "") -> Selector:
    name = f"{spec.name}_{part}" if spec.kind is MetricKind.HISTOGRAM else spec.series[0]
    return Selector(name, matchers)


def _sum(spec: MetricSpec, *matchers: tuple[str, str, str]) -> Aggregate:
    return Aggregate("sum", Value(_series(spec, *matchers)))


def _rate(spec: MetricSpec, range_s: int, *matchers: tuple[str, str, str]) -> Aggregate:
    return Aggregate("sum", CounterRate(_series(spec, *matchers, part="count"), range_s))


def _increase(spec: MetricSpec, range_s: int, *matchers: tuple[str, str, str]) -> Aggregate:
    return Aggregate("sum", CounterRate(_series(spec, *matchers), range_s, is_total=True))


def _p99(spec: MetricSpec, range_s: int, *matchers: tuple[str, str, str]) -> Quantile:
    return Quantile(0.99, _series(spec, *matchers, part="bucket"), range_s)


def _above(found: Expression, limit: float) -> Compared:
    return Compared(found, ">", limit)


def _below(found: Expression, limit: float) -> Compared:
    return Compared(found, "<", limit)


_OURS = (
    "job",
    "=~",
    "gpool|",
)  # other jobs export these names too; without Prometheus there is no job
_TRANSFERS = ("route", "!~", "/v1/artifacts.*")  # as slow as the client's link
_IMPOSSIBLE = (
    "no_environment|no_gpu|no_label|no_network|no_python|no_runtime|no_site|no_such_gpu|no_tier|"
    "gpu_too_small|over_price|too_few_gpus|too_many_cpus|too_much_disk|too_much_memory"
)
_MINUTES = 60
_CRITICAL, _WARNING, _INFO = Severity.CRITICAL, Severity.WARNING, Severity.INFO

RULES: Sequence[AlertRule] = (
    AlertRule(
        "GpoolServerDown",
        _CRITICAL,
        _below(Value(Selector("up", (("job", "=", "gpool"),))), 1),
        60,
        "A gpool server does not answer its scrape.",
        is_own=False,
    ),
    AlertRule(
        "GpoolNoLeader",
        _CRITICAL,
        _below(_sum(catalogue.LEADER), 1),
        30,
        "No server schedules: tasks are accepted, and none starts.",
        is_own=False,  # a server that does not lead knows of no other
    ),
    AlertRule(
        "GpoolRequestErrors",
        _CRITICAL,
        _above(
            Ratio(
                _rate(catalogue.REQUESTS, 5 * _MINUTES, ("status", "=~", "5..")),
                _rate(catalogue.REQUESTS, 5 * _MINUTES),
            ),
            0.01,
        ),
        2 * _MINUTES,
        "More than 1 % of the requests fail with a server error.",
    ),
    AlertRule(
        "GpoolRequestsSlow",
        _WARNING,
        _above(_p99(catalogue.REQUEST_TIME, 5 * _MINUTES, _TRANSFERS), 1),
        5 * _MINUTES,
        "One request of a hundred takes longer than 1 s.",
    ),
    AlertRule(
        "GpoolRequestsRefused",
        _WARNING,
        _above(
            Ratio(
                _rate(catalogue.REQUESTS, 5 * _MINUTES, ("status", "=~", "429|503")),
                _rate(catalogue.REQUESTS, 5 * _MINUTES),
            ),
            0.1,
        ),
        5 * _MINUTES,
        "More than 10 % of the requests are refused by limits or overload.",
    ),
    AlertRule(
        "GpoolOverloaded",
        _WARNING,
        _above(_increase(catalogue.SHED, 5 * _MINUTES), 0),
        2 * _MINUTES,
        "A server refuses requests because it has more work than it can do in time.",
    ),
    AlertRule(
        "GpoolSchedulerStalled",
        _CRITICAL,
        While(
            _below(_rate(catalogue.PASSES, 5 * _MINUTES), 0.05),
            _above(_sum(catalogue.QUEUED), 0),
        ),
        2 * _MINUTES,
        "Tasks wait and no scheduling pass completes.",
    ),
    AlertRule(
        "GpoolStartsDelayed",
        _WARNING,
        While(
            _above(_sum(catalogue.QUEUE_REASONS, ("reason", "=", "next")), 0),
            _below(_rate(catalogue.GRANTED, 5 * _MINUTES), 0.001),
        ),
        5 * _MINUTES,
        "Tasks wait for which there is room, and no task has been started for minutes.",
    ),
    AlertRule(
        "GpoolPassesSlow",
        _WARNING,
        _above(_p99(catalogue.PASSES, 5 * _MINUTES), 1),
        5 * _MINUTES,
        "Scheduling passes take longer than 1 s, so that tasks start late.",
    ),
    AlertRule(
        "GpoolTasksUnplaceable",
        _INFO,
        _above(_sum(catalogue.QUEUE_REASONS, ("reason", "=~", _IMPOSSIBLE)), 0),
        10 * _MINUTES,
        "Tasks wait that no node of the pool could run.",
    ),
    AlertRule(
        "GpoolQueueOld",
        _INFO,
        _above(_sum(catalogue.QUEUE_OLDER, ("seconds", "=", "3600")), 0),
        15 * _MINUTES,
        "Tasks have waited for more than an hour: demand exceeds the pool.",
    ),
    AlertRule(
        "GpoolNodesLost",
        _WARNING,
        _above(_increase(catalogue.NODES_LOST, 10 * _MINUTES), 2),
        0,
        "Several nodes were lost within 10 minutes; their tasks start again elsewhere.",
    ),
    AlertRule(
        "GpoolNodesDisconnected",
        _WARNING,
        _above(
            Ratio(_sum(catalogue.NODES, ("state", "=", "disconnected")), _sum(catalogue.NODES)), 0.5
        ),
        15 * _MINUTES,
        "More than half of the pool's nodes are not connected.",
    ),
    AlertRule(
        "GpoolHeartbeatsLate",
        _WARNING,
        _above(Aggregate("max", Value(_series(catalogue.HEARTBEAT_AGE))), 20),
        _MINUTES,
        "A connected node has been silent for 20 s; after the lease time its tasks are lost.",
    ),
    AlertRule(
        "GpoolTasksLost",
        _WARNING,
        _above(_increase(catalogue.REQUEUED, 10 * _MINUTES, ("reason", "=", "lost")), 5),
        0,
        "Running tasks lost their node and start again.",
    ),
    AlertRule(
        "GpoolTasksFail",
        _WARNING,
        While(
            _above(
                Ratio(
                    _rate(catalogue.ENDED, 15 * _MINUTES, ("status", "=", "failed")),
                    _rate(catalogue.ENDED, 15 * _MINUTES),
                ),
                0.5,
            ),
            _above(_rate(catalogue.ENDED, 15 * _MINUTES), 0.05),
        ),
        15 * _MINUTES,
        "More than half of the tasks fail.",
    ),
    AlertRule(
        "GpoolSandboxStartsFail",
        _WARNING,
        _above(
            Ratio(
                _rate(catalogue.FAILED_STARTS, 10 * _MINUTES),
                _rate(catalogue.GRANTED, 10 * _MINUTES),
            ),
            0.1,
        ),
        5 * _MINUTES,
        "More than 10 % of the starts fail on their nodes.",
    ),
    AlertRule(
        "GpoolGpuUnhealthy",
        _WARNING,
        _above(Aggregate("max", Value(_series(catalogue.GPU_HEALTH)), ("node", "gpu")), 1),
        5 * _MINUTES,
        "A GPU is in quarantine and takes no tasks.",
    ),
    AlertRule(
        "GpoolStoreFaults",
        _CRITICAL,
        _above(_increase(catalogue.STORE_FAULTS, 5 * _MINUTES), 0),
        _MINUTES,
        "The database refuses or does not answer: submissions and results fail.",
    ),
    AlertRule(
        "GpoolStoreSlow",
        _WARNING,
        _above(_p99(catalogue.COMMIT_TIME, 5 * _MINUTES), 0.5),
        5 * _MINUTES,
        "Commits take longer than 0.5 s: everything that is stored is slow.",
    ),
    AlertRule(
        "GpoolFeedLag",
        _WARNING,
        _above(Value(_series(catalogue.FEED_LAG)), 10),
        _MINUTES,
        "A server is more than 10 s behind the others: it shows old states, and its nodes get tasks late.",
    ),
    AlertRule(
        "GpoolLoopBlocked",
        _WARNING,
        _above(_p99(catalogue.LOOP_LAG, 5 * _MINUTES), 0.25),
        5 * _MINUTES,
        "The server's event loop is blocked: all requests and heartbeats are late.",
    ),
    AlertRule(
        "GpoolBackgroundFaults",
        _WARNING,
        _above(_increase(catalogue.LOOP_FAULTS, 10 * _MINUTES), 2),
        0,
        "A background loop fails again and again: expiry, retention or scheduling does not work.",
    ),
    AlertRule(
        "GpoolMemoryHigh",
        _WARNING,
        _above(
            Ratio(
                Value(Selector("process_resident_memory_bytes", (_OURS,))),
                Value(_series(catalogue.MEMORY_LIMIT)),
            ),
            0.85,
        ),
        5 * _MINUTES,
        "A server uses more than 85 % of its memory and may be killed.",
    ),
    AlertRule(
        "GpoolDescriptorsLow",
        _WARNING,
        _above(
            Ratio(
                Value(Selector("process_open_fds", (_OURS,))),
                Value(Selector("process_max_fds", (_OURS,))),
            ),
            0.8,
        ),
        5 * _MINUTES,
        "A server runs out of file descriptors: new connections will be refused.",
    ),
    AlertRule(
        "GpoolDiskLow",
        _CRITICAL,
        _below(
            Ratio(Value(_series(catalogue.DISK_FREE)), Value(_series(catalogue.DISK_RESERVED))), 2
        ),
        _MINUTES,
        "The data directory is nearly full: uploads and submissions are about to be refused.",
    ),
)


def ranges(rules: Sequence[AlertRule]) -> Mapping[Selector, float]:
    """Selectors of the rules, each with its longest range in seconds."""
    found: dict[Selector, float] = {}
    for rule in rules:
        for selector, range_s in rule.condition.ranges():
            found[selector] = max(range_s, found.get(selector, 0.0))
    return found


def as_yaml(rules: Sequence[AlertRule] = RULES, runbook: str = RUNBOOK) -> str:
    """Rule file of Prometheus. Strings are written as JSON, which YAML contains."""
    lines = [
        "# Generated by `make docs` from src/gpool/server/alerts/rules.py; do not edit.",
        "groups:",
        "  - name: gpool",
        f"    interval: {duration(EVERY_S)}",
        "    rules:",
    ]
    for rule in rules:
        lines += [
            f"      - alert: {rule.name}",
            f"        expr: {json.dumps(rule.condition.promql())}",
            *([f"        for: {duration(rule.hold_s)}"] if rule.hold_s else []),
            "        labels:",
            f"          severity: {rule.severity}",
            "        annotations:",
            f"          summary: {json.dumps(rule.summary)}",
            f"          runbook_url: {json.dumps(f'{runbook}#{rule.runbook}')}",
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(as_yaml(runbook=sys.argv[1] if len(sys.argv) > 1 else RUNBOOK))
