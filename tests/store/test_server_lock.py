"""One server at a time on an SQLite database: real processes. Servers on PostgreSQL are replicas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.tools.processes import PATIENCE_S, Pool, eventually


@contextmanager
def served(folder: Path, url: str, *names: str) -> Iterator[list[Pool]]:
    """Servers with one data directory and one database; none is started yet."""
    settings = {"GPOOL_SERVER_DATABASE_URL": url, "GPOOL_SERVER_TTL_S": "120"}
    pools = [Pool(folder, settings) for _ in names]
    for pool, name in zip(pools, names, strict=True):
        pool.server.log = folder / f"{name}.log"
    try:
        yield pools
    finally:
        for pool in pools:
            pool.stop()


def ended(pool: Pool) -> str:
    """Wait until the server has ended by itself, and return its output."""
    eventually("the server ends", lambda: not pool.server.is_running, PATIENCE_S)
    return pool.server.said()


def test_a_second_server_on_sqlite_refuses_to_start_until_the_first_is_killed(
    tmp_path: Path,
) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    with served(tmp_path, url, "first", "second") as (first, second):
        first.start_server()
        second.server.start()
        said = ended(second)
        assert second.server.exit_code == 1
        assert f"process {first.server.pid} on" in said
        assert "stop that server first" in said
        assert "Traceback" not in said
        assert first.ask("GET", "/v1/nodes").status_code == 200
        first.server.kill()
        second.start_server()
        second.server.stop()
        first.start_server()  # after an orderly stop, too
