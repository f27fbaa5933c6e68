"""Real PgBouncer before a real PostgreSQL: sessions of one's own are accepted, shared ones refused by name."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.store.conftest import Server
from tests.store.test_migrate_only import migrate
from tests.tools.processes import PATIENCE_S, Pool, eventually, free_port

SETTINGS = """
[databases]
* = host={host} user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
auth_type = any
unix_socket_dir =
logfile = {folder}/log
pool_mode = {mode}
default_pool_size = {size}
"""


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def pooled(url: str, mode: str, size: int = 20) -> Iterator[str]:
    """The same database through PgBouncer, which runs as PostgreSQL's user: it must reach the socket and not be root."""
    parts = urlsplit(url)
    host = parse_qs(parts.query)["host"][0]
    port, user = free_port(), Path(host).owner()
    folder = tempfile.mkdtemp(prefix="gpool-pgbouncer-")
    file = Path(folder, "pgbouncer.ini")
    file.write_text(SETTINGS.format(host=host, port=port, folder=folder, mode=mode, size=size))
    if os.geteuid() == 0:
        shutil.chown(folder, user)
    path = os.environ.get("PATH", "") + ":/usr/sbin"
    program = shutil.which("pgbouncer", path=path)
    assert program is not None
    switch = ["-u", user] if os.geteuid() == 0 else []
    with subprocess.Popen([program, "-q", *switch, str(file)], stderr=subprocess.DEVNULL) as child:
        try:
            eventually("PgBouncer listens", lambda: answers(port), PATIENCE_S)
            yield f"postgresql://postgres@127.0.0.1:{port}{parts.path}"
        finally:
            child.terminate()
            child.wait()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def database(
    require: Callable[[str], None], postgres_server: Server, postgres: Callable[..., str]
) -> str:
    require("pgbouncer")
    return postgres()


def test_a_server_works_behind_pgbouncer_in_session_mode(database: str, tmp_path: Path) -> None:
    with pooled(database, "session") as url:
        pool = Pool(tmp_path, {"GPOOL_SERVER_DATABASE_URL": url})
        try:
            pool.start_server()
            task = pool.submit("true")
            assert pool.status(task)["status"] == "queued"
        finally:
            pool.stop()


@pytest.mark.parametrize(
    ("mode", "size", "words"),
    [
        ("transaction", 20, "gives a session to several clients"),
        ("session", 1, "gave no second session within"),
        ("statement", 20, "refused a transaction"),
    ],
)
def test_a_pooler_without_sessions_of_ones_own_is_refused_with_the_reason(
    database: str, tmp_path: Path, mode: str, size: int, words: str
) -> None:
    with pooled(database, mode, size) as url:
        pool = Pool(tmp_path, {"GPOOL_SERVER_DATABASE_URL": url})
        try:
            pool.server.start()
            eventually("the server ends", lambda: not pool.server.is_running, PATIENCE_S)
            said = pool.server.said()
        finally:
            pool.stop()
        assert words in said
        assert "pool_mode = session" in said
        assert "Traceback" not in said
        refused = migrate(tmp_path, url)
        assert (refused.returncode, words in refused.stderr) == (2, True), refused.stderr
