"""Every metric the server exports: name, kind, help, labels. `python -m gpool.server.metrics` prints
docs/metrics.md. Labels hold no names of users, tasks or files; each has a bounded number of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily

FAST = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
REQUEST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
LONG = (0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. `is_of_pool`: describes the pool, so only the leader exports it; else the exporting server itself."""

    name: str  # without the suffix that the text format adds
    kind: MetricKind
    text: str
    labels: tuple[str, ...] = ()
    buckets: Sequence[float] = ()
    is_of_pool: bool = False

    @property
    def series(self) -> tuple[str, ...]:
        """Names of its series in the text format."""
        match self.kind:
            case MetricKind.COUNTER:
                return (f"{self.name}_total",)
            case MetricKind.GAUGE:
                return (self.name,)
            case MetricKind.HISTOGRAM:
                return tuple(f"{self.name}_{part}" for part in ("bucket", "count", "sum"))

    def counter(self, registry: CollectorRegistry) -> Counter:
        return Counter(self.name, self.text, self.labels, registry=registry)

    def gauge(self, registry: CollectorRegistry) -> Gauge:
        return Gauge(self.name, self.text, self.labels, registry=registry)

    def histogram(self, registry: CollectorRegistry) -> Histogram:
        return Histogram(self.name, self.text, self.labels, buckets=self.buckets, registry=registry)

    def family(self) -> GaugeMetricFamily:
        return GaugeMetricFamily(self.name, self.text, labels=self.labels)


def _counter(name: str, text: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, MetricKind.COUNTER, text, labels)


def _gauge(name: str, text: str, *labels: str, is_of_pool: bool = False) -> MetricSpec:
    return MetricSpec(name, MetricKind.GAUGE, text, labels, is_of_pool=is_of_pool)


def _of_pool(name: str, text: str, *labels: str) -> MetricSpec:
    return _gauge(name, text, *labels, is_of_pool=True)


def _histogram(name: str, text: str, *labels: str, buckets: Sequence[float] = FAST) -> MetricSpec:
    return MetricSpec(name, MetricKind.HISTOGRAM, text, labels, buckets)


# ---- requests

REQUESTS = _counter(
    "gpool_http_requests",
    "Requests answered, by route template, method and status; unknown paths are `other`",
    "route",
    "method",
    "status",
)
REQUEST_TIME = _histogram(
    "gpool_http_request_seconds",
    "Time until the response begins, without requests that wait for an event (`wait`)",
    "route",
    "method",
    buckets=REQUEST,
)
IN_FLIGHT = _gauge("gpool_http_requests_in_flight", "Requests without a complete response")
SHED = _counter(
    "gpool_requests_shed",
    "Requests refused for overload, by class: `listing`, `explain`, `submission`, `other`, in the order of refusal",
    "class",
)
PRESSURE = _gauge(
    "gpool_overload_pressure",
    "Overload from 0 to 4: each class of `gpool_requests_shed` is refused within one unit",
)

# ---- tasks

SUBMITTED = _counter("gpool_tasks_submitted", "Tasks accepted")
ENDED = _counter("gpool_tasks_ended", "Tasks that reached their end", "status")
REQUEUED = _counter("gpool_tasks_requeued", "Leases that ended without ending the task", "reason")
WAIT_TIME = _histogram(
    "gpool_task_wait_seconds", "Time in the queue until the lease was granted", buckets=LONG
)
RUN_TIME = _histogram(
    "gpool_task_run_seconds", "Run time of the last attempt, as its agent measured it", buckets=LONG
)

# ---- scheduler

PASSES = _histogram("gpool_scheduling_pass_seconds", "One pass: plan and commit")
PLANNING = _counter(
    "gpool_planning_seconds", "Processor time spent deciding, of all passes and submissions"
)
DECISIONS = _counter(
    "gpool_scheduler_decisions",
    "Decisions by outcome: `granted`, `rejected` (overtaken by another commit), `preempted`; "
    "`deposed`: plans and expiries refused because another server has taken the term",
    "outcome",
)
REBUILT = _counter("gpool_scheduler_rebuilt", "Times the state was built from the store")
LOOP_FAULTS = _counter("gpool_loop_faults", "Runs of a loop that raised", "loop")
REPLAYED = _gauge(
    "gpool_pricing_replayed_idle_percent",
    "GPUs left idle when earlier arrivals were replayed, by the pricing chosen and by plain gradient descent",
    "way",
)
LEARNT_AT = _gauge("gpool_pricing_learnt_timestamp_seconds", "When the pricing was learnt")
LEADER = _gauge("gpool_leader", "1 on the server that schedules, 0 on the others")
QUEUED = _of_pool("gpool_tasks_queued", "Tasks waiting")
QUEUE_REASONS = _of_pool(
    "gpool_queue_tasks",
    "Tasks waiting by reason, the code of `gpool explain`; `unexamined`: beyond the largest groups",
    "reason",
)
QUEUE_OLDER = _of_pool(
    "gpool_queue_older_tasks",
    "Tasks waiting for longer than `seconds`; may include tasks that have just left the queue",
    "seconds",
)
QUEUE_OLDEST = _of_pool("gpool_queue_oldest_seconds", "Age of the task that waits longest")

# ---- leases, agents, sandboxes

