"""What stays the same while a pool grows: a scheduling pass, a submission, a look at a task, the start of a server.

    python -m bench.growth [--rows 1000000] [--postgres] [--quick] [--json FILE]

A pass is measured in processor time over the scheduling state alone; the rest over HTTP against two servers of the same
kind, one with a thousand ended tasks in its store and one with a million, asked in turns. Best of several.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

from bench import planner
from gpool.core.ids import BatchId, SpecId, TaskId, UserId, encode
from gpool.core.model import Instant, Permission, TaskKind, TaskSpec
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.passes.plan import plan
from gpool.core.scheduler.place.index import PlacementIndex
from gpool.server.clock import SystemClock, system_ids
from gpool.server.first_start import OPERATOR
from gpool.server.store import open_store
from gpool.server.store.operations.identity import users
from gpool.server.store.operations.tasks import submissions, tasks
from gpool.server.store.operations.tasks.submissions import NewTask, Submission
from gpool.server.store.values import User
from tests.tools.postgres import postgres as own_postgres
from tests.tools.processes import Pool

FEW = 1000
QUEUED = 100_000
SHAPES = 10
CHUNK = 10_000
PROMISED = 2.0
START_PROMISED_S = 2.0
TRUE = TaskSpec(TaskKind.COMMAND, "true", command=("true",))


@dataclass(frozen=True, slots=True)
class Cost:
    """The best time with few and with many, in microseconds."""

    what: str
    few: int
    many: int
    few_us: float
    many_us: float

    @property
    def grows_by(self) -> float:
        return self.many_us / self.few_us


# ---- a pass


def passes(rounds: int, nodes: int) -> Cost:
    few, many = (planner.pool(count, SHAPES, nodes) for count in (FEW, QUEUED))
    policy = Policy(order="fcfs")
    timed = [
        [
            planner.best(partial(plan, state, PlacementIndex(), planner.NOW, policy), 5)
            for state in (few, many)
        ]
        for _ in range(rounds)
    ]
    best = [round(min(column) * 1e6, 1) for column in zip(*timed, strict=True)]
    return Cost(f"a pass, {SHAPES} shapes, {nodes} nodes: tasks queued", FEW, QUEUED, *best)


# ---- servers with a history


async def fill(url: str, rows: int) -> list[TaskId]:
    """A store with an operator who has `rows` ended tasks; some of their ids."""
    store = await open_store(url)
    clock = SystemClock()
    ids = system_ids(clock)
    user = User(UserId(ids.next()), OPERATOR, frozenset(Permission), clock.now())
    await store.write(users.create_user(user))
    kept: list[TaskId] = []
    for first in range(0, rows, CHUNK):
        new = [
            NewTask(TaskId(id_), position)
            for position, id_ in enumerate(ids.take(min(CHUNK, rows - first)))
        ]
        batch, spec, at = BatchId(ids.next()), SpecId(ids.next()), Instant(clock.now())
        await store.write(
            submissions.submit([Submission(batch, True, True, spec, TRUE, user.id, new, at)])
        )
        await store.write(tasks.cancel([task.id for task in new], None, at))
        kept += [task.id for task in new[:: max(1, len(new) // 100)]]
    await store.close()
    return kept


@dataclass(frozen=True, slots=True)
class Grown:
    """A server on a filled store."""

    pool: Pool
    known: Sequence[TaskId]

    def submit(self, _: int) -> None:
        self.pool.ask("POST", "/v1/tasks", {"command": ["true"]})

    def submit_many(self, _: int) -> None:
        self.pool.ask("POST", "/v1/tasks", {"command": ["true"], "copies": 500})

    def status(self, number: int) -> None:
        task = self.known[number * 7919 % len(self.known)]
        self.pool.status(encode("task", task))

    def listing(self, _: int) -> None:
        self.pool.ask("GET", "/v1/tasks?limit=50")

    def listing_open(self, _: int) -> None:
        self.pool.ask("GET", "/v1/tasks?limit=50&status=queued,running")

    def start(self) -> float:
        self.pool.server.kill()
        return self.pool.start_server()


ASKED: tuple[tuple[str, Callable[[Grown, int], None], int], ...] = (
    ("submit one", Grown.submit, 200),
    ("submit 500", Grown.submit_many, 10),
    ("status", Grown.status, 200),
    ("list 50", Grown.listing, 40),
    ("list open ones", Grown.listing_open, 40),
)


def grown(folder: Path, url: str | None, rows: int) -> Grown:
    folder.mkdir()
    data = folder / "data"
    data.mkdir(mode=0o700)
    known = asyncio.run(fill(url or f"sqlite:///{data / 'gpool.db'}", rows))
    settings = {"GPOOL_SERVER_DATABASE_URL": url} if url else {}
    return Grown(Pool(folder, settings), known)


def compare(pools: Sequence[Grown], rows: int, kind: str, rounds: int) -> Iterator[Cost]:
    """Each question to both servers in turns; the best round's median."""
    for what, ask, times in ASKED:
        best = [float("inf")] * 2
        for _ in range(rounds):
            for index, one in enumerate(pools):
                spent = []
                for number in range(times):
                    began = perf_counter()
                    ask(one, number)
                    spent.append(perf_counter() - began)
                best[index] = min(best[index], statistics.median(spent))
        few, many = (round(seconds * 1e6, 1) for seconds in best)
        yield Cost(f"{what} over HTTP, {kind}: rows", FEW, rows, few, many)
    starts = [[one.start() for one in pools] for _ in range(rounds)]
    few, many = (round(min(column) * 1e6) for column in zip(*starts, strict=True))
    yield Cost(f"start of the server, {kind}: rows", FEW, rows, few, many)


