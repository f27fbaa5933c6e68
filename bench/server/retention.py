"""Thirty days of use in simulated time: what is stored must stop growing once the retention time has passed.

python -m bench.retention [--days 30] [--tasks 5000] [--keep 7] [--postgres] [--encrypt] [--quick] [--json FILE]

The real store and server code in one process, by its HTTP interface and the frames of an agent; the clock is moved four
hours at a time, and the loops run in each step. Five users sign in every day and run tasks: 98 % are calls with arguments, a
value and, one in fifty, output; one in a hundred fails and is tried again; 2 % are commands with an input and an output
file, a log and a checkpoint. Everything is kept for `--keep` days. Printed for each day: bytes of the database (with
its write-ahead log) and of the artifact folder, resident memory of the process, rows of all tables. The run fails if
one of them is more than 1.05 times as large on the last day as in the middle.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import ctypes
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

from bench.growth import postgres

from gpool.core.model import GIB, EndReason
from gpool.server.app import close_server
from gpool.server.scheduling.loops import MaintainIdentity, all_loops
from gpool.server.store import identity_schema, schema  # noqa: F401 - they fill the metadata
from gpool.server.store.operations.events import tables as event_tables  # noqa: F401 - likewise
from gpool.server.store.protocol import Operation, operation
from gpool.server.store.rows import values
from gpool.server.store.schema_columns import metadata
from gpool.wire.frames import Finished, Lease, LogChunk
from tests.server.actions.test_retention import a_day_of
from tests.server.identity_routes.people_desk import Somebody, registered, signed_in
from tests.server.server_desk import (
    FUNCTION,
    FUNCTION_SHA256,
    Agent,
    Desk,
    StoppedClock,
    an_offer,
    open_desk,
)

DAY_S = 86_400
STEPS = 6
USERS = ("ada", "bob", "cid", "dan", "eve")
COMMANDS = 50  # one task in so many is a command with files
AT_ONCE = 200  # calls of one submission
MOST = 1.05
LOOPS = frozenset({"prune", "retention", "keys", "usage", "merits", "identity"})


@dataclass(frozen=True, slots=True)
class Sizes:
    day: int
    database_bytes: int
    folder_bytes: int
    files: int
    memory_bytes: int
    rows: dict[str, int]

    @property
    def measures(self) -> dict[str, int]:
        named = ("database_bytes", "folder_bytes", "files", "memory_bytes")
        tables = {f"rows of {table}": count for table, count in self.rows.items()}
        return {name: getattr(self, name) for name in named} | tables


@operation
def _rows() -> Operation[dict[str, int]]:
    found: dict[str, int] = {}
    for table in sorted(metadata.tables):
        [count] = yield from values(int, f"SELECT COUNT(*) FROM {table}")  # noqa: S608
        found[table] = int(count)
    return found


def resident() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def sizes(desk: Desk, day: int, url: str | None) -> Sizes:
    data = desk.server.settings.data
    if url is None:
        database = sum(path.stat().st_size for path in data.glob("gpool.db*"))
    else:
        connection = await import_module("asyncpg").connect(url)
        await connection.execute("VACUUM")  # autovacuum is off in the server of the tests
        database = await connection.fetchval("SELECT pg_database_size(current_database())")
        await connection.close()
    files = [path for path in (data / "artifacts").rglob("*") if path.is_file()]
    rows = await desk.server.store.read(_rows())
    stored = sum(path.stat().st_size for path in files)
    return Sizes(day, database, stored, len(files), resident(), rows)


async def calls(who: Somebody, agent: Agent, count: int, dice: Random) -> None:
    desk = who.desk
    payloads = [base64.b64encode(dice.randbytes(150)).decode() for _ in range(count)]
    document = {
        "function": {"sha256": FUNCTION_SHA256, "python": "3.11"},
        "calls": payloads,
        "retries": 1,
    }
    key = {"Idempotency-Key": dice.randbytes(12).hex()}
    answer = await who.ask("POST", "/v1/tasks", document, headers=key)
    assert answer.status_code == 202, answer.text
    ended = 0
    while ended < count:
        await desk.schedule()
        leases = agent.leases()
        agent.sent.clear()
        for first in range(0, len(leases), 200):
            await agent.report(*_ends(leases[first : first + 200], dice))
        ended += sum(not _fails(lease) for lease in leases)


def _fails(lease: Lease) -> bool:
    return lease.epoch == 1 and lease.task % 100 == 0


def _ends(leases: list[Lease], dice: Random) -> Iterator[Finished | LogChunk]:
    for lease in leases:
        task, epoch = lease.task, lease.epoch
        if _fails(lease):
            yield Finished(task, epoch, EndReason.RAISED, error_text="ValueError: " + "x" * 200)
            continue
        if task % 50 == 0:
            yield LogChunk(task, epoch, 0, 1, dice.randbytes(300))
        value = dice.randbytes(100)
        yield Finished(task, epoch, EndReason.RETURNED, value=value, duration_us=1000)


async def a_day(
    desk: Desk, agent: Agent, day: int, tasks: int, steps: int, users: Sequence[str]
) -> None:
    each = tasks // len(users)
    commands = max(1, each // COMMANDS)
    for name in users:
        who = await signed_in(desk, name)
        function = f"/v1/artifacts/{FUNCTION_SHA256}"
        await desk.bare.put(function, content=FUNCTION, headers=who.headers)
        dice, left = Random(f"{name} {day}"), each - commands
        while left > 0:
            await calls(who, agent, min(left, AT_ONCE), dice)
            left -= AT_ONCE
        for number in range(commands):
            await a_day_of(who, agent, day * 1000 + number)
            agent.sent.clear()
    loops = [loop for loop in all_loops(desk.server) if loop.name in LOOPS]
    if not any(isinstance(loop, MaintainIdentity) for loop in loops):
        raise AssertionError("the loop `identity` is missing")
    for _ in range(steps):
        desk.clock.advance(DAY_S / steps)
        for loop in loops:
            await loop.run_once(desk.server.now)
        await agent.send_beat()
        agent.sent.clear()


async def simulated(
    folder: Path,
    days: int,
    tasks: int,
    keep: float,
    url: str | None = None,
    steps: int = STEPS,
    users: Sequence[str] = USERS,
    **settings: Any,
) -> AsyncIterator[Sizes]:
    """Sizes at the end of each day."""
    kept = {
        "keep_task_data_days": keep,
        "keep_tasks_days": keep,
        "keep_audit_days": keep,
        "keep_credentials_days": keep,
        "idle_days": keep,
        "session_days": keep,
        "ttl_s": 2 * DAY_S,
        "user_storage_bytes": None,
    }
    database = {} if url is None else {"database_url": url}
    desk = await open_desk(folder, StoppedClock(), **kept, **database, **settings)
    async with desk.http, desk.bare:
        offer = replace(an_offer(cpus=10_000), memory_bytes=20_000 * GIB)
        agent = await desk.agent(offer=offer)
        for name in users:
            await registered(desk, name)
        for day in range(1, days + 1):
            await a_day(desk, agent, day, tasks, steps, users)
            yield await sizes(desk, day, url)
    await close_server(desk.server)


async def shown(days: AsyncIterator[Sizes]) -> list[Sizes]:
    found: list[Sizes] = []
    async for each in days:
        found.append(each)
        parts = (each.database_bytes, each.folder_bytes, each.memory_bytes)
        text = "  ".join(f"{size / 1e6:9.2f} MB" for size in parts)
        rows = sum(each.rows.values())
        print(f"day {each.day:2}  database, folder, memory {text}  {rows:8} rows", flush=True)
    return found


def too_large(found: list[Sizes]) -> list[str]:
    """Measures that grew between the middle and the end. A few rows more or less are no growth."""
    middle, last = found[len(found) // 2 - 1].measures, found[-1].measures
    return [
        f"{name}: {middle[name]} on day {found[len(found) // 2 - 1].day}, {last[name]} on day {found[-1].day}"
        for name in last
        if last[name] > middle[name] * MOST and last[name] - middle[name] > 8
    ]


@contextmanager
def database(is_postgres: bool) -> Iterator[str | None]:
    with ExitStack() as stack:
        yield stack.enter_context(postgres())("retention") if is_postgres else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=int, default=30)
    parser.add_argument("--tasks", type=int, default=5000, help="a day")
    parser.add_argument("--keep", type=float, default=7, help="days")
    parser.add_argument("--postgres", action="store_true")
    parser.add_argument("--encrypt", action="store_true")
    parser.add_argument("--quick", action="store_true", help="100 tasks a day")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    asked = parser.parse_args()
    tasks = 100 if asked.quick else asked.tasks
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, database(asked.postgres) as url:
        data, settings = Path(folder) / "data", {"encrypt_data": asked.encrypt}
        found = asyncio.run(shown(simulated(data, asked.days, tasks, asked.keep, url, **settings)))
    grown = too_large(found)
    middle, last = found[len(found) // 2 - 1].measures, found[-1].measures
    for name in ("database_bytes", "folder_bytes", "memory_bytes"):
        print(f"{name}: {last[name] / max(1, middle[name]):.3f} times the middle")
    print(f"{asked.days * tasks} tasks in {time.perf_counter() - began:.0f} s")
    if asked.json:
        asked.json.write_text(json.dumps([asdict(each) for each in found], indent=1))
    if grown:
        print("grew:", *grown, sep="\n  ")
        sys.exit(1)


if __name__ == "__main__":
    main()
