"""Replicas of one pool: several server processes on one PostgreSQL, each at a database address of its own, behind nginx.

Faults are methods: kill, stop, cut off. For tests and benchmarks; ends only what it started, by pid.
"""

from __future__ import annotations

import re
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from gpool.server.settings import Settings
from gpool.transfer.keys import fingerprint_of
from gpool.transfer.requests import Address
from tests.tools.load_balancers import nginx, program, running, write_certificate
from tests.tools.postgres_cluster import Cluster, cluster
from tests.tools.processes import PATIENCE_S, NeverHappened, Pool, eventually, free_port

OBSERVER = "127.0.0.1"
"""The harness's own address of the database: never cut off."""

LEADER = """
    SELECT a.application_name FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
    WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 AND a.application_name LIKE 'gpool server, process %'
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
TABLE = "gpool_cut"


def database_hosts(count: int) -> list[str]:
    return [f"127.0.1.{number}" for number in range(1, count + 1)]


@dataclass(slots=True)
class ReplicaSet:
    """`start` the replicas; `address` is nginx's. `tree`: source tree the next started replicas run, None: this one."""

    folder: Path
    database: Cluster
    hosts: Sequence[str]
    settings: Mapping[str, str]
    tree: Path | None = None
    port: int = field(default_factory=free_port)
    replicas: list[Pool] = field(default_factory=list)
    certificate: Path = Path()

    def make(self) -> None:
        """Prepare the processes, without starting them."""
        self.certificate = write_certificate(self.folder / "tls")
        for number, host in enumerate(self.hosts):
            given = {
                **self.settings,
                "GPOOL_SERVER_DATABASE_URL": self.database.url(host),
                "GPOOL_SERVER_PUBLIC_URL": self.address,
                "GPOOL_SERVER_TRUSTED_PROXIES": "127.0.0.1",
                "SSL_CERT_FILE": str(self.certificate),
            }
            pool = Pool(self.folder, given)
            pool.server.log = self.folder / f"replica{number}.log"
            self.replicas.append(pool)

    @property
    def address(self) -> str:
        return f"https://localhost:{self.port}"

    @property
    def pinned(self) -> Address:
        """nginx's address with the fingerprint of its certificate."""
        pem = self.certificate.read_text()
        der = ssl.PEM_cert_to_DER_cert(pem[pem.index("-----BEGIN CERTIFICATE") :])
        return Address(self.address, fingerprint_of(der))

    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.certificate))

    def direct(self) -> Settings:
        """Settings of a server on the same data and database, for what has to be written before the replicas start."""
        return Settings(data=self.folder / "data", database_url=self.database.url(OBSERVER))

    def start(self, number: int) -> float:
        """Start a replica; return the seconds until it was ready."""
        pool = self.replicas[number]
        if self.tree is not None:
            environment = {**pool.server.environment, "PYTHONPATH": str(self.tree / "src")}
        else:
            environment = {k: v for k, v in pool.server.environment.items() if k != "PYTHONPATH"}
        pool.server.environment = environment
        return pool.start_server()

    def start_all(self) -> None:
        for number in range(len(self.replicas)):
            self.start(number)

    def stop(self) -> None:
        with ExitStack() as stack:
            for pool in self.replicas:
                stack.callback(pool.stop)

    @contextmanager
    def balanced(self, connections: int) -> Iterator[None]:
        """nginx in front of the replicas; it is ready when the first one is."""
        ports = [pool.port for pool in self.replicas]
        words = nginx(self.folder / "tls", self.port, ports, connections)
        with (
            running(words, self.folder / "nginx.log") as proxy,
            httpx2.Client(verify=self.context(), trust_env=False, timeout=PATIENCE_S) as client,
        ):

            def answers() -> bool:
                if proxy.poll() is not None:
                    raise NeverHappened("nginx ended; its output is in nginx.log")
                try:
                    return client.get(f"{self.address}/readyz").status_code == 200
                except httpx2.TransportError:
                    return False

            eventually("nginx serves", answers, PATIENCE_S)
            over = threading.Event()
            monitor = threading.Thread(target=self._monitor, args=(over,), name="monitor")
            monitor.start()
            try:
                yield
            finally:
                over.set()
                monitor.join()

    def _monitor(self, over: threading.Event) -> None:
        """Ask /readyz through nginx each second, as the shipped configuration wants it."""
        with httpx2.Client(verify=self.context(), trust_env=False, timeout=30.0) as client:
            while not over.wait(1.0):
                with suppress(httpx2.TransportError):
                    client.get(f"{self.address}/readyz")

    # ---- the leader

    def leader(self) -> int | None:
        """Number of the replica whose process has the lock; None: nobody, or the database does not answer."""
        try:
            held = self.database.psql(LEADER)
        except subprocess.CalledProcessError:
            return None
        found = re.search(r"process (\d+) on", held)
        pids = [pool.server.pid if pool.server.is_running else 0 for pool in self.replicas]
        return pids.index(int(found[1])) if found and int(found[1]) in pids else None

    def until_led(self, within_s: float = PATIENCE_S) -> int:
        eventually("a replica leads", lambda: self.leader() is not None, within_s, every_s=0.1)
        number = self.leader()
        return self.until_led(within_s) if number is None else number

    # ---- faults

    def kill(self, number: int) -> None:
        self.replicas[number].server.kill()

    def freeze(self, number: int) -> None:
        self.replicas[number].server.signal(signal.SIGSTOP)

    def thaw(self, number: int) -> None:
        self.replicas[number].server.signal(signal.SIGCONT)

    def terminate(self, number: int) -> int | None:
        """SIGTERM, and wait for its end; return the exit code."""
        server = self.replicas[number].server
        server.signal(signal.SIGTERM)
        eventually("the replica ends", lambda: not server.is_running, PATIENCE_S)
        return server.exit_code

    @contextmanager
    def cut_off(self, number: int) -> Iterator[None]:
        """Drop all packets between the replica and the database. Only in a network namespace of our own: see `isolated`."""
        with dropped(self.hosts[number], self.database.port):
            yield

    def said(self, number: int) -> str:
        return self.replicas[number].server.said()