@contextmanager
def postgres() -> Iterator[Callable[[str], str]]:
    """Makes databases in a real PostgreSQL of our own, synced as it comes."""
    # Not beneath our folder: started by root, it runs as another user, who must reach its data.
    with own_postgres(tempfile.mkdtemp(prefix="gpool-postgres-")) as server:

        def make(name: str) -> str:
            server.psql(f"CREATE DATABASE {name}")
            return str(server.get_uri(database=name))

        yield make


def over_http(folder: Path, rows: int, kind: str, rounds: int) -> list[Cost]:
    with ExitStack() as stack:
        make = stack.enter_context(postgres()) if kind == "PostgreSQL" else lambda _: None
        began = perf_counter()
        pools = [
            grown(folder / f"{kind}-few", make("few"), FEW),
            grown(folder / f"{kind}-many", make("many"), rows),
        ]
        print(f"{kind}: filled in {perf_counter() - began:.0f} s", file=sys.stderr)
        for one in pools:
            stack.callback(one.pool.stop)
            one.pool.start_server()
        return list(compare(pools, rows, kind, rounds))


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--rows", type=int, default=1_000_000)
    asked.add_argument("--rounds", type=int, default=5, help="best of so many")
    asked.add_argument("--postgres", action="store_true", help="the same on a real PostgreSQL")
    asked.add_argument("--quick", action="store_true", help="100,000 rows, best of three")
    asked.add_argument("--json", type=Path)
    options = asked.parse_args()
    if options.quick:
        options.rows, options.rounds = 100_000, 3

    costs = [passes(options.rounds, nodes) for nodes in (10, 200)]
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("SQLite", *(["PostgreSQL"] if options.postgres else [])):
            costs += over_http(Path(folder), options.rows, kind, options.rounds)

    print(f"load {os.getloadavg()[0]:.1f}\n")
    print("| what grows | few | many | few, µs | many, µs | grows by |\n|---|---|---|---|---|---|")
    for cost in costs:
        print(
            f"| {cost.what} | {cost.few} | {cost.many} | {cost.few_us:g} | {cost.many_us:g} "
            f"| {cost.grows_by:.2f}× |"
        )
    if options.json:
        rows = [asdict(cost) | {"grows_by": round(cost.grows_by, 3)} for cost in costs]
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    short = [cost for cost in costs if cost.grows_by > PROMISED]
    for cost in short:
        print(
            f"falls short: {cost.what} costs {cost.grows_by:.2f} times more, promised ≤ {PROMISED}"
        )
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
