"""Two server processes on one PostgreSQL database behave as one; when the leader is killed, the other goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

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