@contextmanager
def dropped(host: str, port: int) -> Iterator[None]:
    """Drop all packets of TCP connections to that address, in both directions. Only in a namespace of our own: `isolated`."""
    rules = f"""
    table inet {TABLE} {{
        chain out {{
            type filter hook output priority 0
            ip daddr {host} tcp dport {port} drop
            ip saddr {host} tcp sport {port} drop
        }}
    }}
    """
    nft = program("nft")
    subprocess.run([nft, "-f", "-"], input=rules, text=True, check=True)
    try:
        yield
    finally:
        subprocess.run([nft, "delete", "table", "inet", TABLE], check=True)


def isolated() -> list[str]:
    """Command that runs its arguments in network and process namespaces of their own, with loopback alone. Needs root.

    Everything in them ends with the command, however it ends.
    """
    words = 'ip link set lo up && exec "$@"'
    kinds = ["--net", "--pid", "--fork", "--mount-proc", "--kill-child"]
    return ["unshare", *kinds, "--", "sh", "-c", words, "sh"]


def is_isolated() -> bool:
    """Whether this process sees loopback alone."""
    return [name for _, name in socket.if_nameindex()] == ["lo"]


@contextmanager
def replica_set(
    folder: Path, count: int, settings: Mapping[str, str], tree: Path | None = None
) -> Iterator[ReplicaSet]:
    """A database and replicas that are not started."""
    hosts = database_hosts(count)
    with cluster([OBSERVER, *hosts]) as database:
        found = ReplicaSet(folder, database, hosts, settings, tree)
        found.make()
        try:
            yield found
        except BaseException as error:
            error.add_note(story(folder))
            raise
        finally:
            found.stop()


def story(folder: Path) -> str:
    logs = sorted(folder.glob("*.log"))
    return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)


def wall_clock() -> float:
    """Seconds of the time of day: the clock of the database's `clock_timestamp()` on the same machine."""
    return time.clock_gettime(time.CLOCK_REALTIME)
