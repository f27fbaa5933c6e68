"""A real Prometheus scrapes a running pool: every query of the dashboards returns data, every rule is evaluated."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gpool.core.model import GIB, EndReason, Gpu
from gpool.server.alerts.rules import RULES
from gpool.wire.frames import Beat, BeatSeen, Finished, GpuReading, OfferChanged, Started
from tests.tools.dashboards import NODE, PAGES, RANGE, as_json
from tests.tools.processes import LONG_LEASE, PATIENCE_S, Pool, eventually, free_port
from tests.tools.scripted_agent import ScriptedAgent, offer

MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"
GPU = Gpu(0, "GPU-0", "NVIDIA H200", "nvidia", 141 * GIB, True)


class Prometheus:
    def __init__(self, address: str) -> None:
        self._http = httpx2.Client(base_url=address, timeout=PATIENCE_S, trust_env=False)

    def is_ready(self) -> bool:
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx2.TransportError:
            return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        answer = self._http.get("/api/v1/query", params={"query": expression})
        assert answer.status_code == 200, (expression, answer.text)
        found: list[dict[str, Any]] = answer.json()["data"]["result"]
        return found

    def has_data(self, expression: str) -> bool:
        return any(not math.isnan(float(each["value"][1])) for each in self.query(expression))

    def rules(self) -> list[dict[str, Any]]:
        groups = self._http.get("/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def close(self) -> None:
        self._http.close()


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[Prometheus]:
    """The committed example, with another target and without waiting 15 s for each sample."""
    folder.mkdir()
    shutil.copy(MONITORING / "rules.yml", folder)
    example = (MONITORING / "prometheus.yml").read_text()
    assert example.count("127.0.0.1:9464") == 1
    config = example.replace("127.0.0.1:9464", target).replace("interval: 15s", "interval: 1s")
    (folder / "prometheus.yml").write_text(config)
    port = free_port()
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    found = Prometheus(f"http://127.0.0.1:{port}")
    try:
        eventually("Prometheus is ready", found.is_ready, PATIENCE_S)
        yield found
    finally:
        found.close()
        process.terminate()
        process.wait(PATIENCE_S)


class Worker:
    """A node with a GPU that runs every task at once; `work` leaves something to observe of each kind."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._agent: ScriptedAgent = pool.scripted("worker", 2)
        self._agent.connect()
        self._agent.send(OfferChanged(replace(offer(2), gpus=(GPU,))))
        self._done = 0
        self._beats = 100
        self.node = self._agent.badge.identity.node

    def work(self) -> None:
        self._pool.submit("true")
        self._done += 1
        lease = self._agent.granted(self._done)[-1]
        self._agent.report(Started(lease.task, lease.epoch))
        ended = Finished(lease.task, lease.epoch, EndReason.EXITED, 0, duration_us=1)
        self._agent.report(ended)
        self._beats += 1
        self._agent.send(Beat(self._beats, (), (GpuReading(0, 50, 9 * GIB, 400_000, 61),)))
        self._agent.awaited(BeatSeen)

    def close(self) -> None:
        self._agent.close()


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[tuple[Pool, str]]:
    address = f"127.0.0.1:{free_port()}"
    pool = Pool(tmp_path, {**LONG_LEASE, "GPOOL_SERVER_METRICS_LISTEN": address})
    try:
        pool.start(agents=())
        yield pool, address
    finally:
        pool.stop()


def test_every_query_of_the_dashboards_returns_data(
    listening: tuple[Pool, str], require: Callable[[str], None], tmp_path: Path
) -> None:
    require("prometheus")
    pool, address = listening
    worker = Worker(pool)
    queries = {
        query.expression.replace(RANGE, "1m").replace(NODE, worker.node)
        for page in PAGES
        for query in page.queries
    }
    with prometheus(tmp_path / "prometheus", address) as found:
        missing = set(queries)

        def all_answered() -> bool:
            worker.work()
            missing.difference_update([query for query in missing if found.has_data(query)])
            return not missing

        try:
            eventually("every query returns data", all_answered, PATIENCE_S, every_s=0.5)
        finally:
            worker.close()
        assert missing == set()
        assert not found.has_data("gpool_no_such_metric")  # control
        [up] = found.query('up{job="gpool"}')
        assert up["value"][1] == "1"

        def are_evaluated() -> bool:
            rules = found.rules()
            assert [rule["name"] for rule in rules] == [rule.name for rule in RULES]
            assert [rule["name"] for rule in rules if rule["health"] == "err"] == []
            return all(rule["health"] == "ok" for rule in rules)

        eventually("every rule is evaluated", are_evaluated, PATIENCE_S, every_s=0.5)
        firing = {rule["name"] for rule in found.rules() if rule["state"] == "firing"}
        assert firing == set()
    assert pool.json("admin", "alerts")["evaluated_at"] is not None


def test_the_listener_serves_metrics_without_a_key_and_nothing_else(
    listening: tuple[Pool, str],
) -> None:
    pool, address = listening
    with httpx2.Client(trust_env=False, timeout=PATIENCE_S) as http:
        page = http.get(f"http://{address}/metrics")
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert "gpool_leader 1.0" in page.text
        assert http.get(f"http://{address}/v1/me").status_code == 404
        assert http.post(f"http://{address}/metrics").status_code == 404
        assert http.get(f"{pool.address}/metrics").status_code == 401  # control


def test_the_committed_dashboards_are_current_and_valid() -> None:
    for page in PAGES:
        text = (MONITORING / "grafana" / f"{page.name}.json").read_text()
        assert text == as_json(page), "run make docs"
        document = json.loads(text)
        assert document["uid"] == f"gpool-{page.name}"
        shown = [panel for panel in document["panels"] if panel["type"] != "row"]
        assert [target["expr"] for panel in shown for target in panel["targets"]] == [
            query.expression for query in page.queries
        ]