GRANTED = _counter("gpool_leases_granted", "Leases written")
REFUSED = _counter("gpool_reports_refused", "Report items under an old lease")
LEASES_HELD = _of_pool("gpool_leases_held", "Leases that nodes hold, running or prefetched")
ALLOCATIONS = _of_pool(
    "gpool_allocations", "Allocations on nodes: `running`, or `stopping` for another task", "state"
)
NODES_CONNECTED = _gauge("gpool_nodes_connected", "Nodes with a channel to this server")
NODES = _of_pool(
    "gpool_nodes",
    "Nodes by state: `open`, `paused`, `draining`, `cordoned`, `backoff`, `disconnected`",
    "state",
)
NODES_LOST = _counter("gpool_nodes_lost", "Nodes whose leases expired for lack of heartbeats")
FRAMES = _counter("gpool_agent_frames", "Frames received from agents", "kind")
HEARTBEAT_AGE = _gauge(
    "gpool_heartbeat_oldest_seconds",
    "Time since the last heartbeat of the most silent connected node",
)
STARTS = _counter("gpool_sandbox_starts", "Starts of sandboxes reported by agents")
FAILED_STARTS = _counter(
    "gpool_sandbox_failed_starts", "Starts that failed, by the agent's diagnosis", "fault"
)
START_TIME = _histogram(
    "gpool_sandbox_start_seconds",
    "Time from the grant until the sandbox runs, of leases that are alone in their allocation",
    buckets=LONG,
)

# ---- GPUs

GPUS = _of_pool(
    "gpool_gpus",
    "GPUs of connected nodes by model and state: `free`, `shared` (part is free), `busy`, `closed`",
    "model",
    "state",
)
_GPU = ("node", "gpu", "model")
GPU_HEALTH = _of_pool("gpool_gpu_health", "0 healthy, 1 degraded, 2 in quarantine", *_GPU)
GPU_MEMORY = _of_pool("gpool_gpu_memory_bytes", "Memory the GPU has", *_GPU)
GPU_ALLOCATED = _of_pool("gpool_gpu_allocated_ratio", "Part of the GPU that tasks hold", *_GPU)
GPU_UTILISATION = _of_pool("gpool_gpu_utilisation_ratio", "Time its processors were busy", *_GPU)
GPU_MEMORY_USED = _of_pool("gpool_gpu_memory_used_bytes", "Memory in use", *_GPU)
GPU_POWER = _of_pool("gpool_gpu_power_watts", "Power drawn", *_GPU)
GPU_TEMPERATURE = _of_pool("gpool_gpu_temperature_celsius", "Temperature", *_GPU)
GPU_OMITTED = _of_pool(
    "gpool_gpus_omitted", "GPUs beyond the setting `metrics_gpus`: without series of their own"
)

# ---- money

UNCLEARED = _of_pool(
    "gpool_ledger_uncleared_microcredits",
    "Funds set aside by pending transfers that are not resolved",
)
UNCLEARED_AGE = _of_pool(
    "gpool_ledger_uncleared_oldest_seconds", "Age of the oldest pending transfer; 0 without any"
)

# ---- nodes

NODE_CPU = _of_pool("gpool_node_cpu_ratio", "Part of the offered CPUs that tasks hold", "node")
NODE_MEMORY = _of_pool(
    "gpool_node_memory_ratio", "Part of the offered memory that tasks hold", "node"
)
NODE_ALLOCATIONS = _of_pool("gpool_node_allocations", "Allocations on the node", "node")

# ---- store

COMMIT_TIME = _histogram(
    "gpool_store_commit_seconds", "Time of a write from its request until its commit is durable"
)
READ_TIME = _histogram("gpool_store_read_seconds", "Time of a read, waiting for a reader included")
STORE_FAULTS = _counter(
    "gpool_store_faults",
    "Writes and reads that failed for the database's sake: `unreachable` or `internal`",
    "kind",
)

FEED_LAG = _gauge(
    "gpool_store_feed_lag_seconds",
    "Time since this server last knew all changes of the other servers of its database; 0 on SQLite",
)

# ---- process

LOOP_LAG = _histogram("gpool_loop_lag_seconds", "Delay of a timer in the event loop")
MEMORY_LIMIT = _gauge(
    "gpool_memory_limit_bytes",
    "Memory this process may use: of its control group, else of the machine",
)
DISK_FREE = _gauge("gpool_disk_free_bytes", "Free space in the file system of the data directory")
DISK_RESERVED = _gauge(
    "gpool_disk_reserved_bytes", "Free space below which uploads are refused (`min_free_bytes`)"
)
BUILD = _gauge("gpool_build_info", "1; the version is a label", "version")
ALERTS = _of_pool("gpool_alerts_firing", "Alerts that this server's own evaluation finds firing")

CATALOGUE: tuple[MetricSpec, ...] = tuple(
    each for each in tuple(globals().values()) if isinstance(each, MetricSpec)
)

PROCESS_METRICS = (
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
    "process_virtual_memory_bytes",
    "process_start_time_seconds",
    "process_open_fds",
    "process_max_fds",
)
"""Of the Prometheus client library, on Linux."""


def page() -> str:
    """Text of docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Generated by `make docs` from `src/gpool/server/metrics/catalogue.py`. How to scrape and what",
        "to watch: [monitoring](guides/monitoring.md). Alerts: [runbook](runbook.md).",
        "",
        "Counters end in `_total`, histograms have `_bucket`, `_count` and `_sum`. Metrics *of the pool*",
        "are exported by the leader alone (`gpool_leader` is 1), all others by every server for itself.",
        "",
        "| metric | kind | labels | of the pool | meaning |",
        "|---|---|---|---|---|",
    ]
    for each in CATALOGUE:
        name = each.series[0] if each.kind is not MetricKind.HISTOGRAM else each.name
        labels = ", ".join(f"`{label}`" for label in each.labels) or "–"
        pool = "yes" if each.is_of_pool else "–"
        lines.append(f"| `{name}` | {each.kind} | {labels} | {pool} | {each.text} |")
    lines += ["", "Of the process itself, under their usual names:", ""]
    lines += [f"- `{name}`" for name in PROCESS_METRICS]
    return "\n".join(lines) + "\n"
