"""Tasks per second with one, two and three replicas on PostgreSQL, beside one server on SQLite; cost of a task in each.

    python -m bench.replica_throughput [--seconds 20] [--agents 120] [--full] [--quick] [--json FILE]

Agents are real channels and state machines in one process, spread over the replicas; consumers submit to all of them
in turn, never more than `WINDOW` tasks ahead of the results. Counted from the second third of each run on: tasks that
ended, processor time of all servers and of all database processes, bytes between servers and database (nftables
counters) and of the write-ahead log. Statements are counted afterwards, from PostgreSQL's log, while fewer tasks run.

Runs in a network namespace of its own (root). `--json FILE` is written after each kind; a run with the same sizes and
file continues after the last one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import uvloop
from bench.doors import Door

from gpool.server.settings import Settings
from gpool.transfer.requests import Address
from tests.tools.load_balancers import program
from tests.tools.postgres_cluster import Cluster, cluster
from tests.tools.processes import Pool, cpu_s
from tests.tools.replica_set import OBSERVER, database_hosts, is_isolated, isolated
from tests.tools.simulated_agents import Agents, AgentsPlan, raise_open_files
from tests.tools.simulated_pool import register

GROWS = 1.3
"""Most that a task may cost with three replicas beside one."""
HATCHET_PER_CORE = 250
"""Tasks per second and database core that Hatchet publishes: 2,000 on 8 cores."""
CPUS = 4
CONSUMERS = 8
CONNECTIONS = 3  # of each consumer to each replica
PER_REQUEST = 10
WINDOW = 1500
HOLD_S = (0.05, 0.15)
COUNTERS = "gpool_bytes"
COUNTED_S = 4.0
KINDS = ("SQLite", "1 replica", "2 replicas", "3 replicas")


@dataclass(frozen=True, slots=True)
class Cost:
    """Figures of one kind. Of a task: processor time of servers and database, statements, bytes."""

    kind: str
    tasks_per_s: float
    server_cpu_ms: float
    database_cpu_ms: float
    statements: float
    wire_bytes: float
    log_bytes: float
    tasks_per_database_core: float
    agents_cpu_ms: float
    refused: int  # submissions, because of an overload; they were repeated
    load: float


@dataclass(frozen=True, slots=True)
class Sizes:
    agents: int
    seconds: float


# ---- counters of the database


@contextmanager
def byte_counters(port: int) -> Iterator[None]:
    """Count bytes from and to the database's port in this network namespace."""
    rules = f"""
    table inet {COUNTERS} {{
        counter both {{ }}
        chain out {{
            type filter hook output priority 0
            tcp dport {port} counter name "both"
            tcp sport {port} counter name "both"
        }}
    }}
    """
    nft = program("nft")
    subprocess.run([nft, "-f", "-"], input=rules, text=True, check=True)
    try:
        yield
    finally:
        subprocess.run([nft, "delete", "table", "inet", COUNTERS], check=True)


def wire_bytes() -> int:
    words = [program("nft"), "-j", "list", "counter", "inet", COUNTERS, "both"]
    found = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    return int(next(each["counter"]["bytes"] for each in found["nftables"] if "counter" in each))


def log_bytes(database: Cluster) -> int:
    return int(database.psql("SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')"))


def set_statement_log(database: Cluster, value: str) -> None:
    database.psql(f"ALTER SYSTEM SET log_statement = '{value}'")
    database.psql("SELECT pg_reload_conf()")
    threading.Event().wait(0.5)  # the processes read it between two statements


def logged_statements(log: Path) -> int:
    text = log.read_text(errors="replace")
    return sum(
        " LOG:  execute " in line or " LOG:  statement: " in line for line in text.splitlines()
    )


# ---- the load


