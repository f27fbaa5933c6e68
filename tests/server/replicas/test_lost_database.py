"""A server whose database is gone sends its nodes elsewhere at once, and takes them again when the database is back."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import httpx2

from gpool.wire.frames import Beat, Refused
from tests.tools.postgres_cluster import cluster
from tests.tools.processes import LONG_LEASE, PATIENCE_S, Pool, eventually


def test_a_node_is_refused_for_now_when_its_heartbeat_cannot_be_stored(
    tmp_path: Path, require: Callable[[str], None]
) -> None:
    require("postgres")
    with cluster(["127.0.0.1"]) as database:
        given = {**LONG_LEASE, "GPOOL_SERVER_DATABASE_URL": database.url("127.0.0.1")}
        pool = Pool(tmp_path, given)
        try:
            pool.start_server()
            agent = pool.scripted("first", cpus=1)
            agent.connect()
            assert agent.beat().number == 2  # control
            database.stop(signal.SIGQUIT)
            agent.send(Beat(3, ()))
            refused = agent.awaited(Refused)
            assert (refused.code, refused.retry) == ("unreachable", True)
            database.start()
            eventually("it is ready", lambda: is_ready(pool), PATIENCE_S)
            agent.connect()
            assert pool.online() == ["first"]
            agent.close()
        finally:
            pool.stop()


def is_ready(pool: Pool) -> bool:
    return httpx2.get(f"{pool.address}/readyz", trust_env=False).status_code == 200
