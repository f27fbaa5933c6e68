"""The Grafana dashboards: panels as data, written with grafana-foundation-sdk. One file because it is mostly a table.

`python -m tests.tools.dashboards DIRECTORY` writes one JSON file each; `--check` compares instead.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
RANGE = "$__rate_interval"
NODE = "$node"


@dataclass(frozen=True, slots=True)
class Query:
    expression: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Graph:
    """`is_number`: shown as one number, the newest value."""

    title: str
    unit: str  # Grafana's
    queries: tuple[Query, ...]
    is_number: bool = False


@dataclass(frozen=True, slots=True)
class DashboardPage:
    name: str  # of the file, and of the dashboard after `gpool-`
    title: str
    rows: tuple[tuple[str, tuple[Graph, ...]], ...]
    by_node: bool = False

    @property
    def queries(self) -> tuple[Query, ...]:
        return tuple(q for _, graphs in self.rows for graph in graphs for q in graph.queries)


def _graph(title: str, unit: str, *queries: tuple[str, str]) -> Graph:
    return Graph(title, unit, tuple(Query(*each) for each in queries))


def _number(title: str, expression: str, unit: str = "short") -> Graph:
    return Graph(title, unit, (Query(expression),), is_number=True)


def _rate(name: str, by: str = "") -> str:
    grouped = f" by ({by}) " if by else ""
    return f"sum{grouped}(rate({name}[{RANGE}]))"


def _quantiles(histogram: str, by: str = "") -> tuple[tuple[str, str], ...]:
    labels, legend = (f"le, {by}", f"{{{{{by}}}}} ") if by else ("le", "")
    buckets = f"sum by ({labels}) (rate({histogram}_bucket[{RANGE}]))"
    shown = ("0.99",) if by else ("0.5", "0.99")
    return tuple((f"histogram_quantile({q}, {buckets})", f"{legend}p{q[2:]:0<2}") for q in shown)


OVERVIEW = DashboardPage(
    "overview",
    "gpool: overview",
    (
        (
            "Now",
            (
                _number("Servers that schedule", "sum(gpool_leader)"),
                _number("Alerts firing (own evaluation)", "sum(gpool_alerts_firing)"),
                _number("Nodes connected", "sum(gpool_nodes_connected)"),
                _number("GPUs free", 'sum(gpool_gpus{state="free"})'),
                _number("Tasks waiting", "sum(gpool_tasks_queued)"),
                _number("Leases held", "sum(gpool_leases_held)"),
                _number("Uncleared micro-credits", "sum(gpool_ledger_uncleared_microcredits)"),
                _number(
                    "Oldest pending transfer (s)", "max(gpool_ledger_uncleared_oldest_seconds)"
                ),
            ),
        ),
        (
            "Requests",
            (
                _graph(
                    "Requests by route",
                    "reqps",
                    (_rate("gpool_http_requests_total", "route"), "{{route}}"),
                ),
                _graph(
                    "Requests by status",
                    "reqps",
                    (_rate("gpool_http_requests_total", "status"), "{{status}}"),
                ),
                _graph(
                    "Latency by route (p99)",
                    "s",
                    *_quantiles("gpool_http_request_seconds", "route"),
                ),
                _graph(
                    "Requests in flight",
                    "short",
                    ("sum(gpool_http_requests_in_flight)", "in flight"),
                ),
                _graph(
                    "Refused for overload",
                    "reqps",
                    (_rate("gpool_requests_shed_total", "class"), "{{class}}"),
                ),
                _graph(
                    "Overload pressure",
                    "short",
                    ("gpool_overload_pressure", "{{instance}}"),
                ),
            ),
        ),
        (
            "Tasks",
            (
                _graph(
                    "Submitted and ended",
                    "ops",
                    (_rate("gpool_tasks_submitted_total"), "submitted"),
                    (_rate("gpool_tasks_ended_total", "status"), "{{status}}"),
                ),
                _graph("Wait until the lease", "s", *_quantiles("gpool_task_wait_seconds")),
                _graph("Run time", "s", *_quantiles("gpool_task_run_seconds")),
                _graph("GPUs by state", "short", ("sum by (state) (gpool_gpus)", "{{state}}")),
                _graph("Nodes by state", "short", ("sum by (state) (gpool_nodes)", "{{state}}")),
                _graph(
                    "Nodes lost, tasks requeued",
                    "ops",
                    (_rate("gpool_nodes_lost_total"), "nodes lost"),
                    (_rate("gpool_tasks_requeued_total", "reason"), "{{reason}}"),
                ),
            ),
        ),
        (
            "Servers",
            (
                _graph(
                    "CPU",
                    "percentunit",
                    (f'rate(process_cpu_seconds_total{{job="gpool"}}[{RANGE}])', "{{instance}}"),
                ),
                _graph(
                    "Memory",
                    "bytes",
                    ('process_resident_memory_bytes{job="gpool"}', "{{instance}}"),
                    ("gpool_memory_limit_bytes", "limit of {{instance}}"),
                ),
                _graph("Event loop lag", "s", *_quantiles("gpool_loop_lag_seconds")),
                _graph("Commit time", "s", *_quantiles("gpool_store_commit_seconds")),
                _graph(
                    "Database faults",
                    "ops",
                    (_rate("gpool_store_faults_total", "kind"), "{{kind}}"),
                ),
                _graph(
                    "Free disk",
                    "bytes",
                    ("gpool_disk_free_bytes", "{{instance}}"),
                    ("gpool_disk_reserved_bytes", "reserved"),
                ),
                _graph(
                    "File descriptors",
                    "short",
                    ('process_open_fds{job="gpool"}', "{{instance}}"),
                    ('process_max_fds{job="gpool"}', "limit of {{instance}}"),
                ),
                _graph("Version", "short", ("sum by (version) (gpool_build_info)", "{{version}}")),
            ),
        ),
    ),
)

SCHEDULER = DashboardPage(
    "scheduler",
    "gpool: scheduler",
    (
        (
            "Queue",
            (
                _graph(
                    "Tasks by reason",
                    "short",
                    ("sum by (reason) (gpool_queue_tasks)", "{{reason}}"),
                ),
                _graph(
                    "Tasks older than",
                    "short",
                    ("sum by (seconds) (gpool_queue_older_tasks)", "{{seconds}} s"),
                ),
                _graph("Oldest task", "s", ("max(gpool_queue_oldest_seconds)", "oldest")),
                _graph("Tasks waiting", "short", ("sum(gpool_tasks_queued)", "waiting")),
            ),
        ),
        (
            "Passes",
            (
                _graph("Pass time", "s", *_quantiles("gpool_scheduling_pass_seconds")),
                _graph("Passes", "ops", (_rate("gpool_scheduling_pass_seconds_count"), "passes")),
                _graph(
                    "Processor time of planning",
                    "percentunit",
                    (_rate("gpool_planning_seconds_total"), "planning"),
                ),
                _graph(
                    "Decisions",
                    "ops",
                    (_rate("gpool_scheduler_decisions_total", "outcome"), "{{outcome}}"),
                ),
                _graph("Rebuilds", "ops", (_rate("gpool_scheduler_rebuilt_total"), "rebuilds")),
                _graph(
                    "Faults of background loops",
                    "ops",
                    (_rate("gpool_loop_faults_total", "loop"), "{{loop}}"),
                ),
            ),
        ),
        (
            "Leases and sandboxes",
            (
                _graph("Leases granted", "ops", (_rate("gpool_leases_granted_total"), "granted")),
                _graph("Allocations", "short", ("sum by (state) (gpool_allocations)", "{{state}}")),
                _graph("Time from grant to start", "s", *_quantiles("gpool_sandbox_start_seconds")),
                _graph(
                    "Starts",
                    "ops",
                    (_rate("gpool_sandbox_starts_total"), "started"),
                    (_rate("gpool_sandbox_failed_starts_total", "fault"), "failed: {{fault}}"),
                ),
                _graph(
                    "Reports under an old lease",
                    "ops",
                    (_rate("gpool_reports_refused_total"), "refused"),
                ),
                _graph(
                    "Frames of agents",
                    "ops",
                    (_rate("gpool_agent_frames_total", "kind"), "{{kind}}"),
                ),
                _graph("Oldest heartbeat", "s", ("max(gpool_heartbeat_oldest_seconds)", "oldest")),
            ),
        ),
        (
            "Store",
            (
                _graph("Commit time", "s", *_quantiles("gpool_store_commit_seconds")),
                _graph("Commits", "ops", (_rate("gpool_store_commit_seconds_count"), "writes")),
                _graph("Read time", "s", *_quantiles("gpool_store_read_seconds")),
                _graph(
                    "Lag of the change feed",
                    "s",
                    ("max by (instance) (gpool_store_feed_lag_seconds)", "{{instance}}"),
                ),
            ),
        ),
    ),
)

GPUS = DashboardPage(
    "gpus",
    "gpool: GPUs",
    (
        (
            "Now",
            (
                _number("GPUs", "sum(gpool_gpus)"),
                _number("Free", 'sum(gpool_gpus{state="free"})'),
                _number("Busy or shared", 'sum(gpool_gpus{state=~"busy|shared"})'),
                _number("Without series of their own", "sum(gpool_gpus_omitted)"),
            ),
        ),
        (
            "Use",
            (
                _graph(
                    "By model and state",
                    "short",
                    ("sum by (model, state) (gpool_gpus)", "{{model}} {{state}}"),
                ),
                _graph(
                    "Allocated, by model",
                    "percentunit",
                    ("avg by (model) (gpool_gpu_allocated_ratio)", "{{model}}"),
                ),
                _graph(
                    "Utilisation, by model",
                    "percentunit",
                    ("avg by (model) (gpool_gpu_utilisation_ratio)", "{{model}}"),
                ),
                _graph(
                    "Memory used",
                    "percentunit",
                    (
                        "sum by (model) (gpool_gpu_memory_used_bytes) / sum by (model) (gpool_gpu_memory_bytes)",
                        "{{model}}",
                    ),
                ),
                _graph("Power", "watt", ("sum by (model) (gpool_gpu_power_watts)", "{{model}}")),
            ),
        ),
        (
            "Health",
            (
                _graph(
                    "Hottest GPUs",
                    "celsius",
                    ("topk(10, gpool_gpu_temperature_celsius)", "{{node}} {{gpu}}"),
                ),
                _graph(
                    "Worst health by model",
                    "short",
                    ("max by (model) (gpool_gpu_health)", "{{model}}"),
                ),
            ),
        ),
    ),
)


def _of_node(name: str) -> str:
    return f'{name}{{node="{NODE}"}}'


ONE_NODE = DashboardPage(
    "node",
    "gpool: one node",
    (
        (
            "Node",
            (
                _graph("CPUs held", "percentunit", (_of_node("gpool_node_cpu_ratio"), "CPUs")),
                _graph(
                    "Memory held", "percentunit", (_of_node("gpool_node_memory_ratio"), "memory")
                ),
                _graph("Allocations", "short", (_of_node("gpool_node_allocations"), "allocations")),
            ),
        ),
        (
            "GPUs",
            (
                _graph(
                    "Utilisation",
                    "percentunit",
                    (_of_node("gpool_gpu_utilisation_ratio"), "GPU {{gpu}}"),
                ),
                _graph(
                    "Allocated",
                    "percentunit",
                    (_of_node("gpool_gpu_allocated_ratio"), "GPU {{gpu}}"),
                ),
                _graph(
                    "Memory used", "bytes", (_of_node("gpool_gpu_memory_used_bytes"), "GPU {{gpu}}")
                ),
                _graph("Power", "watt", (_of_node("gpool_gpu_power_watts"), "GPU {{gpu}}")),
                _graph(
                    "Temperature",
                    "celsius",
                    (_of_node("gpool_gpu_temperature_celsius"), "GPU {{gpu}}"),
                ),
                _graph(
                    "Health (0 healthy, 2 quarantine)",
                    "short",
                    (_of_node("gpool_gpu_health"), "GPU {{gpu}}"),
                ),
            ),
        ),
    ),
    by_node=True,
)

PAGES: Sequence[DashboardPage] = (OVERVIEW, SCHEDULER, GPUS, ONE_NODE)


def as_json(page: DashboardPage) -> str:
    built = (
        build.Dashboard(page.title)
        .uid(f"gpool-{page.name}")
        .tags(["gpool"])
        .refresh("30s")
        .time("now-6h", "now")
        .timezone("browser")
        .with_variable(
            build.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
        )
    )
    if page.by_node:
        nodes = build.QueryVariable("node").label("Node").datasource(SOURCE)
        nodes = nodes.query("label_values(gpool_node_allocations, node)")
        built = built.with_variable(nodes.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED))
    for title, graphs in page.rows:
        built = built.with_row(build.Row(title))
        for graph in graphs:
            built = built.with_panel(_panel(graph))
    return JSONEncoder(sort_keys=True, indent=1).encode(built.build()) + "\n"


def _panel(graph: Graph) -> timeseries.Panel | stat.Panel:
    targets = [
        prometheus.Dataquery()
        .ref_id(chr(ord("A") + place))
        .expr(each.expression)
        .legend_format(each.legend or "__auto")
        for place, each in enumerate(graph.queries)
    ]
    panel: timeseries.Panel | stat.Panel
    if graph.is_number:
        panel = (
            stat.Panel().title(graph.title).unit(graph.unit).datasource(SOURCE).span(4).height(4)
        )
    else:
        panel = timeseries.Panel().title(graph.title).unit(graph.unit).datasource(SOURCE)
        panel = panel.span(12).height(8)
    for each in targets:
        panel = panel.with_target(each)
    return panel


def main(folder: Path, *, is_check: bool) -> int:
    stale = []
    for page in PAGES:
        file, text = folder / f"{page.name}.json", as_json(page)
        if not is_check:
            file.write_text(text)
        elif not file.exists() or file.read_text() != text:
            stale.append(str(file))
    if stale:
        sys.stderr.write(f"stale: {', '.join(stale)}; run make docs\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), is_check="--check" in sys.argv[2:]))