class Flood:
    """Submissions to all servers in turn, at most `WINDOW` tasks ahead of the results."""

    def __init__(self, addresses: Sequence[str], keys: Sequence[str], agents: Agents) -> None:
        self._addresses, self._keys, self._agents = addresses, keys, agents
        self.sent = 0
        self.refused = 0  # because of an overload; sent again after Retry-After
        self._ended = 0

    async def run(self, seconds: float) -> None:
        doors = [
            Door(address, key, keyed=True)
            for _ in range(CONNECTIONS)
            for key in self._keys
            for address in self._addresses
        ]
        body = json.dumps({"command": ["true"], "copies": PER_REQUEST}).encode()
        loop = asyncio.get_running_loop()
        ends = loop.time() + seconds

        async def one(door: Door) -> None:
            while loop.time() < ends:
                if self.sent - self._ended > WINDOW:
                    await asyncio.sleep(0.01)
                    continue
                self.sent += PER_REQUEST
                await door.submit(body)

        async def look() -> None:
            while loop.time() < ends:
                self._ended = (await asyncio.to_thread(self._agents.seen)).accepted
                await asyncio.sleep(0.05)

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(look())
                for door in doors:
                    group.create_task(one(door))
        finally:
            for door in doors:
                self.refused += door.refusals
                door.close()
            await asyncio.sleep(0.1)

    def drain(self) -> None:
        while self._agents.seen().accepted < self.sent:
            threading.Event().wait(0.2)


@dataclass(frozen=True, slots=True)
class Point:
    """Readings at one moment."""

    at: float
    ended: int
    servers_s: float
    database_s: float
    agents_s: float
    wire: int
    log: int


class Bench:
    def __init__(self, pools: Sequence[Pool], agents: Agents, database: Cluster | None) -> None:
        self._pools, self._agents, self._database = pools, agents, database

    def point(self) -> Point:
        database = self._database
        return Point(
            monotonic(),
            self._agents.seen().accepted,
            sum(pool.server.cpu_s() for pool in self._pools),
            0.0 if database is None else database.cpu_s(),
            cpu_s(self._agents.pid),
            0 if database is None else wire_bytes(),
            0 if database is None else log_bytes(database),
        )

    def measure(self, kind: str, keys: Sequence[str], seconds: float) -> Cost:
        flood = Flood([pool.address for pool in self._pools], keys, self._agents)
        points: list[Point] = []

        async def watched() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(flood.run(seconds))
                await asyncio.sleep(seconds / 3)
                points.append(await asyncio.to_thread(self.point))
                await asyncio.sleep(seconds * 2 / 3 - 0.5)
                points.append(await asyncio.to_thread(self.point))

        uvloop.run(watched())
        flood.drain()
        first, last = points
        tasks = max(1, last.ended - first.ended)
        database_s = last.database_s - first.database_s
        return Cost(
            kind,
            round(tasks / (last.at - first.at), 1),
            round((last.servers_s - first.servers_s) / tasks * 1e3, 3),
            round(database_s / tasks * 1e3, 3),
            round(self._statements(keys), 2),
            round((last.wire - first.wire) / tasks),
            round((last.log - first.log) / tasks),
            round(tasks / database_s, 1) if database_s else 0.0,
            round((last.agents_s - first.agents_s) / tasks * 1e3, 3),
            flood.refused,
            round(os.getloadavg()[0], 1),
        )

    def _statements(self, keys: Sequence[str]) -> float:
        """Statements a task, of a run of its own: writing the log costs time."""
        database = self._database
        if database is None:
            return 0.0
        set_statement_log(database, "all")
        before, ended = logged_statements(database.log), self._agents.seen().accepted
        flood = Flood([pool.address for pool in self._pools], keys, self._agents)
        flood.sent = self._agents.seen().accepted
        uvloop.run(flood.run(COUNTED_S))
        flood.drain()
        after = logged_statements(database.log)
        set_statement_log(database, "none")
        return (after - before) / max(1, self._agents.seen().accepted - ended)


