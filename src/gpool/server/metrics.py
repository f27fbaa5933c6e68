"""Prometheus metrics; every name is defined here once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gpool.core.ids import NodeId, encode
from gpool.core.model import Instant
from gpool.core.scheduler.state.waiting import NodeState
from gpool.server.nodes.telemetry import Point, Telemetry

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
        self.planning = Counter(
            "gpool_planning_seconds",
            "Processor time spent deciding, of all passes",
            registry=self.registry,
        )
        self.replayed = Gauge(
            "gpool_pricing_replayed_idle_percent",
            "GPUs left idle when earlier arrivals were replayed, by the pricing chosen and by plain gradient descent",
            ["way"],
            registry=self.registry,
        )
        self.learnt_at = Gauge(
            "gpool_pricing_learnt_timestamp_seconds",
            "When the pricing was learnt",
            registry=self.registry,
        )
        self.queued = Gauge("gpool_tasks_queued", "Tasks waiting", registry=self.registry)
        self.nodes = Gauge("gpool_nodes_connected", "Nodes with a channel", registry=self.registry)

    def watch_gpus(self, collector: Collector) -> None:
        self.registry.register(collector)

    def page(self) -> bytes:
        return generate_latest(self.registry)


class GpuCollector(Collector):
    """GPU metrics of connected nodes, read at each scrape, so that removed nodes leave no series."""

    def __init__(
        self,
        telemetry: Telemetry,
        nodes: Callable[[], Mapping[NodeId, NodeState]],
        now: Callable[[], Instant],
    ) -> None:
        self._telemetry = telemetry
        self._nodes = nodes
        self._now = now

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        labels = ["node", "gpu", "model"]
        health = GaugeMetricFamily(
            "gpool_gpu_health", "0 healthy, 1 degraded, 2 in quarantine", labels=labels
        )
        memory = GaugeMetricFamily("gpool_gpu_memory_bytes", "Memory the GPU has", labels=labels)
        readings = {
            "utilisation_percent": GaugeMetricFamily(
                "gpool_gpu_utilisation_ratio", "Time its processors were busy", labels=labels
            ),
            "memory_bytes": GaugeMetricFamily(
                "gpool_gpu_memory_used_bytes", "Memory in use", labels=labels
            ),
            "power_mw": GaugeMetricFamily("gpool_gpu_power_watts", "Power drawn", labels=labels),
            "temperature_c": GaugeMetricFamily(
                "gpool_gpu_temperature_celsius", "Temperature", labels=labels
            ),
        }
        now = self._now()
        for id_, entry in self._nodes().items():
            if entry.node is None or not entry.node.connected:
                continue
            for gpu in entry.node.offer.gpus:
                names = [encode("node", id_), str(gpu.index), gpu.model]
                health.add_metric(names, gpu.health.weight)
                memory.add_metric(names, gpu.memory_bytes)
                point = self._telemetry.now_of(id_, gpu.index, now)
                if point is not None:
                    _add(readings, names, point)
        yield from (health, memory, *readings.values())


_SCALE = {"utilisation_percent": 0.01, "memory_bytes": 1.0, "power_mw": 0.001, "temperature_c": 1.0}


def _add(readings: Mapping[str, GaugeMetricFamily], names: list[str], point: Point) -> None:
    for field, family in readings.items():
        value = getattr(point, field)
        if value is not None:
            family.add_metric(names, value * _SCALE[field])
