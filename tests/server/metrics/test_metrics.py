"""The metrics page of a real server: what happened is counted once, under bounded labels, and only the leader speaks
of the pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpool.core.errors import Unreachable
from gpool.core.model import SECOND, EndReason, Fault, Permission
from gpool.core.scheduler.state.queue import Queue
from gpool.server.alerts.loops import LagLoop, MonitorPool
from gpool.server.metrics import Metrics, catalogue
from gpool.server.metrics.catalogue import CATALOGUE, PROCESS_METRICS
from gpool.server.metrics.collectors import Observed, collectors
from gpool.server.metrics.registry import HistogramSeries, MeasuredStore
from gpool.server.scheduling.loops import ExpireNodes
from gpool.server.store.protocol import Operation, operation
from gpool.server.store.rows import values
from gpool.wire.frames import Finished, Started
from tests.server.server_desk import Agent, Desk, an_offer, returned

pytestmark = pytest.mark.anyio


def read(page: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


async def value(desk: Desk, name: str, **labels: str) -> float | None:
    return read((await desk.get("/metrics")).text).get((name, frozenset(labels.items())))


def names(page: str) -> set[str]:
    return {name for name, _ in read(page)}


async def a_busy_pool(desk: Desk) -> Agent:
    """A pool in which something of every kind has happened."""
    agent = await desk.agent(offer=an_offer(cpus=4, gpus=2))
    await desk.calls(2)
    await desk.schedule()
    for lease in agent.leases():
        await agent.report(Started(lease.task, lease.epoch))
        await agent.report(returned(lease))
    await desk.command(gpu="A100:8")
    await MonitorPool(desk.server).run_once(desk.server.now)
    lag = LagLoop(desk.server)
    await lag.run_once(desk.server.now)
    await lag.run_once(desk.server.now)
    return agent


async def test_the_page_holds_the_metrics_of_the_catalogue_and_no_others(desk: Desk) -> None:
    agent = await a_busy_pool(desk)
    await agent.send_beat()
    page = (await desk.get("/metrics")).text
    declared = {name for spec in CATALOGUE for name in spec.series} | set(PROCESS_METRICS)
    readings = {"gpool_gpu_utilisation_ratio", "gpool_gpu_memory_used_bytes"}
    readings |= {"gpool_gpu_power_watts", "gpool_gpu_temperature_celsius"}
    # Nothing was learnt, and a desk runs no loops.
    unset = {"gpool_pricing_replayed_idle_percent", "gpool_loop_faults_total"}
    found = {name for name in names(page) if not name.endswith("_created")}
    assert declared - found == readings | unset
    assert found - declared == set()


async def test_requests_are_counted_by_route_template(desk: Desk) -> None:
    task = await desk.command()
    for path in (f"/v1/tasks/{task}", f"/v1/tasks/{task}", "/v1/tasks/nonsense", "/no/such/path"):
        await desk.get(path)
    await desk.bare.get("/v1/me")
    counted = "gpool_http_requests_total"
    one = {"route": "/v1/tasks/{id}", "method": "GET"}
    assert await value(desk, counted, **one, status="200") == 2
    assert await value(desk, counted, **one, status="400") == 1
    assert await value(desk, counted, route="other", method="GET", status="404") == 1
    assert await value(desk, counted, route="/v1/me", method="GET", status="401") == 1
    assert await value(desk, counted, route="/v1/tasks", method="POST", status="202") == 1
    assert await value(desk, "gpool_http_request_seconds_count", **one) == 3
    assert await value(desk, "gpool_http_requests_in_flight") == 1  # this very one


async def test_a_request_that_waits_is_counted_and_not_timed(desk: Desk) -> None:
    agent = await desk.agent()
    task = await desk.command()
    await desk.schedule()
    await agent.report(*(returned(lease) for lease in agent.leases()))
    await desk.get(f"/v1/tasks/{task}?wait=5")
    one = {"route": "/v1/tasks/{id}", "method": "GET"}
    assert await value(desk, "gpool_http_requests_total", **one, status="200") == 1
    assert await value(desk, "gpool_http_request_seconds_count", **one) is None
    await desk.get(f"/v1/tasks/{task}?wait=0")
    assert await value(desk, "gpool_http_request_seconds_count", **one) == 1


async def test_unknown_paths_and_methods_make_no_series_of_their_own(desk: Desk) -> None:
    await desk.get("/v1/tasks/1")
    before = len(read((await desk.get("/metrics")).text))
    for number in range(50):
        await desk.get(f"/v1/tasks/{number}")
        await desk.get(f"/made/up/{number}")
        await desk.http.request(f"M{number}", "/v1/tasks")
    after = read((await desk.get("/metrics")).text)
    assert len(after) - before <= 60  # a handful of counters and histograms, not one per path
    assert not any("M7" in str(labels) or "/made/up" in str(labels) for _, labels in after)


async def test_only_operators_read_the_metrics(desk: Desk) -> None:
    user = await desk.person("consumer", Permission.CONSUMER)
    assert (await desk.bare.get("/metrics")).status_code == 401
    assert (await desk.bare.get("/metrics", headers=user)).status_code == 403
    assert (await desk.bare.get("/v1/admin/alerts", headers=user)).status_code == 403
    assert (await desk.get("/metrics")).status_code == 200


async def test_waits_runs_and_starts_are_measured(desk: Desk) -> None:
    agent = await desk.agent()
    await desk.command()
    desk.clock.advance(90)
    await desk.schedule()
    [lease] = agent.leases()
    desk.clock.advance(3)
    await agent.report(Started(lease.task, lease.epoch))
    desk.clock.advance(7)  # the server believes no run time longer than the lease
    await agent.report(replace_duration(returned(lease), 7_000_000))
    assert await value(desk, "gpool_task_wait_seconds_sum") == 90
    assert await value(desk, "gpool_sandbox_start_seconds_sum") == 3
    assert await value(desk, "gpool_sandbox_starts_total") == 1
    assert await value(desk, "gpool_task_run_seconds_sum") == 7
    assert await value(desk, "gpool_scheduler_decisions_total", outcome="granted") == 1
    assert await value(desk, "gpool_agent_frames_total", kind="Reports") == 2


def replace_duration(ended: Finished, duration_us: int) -> Finished:
    return Finished(ended.task, ended.epoch, ended.reason, duration_us=duration_us)


async def test_a_failed_start_is_counted_by_its_diagnosis(desk: Desk) -> None:
    agent = await desk.agent()
    await desk.command()
    await desk.schedule()
    [lease] = agent.leases()
    why = EndReason.SANDBOX_FAILED
    await agent.report(Finished(lease.task, lease.epoch, why, fault=Fault.NODE))
    assert await value(desk, "gpool_sandbox_failed_starts_total", fault="node") == 1
    assert await value(desk, "gpool_sandbox_failed_starts_total", fault="part") == 0


async def test_the_queue_is_counted_by_reason_and_age(desk: Desk) -> None:
    await desk.agent(offer=an_offer(cpus=2, gpus=1))
    await desk.command(gpu="H200")
    desk.clock.advance(700)
    for _ in range(3):
        await desk.command(gpu="A100")
    await desk.schedule()
    monitor = MonitorPool(desk.server)
    await monitor.run_once(desk.server.now)
    assert await value(desk, "gpool_queue_tasks", reason="no_such_gpu") == 1
    assert await value(desk, "gpool_queue_tasks", reason="gpus_busy") == 2
    assert await value(desk, "gpool_queue_older_tasks", seconds="600") == 1
    assert await value(desk, "gpool_queue_older_tasks", seconds="3600") == 0
    assert await value(desk, "gpool_queue_oldest_seconds") == 700
    assert await value(desk, "gpool_tasks_queued") == 3
    assert await value(desk, "gpool_leases_held") == 1
    assert await value(desk, "gpool_gpus", model="NVIDIA A100-SXM4-80GB", state="busy") == 1


async def test_a_lost_node_is_counted(desk: Desk) -> None:
    await desk.agent()
    await desk.command()
    await desk.schedule()
    desk.clock.advance(31)
    assert (await value(desk, "gpool_heartbeat_oldest_seconds") or 0) >= 31
    await ExpireNodes(desk.server).run_once(desk.server.now)
    assert await value(desk, "gpool_nodes_lost_total") == 1
    assert await value(desk, "gpool_tasks_requeued_total", reason="lost") == 1
    assert await value(desk, "gpool_nodes", state="disconnected") == 1


def observing(desk: Desk, **changes: Any) -> str:
    return observed_by(desk, **changes).page().decode()


def observed_by(desk: Desk, **changes: Any) -> Metrics:
    server, metrics = desk.server, Metrics()
    observed = Observed(
        server.picture,
        server.telemetry,
        server.monitor.survey,
        server.clock.now,
        is_leader=lambda: True,
        version="1",
        most_gpus=100,
        data=server.settings.data,
        min_free_bytes=1,
    )
    metrics.add(*collectors(replace(observed, **changes)))
    return metrics


async def test_a_server_that_does_not_lead_says_nothing_about_the_pool(desk: Desk) -> None:
    await a_busy_pool(desk)
    pool = {name for spec in CATALOGUE if spec.is_of_pool for name in spec.series}
    assert names(observing(desk)) & pool  # control
    page = observing(desk, is_leader=lambda: False)
    assert names(page) & pool == set()
    assert read(page)["gpool_leader", frozenset()] == 0


async def test_series_of_gpus_are_bounded_and_the_sums_are_not(desk: Desk) -> None:
    for number in range(5):
        await desk.agent(f"node{number}", an_offer(gpus=2))
    found = read(observing(desk, most_gpus=7))
    of_gpus = [key for key in found if key[0] == "gpool_gpu_health"]
    assert len(of_gpus) == 4  # two nodes with two GPUs each
    assert found["gpool_gpus_omitted", frozenset()] == 6
    labels = frozenset({("model", "NVIDIA A100-SXM4-80GB"), ("state", "free")})
    assert found["gpool_gpus", labels] == 10


async def test_models_beyond_the_most_frequent_are_summed(desk: Desk) -> None:
    offer = an_offer(gpus=60)
    gpus = tuple(replace(gpu, model=f"made up {gpu.index}") for gpu in offer.gpus)
    await desk.agent(offer=replace(offer, gpus=gpus))
    found = read(observing(desk))
    models = {dict(labels)["model"] for name, labels in found if name == "gpool_gpus"}
    assert len(models) == 21
    assert found["gpool_gpus", frozenset({("model", "other"), ("state", "free")})] == 40


@operation
def _broken() -> Operation[int]:
    [found] = yield from values(int, "SELECT broken FROM missing_table")
    return found


class _Gone:
    async def write(self, operation: Any) -> Any:
        raise Unreachable("the database does not answer")

    read = write

    async def close(self) -> None: ...


async def test_commits_are_timed_and_faults_of_the_database_counted(desk: Desk) -> None:
    before = await value(desk, "gpool_store_commit_seconds_count")
    await desk.command()
    assert (await value(desk, "gpool_store_commit_seconds_count") or 0) > (before or 0)
    with pytest.raises(Exception, match="refused"):
        await desk.server.store.write(_broken())
    assert await value(desk, "gpool_store_faults_total", kind="internal") == 1
    gone = MeasuredStore(_Gone(), desk.server.metrics.signals.store)
    for call in (gone.write, gone.read):
        with pytest.raises(Unreachable):
            await call(_broken())
    assert await value(desk, "gpool_store_faults_total", kind="unreachable") == 2


async def test_a_refused_write_is_no_fault_of_the_database(desk: Desk) -> None:
    answer = await desk.post("/v1/tasks", {"command": ["true"], "batch": "bt-none"})
    assert answer.status_code >= 400
    assert await value(desk, "gpool_store_faults_total", kind="internal") == 0


def test_the_histogram_counts_as_the_librarys_does() -> None:
    ours, library = HistogramSeries(catalogue.FAST), Metrics().passes
    for seconds in (0.0, 0.0005, 0.0006, 0.3, 1.0, 99.0):
        ours.observe(seconds)
        library.observe(seconds)
    [family] = library.collect()
    counts = [sample.value for sample in family.samples if sample.name.endswith("_bucket")]
    assert [sum(ours.counts[: place + 1]) for place in range(len(ours.counts))] == counts
    assert ours.total == pytest.approx(100.3011)


async def test_older_tasks_are_counted_from_above(desk: Desk) -> None:
    """Late entries count, and so may entries that left the middle of the queue; never more than there are."""
    for _ in range(4):
        await desk.command()
        desk.clock.advance(10)
    [entry] = desk.server.picture.state.queues.shapes()
    queue: Queue = entry.queue
    now = desk.server.now
    assert [queue.count_older(now - age * SECOND) for age in (0, 15, 25, 45)] == [4, 3, 2, 0]


async def test_an_alert_fires_after_its_condition_has_held(desk: Desk) -> None:
    """The disk counts as nearly full; the server's own clock decides how long that has been so."""
    metrics = observed_by(desk, min_free_bytes=1 << 60)
    server = replace(desk.server, metrics=metrics)
    monitor = MonitorPool(server)

    async def state() -> str:
        await monitor.run_once(server.now)
        items = (await desk.get("/v1/admin/alerts")).json()["items"]
        [found] = [each["state"] for each in items if each["name"] == "GpoolDiskLow"]
        return str(found)

    assert await state() == "pending"
    desk.clock.advance(45)
    assert await state() == "pending"
    desk.clock.advance(15)
    assert await state() == "firing"
    assert read(metrics.page().decode())["gpool_alerts_firing", frozenset()] == 1
