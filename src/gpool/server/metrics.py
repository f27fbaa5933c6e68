"""What Prometheus may ask. Counts and times only; every name is listed here once."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.submitted = Counter("gpool_tasks_submitted", "Tasks accepted", registry=self.registry)
        self.ended = Counter(
            "gpool_tasks_ended", "Tasks that reached their end", ["status"], registry=self.registry
        )
        self.requeued = Counter(
            "gpool_tasks_requeued",
            "Leases that ended without ending the task",
            ["reason"],
            registry=self.registry,
        )
        self.granted = Counter("gpool_leases_granted", "Leases written", registry=self.registry)
        self.refused = Counter(
            "gpool_reports_refused", "Report items under an old lease", registry=self.registry
        )
        self.rebuilt = Counter(
            "gpool_scheduler_rebuilt",
            "Times the state was built from the store",
            registry=self.registry,
        )
        self.loop_faults = Counter(
            "gpool_loop_faults", "Runs of a loop that raised", ["loop"], registry=self.registry
        )
        self.passes = Histogram(
            "gpool_scheduling_pass_seconds",
            "One pass: plan and commit",
            buckets=BUCKETS,
            registry=self.registry,
        )
        self.queued = Gauge("gpool_tasks_queued", "Tasks waiting", registry=self.registry)
        self.nodes = Gauge("gpool_nodes_connected", "Nodes with a channel", registry=self.registry)

    def page(self) -> bytes:
        return generate_latest(self.registry)
