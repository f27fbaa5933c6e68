"""Server processes on one PostgreSQL database behave as one; when the leader is killed or stopped, another one goes on."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bench.replica_faults import FAULTS

from bench.replicas import Sizes, running_bench
from tests.tools.processes import PATIENCE_S, Pool, eventually

NEW_LEADER_S = 5.0
LEASES = {"GPOOL_SERVER_TTL_S": "12", "GPOOL_SERVER_MARGIN_S": "2", "GPOOL_SERVER_BEAT_S": "1"}
"""A lost node is noticed soon, and a busy machine may stand still for some seconds."""


@contextmanager
def two_servers(folder: Path, url: str) -> Iterator[tuple[Pool, Pool]]:
    """The first one leads. They share the data directory: keys and artifacts."""
    given = {**LEASES, "GPOOL_SERVER_DATABASE_URL": url}
    first, second = Pool(folder, given), Pool(folder, given)
    first.server.log, second.server.log = folder / "first.log", folder / "second.log"
    try:
        first.start_server()
        second.start_server()
        yield first, second
    except BaseException as error:
        error.add_note(first.story())
        raise
    finally:
        second.stop()
        first.stop()


def leaders(pool: Pool) -> list[str]:
    """Addresses of the living servers that lead."""
    found = pool.ask("GET", "/v1/admin/replicas").json()["items"]
    return [each["address"] for each in found if each["leader"] and each["alive"]]


def test_two_servers_are_one_pool_and_survive_kill_9_of_the_leader(
    postgres: Callable[[], str], tmp_path: Path
) -> None:
    with two_servers(tmp_path, postgres()) as (first, second):
        eventually("the second knows", lambda: leaders(second) == [first.address], PATIENCE_S)
        shown = first.json("admin", "replicas")
        assert [each["address"] for each in shown] == [first.address, second.address]
        assert [each["leader"] for each in shown] == [True, False]
        second.join("b")
        eventually("the first sees it", lambda: first.online() == ["b"], PATIENCE_S)
        task = first.submit("sh", "-c", "echo from b")
        done = first.ask("GET", f"/v1/tasks/{task}?wait=60").json()
        assert (done["status"], done["node_name"]) == ("succeeded", "b")
        assert "from b" in first.gpool("logs", task).stdout
        first.join("a")
        eventually("both are seen", lambda: set(second.online()) == {"a", "b"}, PATIENCE_S)
        wanted = {"command": ["sh", "-c", "sleep 0.2; echo done"], "copies": 40}
        made = [pool.ask("POST", "/v1/tasks", wanted).json() for pool in (first, second)]
        eventually("some run", lambda: is_any_running(second, made[1]["ids"][:8]), PATIENCE_S)
        first.server.kill()
        took = eventually("it leads", lambda: leaders(second) == [second.address], PATIENCE_S)
        assert took < NEW_LEADER_S
        for batch in made:
            results = second.results(batch["batch"])
            assert sorted(each["id"] for each in results) == sorted(batch["ids"])
            assert [each["sequence"] for each in results] == list(range(1, 41))
            assert {each["status"] for each in results} == {"succeeded"}


def is_any_running(pool: Pool, tasks: Iterable[str]) -> bool:
    return any(pool.status(task)["status"] == "running" for task in tasks)


def test_nodes_move_to_a_new_server_and_back_when_it_stops_and_no_task_notices(
    postgres: Callable[[], str], tmp_path: Path
) -> None:
    moving = {"GPOOL_SERVER_REBALANCE_PER_MINUTE": "1", "GPOOL_SERVER_DRAIN_S": "5"}
    given = {**LEASES, **moving, "GPOOL_SERVER_DATABASE_URL": postgres()}
    first, second = Pool(tmp_path, given), Pool(tmp_path, given)
    first.server.log, second.server.log = tmp_path / "first.log", tmp_path / "second.log"
    try:
        first.start_server()
        for name in ("a", "b"):
            first.join(name, "--server", second.address, "--slots", "1")
        tasks = [first.submit("sleep", "600") for _ in range(2)]
        for task in tasks:
            first.until_status(task, "running")
        second.start_server()
        eventually("one node moved", lambda: nodes_of(first, second) == [1, 1], PATIENCE_S)
        second.server.signal(signal.SIGTERM)
        eventually("it moved back", lambda: nodes_of(first, second) == [2, 0], PATIENCE_S)
        eventually("it ended", lambda: not second.server.is_running, PATIENCE_S)
        for task in tasks:
            shown = first.status(task)
            assert (shown["status"], shown["epoch"]) == ("running", 1)
            first.ask("DELETE", f"/v1/tasks/{task}")
            first.until_status(task, "cancelled")
    except BaseException as error:
        error.add_note(first.story())
        raise
    finally:
        second.stop()
        first.stop()


def nodes_of(asked: Pool, other: Pool) -> list[int]:
    """Numbers of nodes connected to the two servers."""
    found = asked.ask("GET", "/v1/admin/replicas").json()["items"]
    counts = {each["address"]: each["nodes"] for each in found}
    return [counts.get(pool.address, 0) for pool in (asked, other)]


THREE = Sizes(
    agents=12,
    tasks=600,
    silent_s=10.0,
    pause_s=0.5,
    ttl_s=40.0,
    beat_s=2.0,
    drain_s=1.0,
    replica_timeout_s=5.0,
    haste=8.0,
    times=1,
)
"""A lost replica is noticed soon; a machine that stands still for half a minute loses no node."""


@pytest.mark.slow
def test_three_servers_behind_nginx_lose_no_task_and_no_node_to_faults(
    tmp_path: Path, require: Callable[[str], None]
) -> None:
    require("postgres")
    require("nginx")
    with running_bench(tmp_path / "pool", THREE) as bench:
        for name in ("kill-leader", "database", "freeze"):
            outcome = bench.measure(name, FAULTS[name], 100)
            assert outcome.short_of() == [], outcome
            assert outcome.acknowledged == 100