def measured(folder: Path, kind: str, sizes: Sizes) -> Cost:
    count = 1 if kind == "SQLite" else int(kind.split()[0])
    hosts = database_hosts(count)
    with ExitStack() as stack:
        database = None
        data, given = folder / "data", {"GPOOL_SERVER_TTL_S": "300"}
        if kind != "SQLite":
            options = {"log_parameter_max_length": "0", "log_line_prefix": "%p "}
            database = stack.enter_context(cluster([OBSERVER, *hosts], options))
            stack.enter_context(byte_counters(database.port))
        folder.mkdir()
        url = None if database is None else database.url(OBSERVER)
        settings = Settings(data=data, database_url=url)
        registered = asyncio.run(register(settings, sizes.agents, CPUS, CONSUMERS))
        pools = []
        for number, host in enumerate(hosts):
            own = {} if database is None else {"GPOOL_SERVER_DATABASE_URL": database.url(host)}
            pool = Pool(folder, {**given, **own})
            pool.server.log = folder / f"server{number}.log"
            stack.callback(pool.stop)
            pool.start_server()
            pools.append(pool)
        addresses = [Address(pool.address) for pool in pools]
        crowd = Agents(AgentsPlan(addresses, registered.nodes, HOLD_S, folder / "agents.log"))
        stack.callback(crowd.stop)
        crowd.ready()
        return Bench(pools, crowd, database).measure(kind, registered.keys, sizes.seconds)


# ---- results


COSTS = ("server_cpu_ms", "database_cpu_ms", "statements", "wire_bytes", "log_bytes")


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """Cost of a task with three replicas beside one; `cpu_ms`: servers and database together."""
    one, three = found.get(KINDS[1]), found.get(KINDS[3])
    if one is None or three is None:
        return {}
    cpu = [each["server_cpu_ms"] + each["database_cpu_ms"] for each in (one, three)]
    grown = {name: round(three[name] / one[name], 2) for name in COSTS if one[name]}
    return {"cpu_ms": round(cpu[1] / cpu[0], 2), **grown}


PROMISED = ("cpu_ms", "statements", "wire_bytes")


def row(each: dict[str, Any]) -> str:
    return (
        f"| {each['kind']} | {each['tasks_per_s']:g} | {each['server_cpu_ms']:g} | {each['database_cpu_ms']:g} "
        f"| {each['statements']:g} | {each['wire_bytes']:g} | {each['log_bytes']:g} "
        f"| {each['tasks_per_database_core']:g} | {each['agents_cpu_ms']:g} | {each['refused']} |"
    )


def run_all(options: argparse.Namespace, sizes: Sizes) -> int:
    rows: dict[str, Any] = {"sizes": asdict(sizes), "kinds": {}}
    if options.json and options.json.exists():
        known = json.loads(options.json.read_text())
        rows = known if known.get("sizes") == rows["sizes"] else rows
    print(f"{sizes.agents} agents, load {os.getloadavg()[0]:.1f}\n")
    print(
        "| | tasks/s | servers, CPU ms a task | database, CPU ms | statements | bytes on the wire | bytes of log "
        f"| tasks/s and database core (Hatchet: {HATCHET_PER_CORE}) | agents, CPU ms | refused |\n"
        "|---|---|---|---|---|---|---|---|---|---|",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        for number, kind in enumerate(KINDS):
            if kind not in rows["kinds"]:
                found = measured(Path(folder) / str(number), kind, sizes)
                rows["kinds"][kind] = asdict(found)
            print(row(rows["kinds"][kind]), flush=True)
            rows["three_beside_one"] = ratios(rows["kinds"])
            if options.json:
                options.json.write_text(json.dumps(rows, indent=2) + "\n")
    grown = rows["three_beside_one"]
    print("\nthree replicas beside one: " + ", ".join(f"{k} {v:g}×" for k, v in grown.items()))
    short = [name for name in PROMISED if grown.get(name, 0.0) > GROWS]
    for name in short:
        print(f"falls short: {name} grows {grown[name]:g}×, promised ≤ {GROWS:g}×")
    return 1 if short else 0


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--agents", type=int, default=120)
    asked.add_argument("--seconds", type=float, help="of each kind; default 12, with --full 60")
    asked.add_argument("--full", action="store_true", help="a minute of each kind")
    asked.add_argument("--quick", action="store_true", help="12 seconds of each kind (default)")
    asked.add_argument("--json", type=Path)
    options = asked.parse_args()
    is_full = options.full and not options.quick
    if not is_isolated():
        if os.geteuid():
            print("not run: it needs root, for a network namespace of its own")
            return 0
        words = [*isolated(), sys.executable, "-m", "bench.replica_throughput", *sys.argv[1:]]
        os.execvp(words[0], words)
    raise_open_files()
    return run_all(options, Sizes(options.agents, options.seconds or (60.0 if is_full else 12.0)))


if __name__ == "__main__":
    sys.exit(main())
