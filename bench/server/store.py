"""How fast the store submits, leases and records, in batches of 500, and how long one operation takes alone.

`python -m bench.store [--json FILE] [--url URL] [--tasks N] [--quick]`; without a URL, SQLite in a temporary folder, fully synced.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from gpool.core.ids import BatchId, NodeId, SpecId, TaskId, UserId
from gpool.core.model import Allocation, EndReason, Instant, Offer, Permission, TaskKind, TaskSpec
from gpool.core.scheduler.state.events import LeaseGrant, Placement
from gpool.core.scheduler.state.waiting import shape_of
from gpool.server.store import open_store
from gpool.server.store.operations import nodes
from gpool.server.store.operations.identity import users
from gpool.server.store.operations.leases import leases
from gpool.server.store.operations.tasks import artifacts, submissions, tasks
from gpool.server.store.operations.tasks.submissions import NewTask, Submission
from gpool.server.store.protocol import Store
from gpool.server.store.values import User
from gpool.wire.frames import Finished, ReportItem

USER, NODE, FUNCTION = UserId(1), NodeId(2), "f" * 64
SPEC = TaskSpec(TaskKind.FUNCTION, "noop", function_sha256=FUNCTION)
SHAPE = shape_of(SPEC, USER)
AT = Instant(1_700_000_000_000_000)
SIZE = 500


async def prepare(store: Store) -> int:
    user = User(USER, "bench", frozenset({Permission.CONSUMER}), AT)
    await store.write(users.create_user(user))
    offer = Offer(2000, 1 << 33, 1 << 33)
    await store.write(nodes.create_node(NODE, "n", USER, None, "secret", offer, (), AT))
    await store.write(artifacts.add_artifact(FUNCTION, 100, USER, None, None, AT))
    return await store.write(leases.take_term(AT))


def submission(batch: int, first: int, count: int) -> Submission:
    made = [NewTask(TaskId(first + i), i, b"x" * 60) for i in range(count)]
    return Submission(BatchId(batch), True, True, SpecId(9), SPEC, USER, made, AT)


def place(first: int, count: int) -> Placement:
    grants = tuple(LeaseGrant(TaskId(first + i), 1) for i in range(count))
    return Placement(NODE, Allocation(0, 1000, 1 << 30), SHAPE, grants)


def reports(first: int, count: int) -> list[ReportItem]:
    return [
        Finished(first + i, 1, EndReason.RETURNED, 0, b"y" * 40, duration_us=900)
        for i in range(count)
    ]


async def timed(
    work: Callable[[int], Awaitable[Any]], rounds: int
) -> tuple[float, float, list[float]]:
    """Seconds of wall and of processor for all rounds, and the wall of each."""
    each = []
    began, cpu = perf_counter(), process_time()
    for number in range(rounds):
        at = perf_counter()
        await work(number)
        each.append(perf_counter() - at)
    return perf_counter() - began, process_time() - cpu, each


async def measure(url: str, total: int) -> dict[str, dict[str, float]]:
    store = await open_store(url)
    term = await prepare(store)
    base = 1_000_000
    rounds = max(1, total // SIZE)
    results: dict[str, dict[str, float]] = {}

    async def submit(number: int) -> None:
        await store.write(
            submissions.submit([submission(100 + number, base + number * SIZE, SIZE)])
        )

    async def lease(number: int) -> None:
        applied = await store.write(
            leases.apply_plan([place(base + number * SIZE, SIZE)], term, AT)
        )
        assert len(applied.lines[0].leases) == SIZE

    async def record(number: int) -> None:
        done = await store.write(leases.record([(NODE, reports(base + number * SIZE, SIZE))], AT))
        assert len(done.ended) == SIZE

    for name, work in (("submit", submit), ("lease", lease), ("record", record)):
        wall, cpu, each = await timed(work, rounds)
        rows = rounds * SIZE
        results[f"{name} x{SIZE}"] = {
            "per_s": rows / wall,
            "wall_us": wall / rows * 1e6,
            "cpu_us": cpu / rows * 1e6,
            "p50_ms": statistics.median(each) * 1e3,
        }

    single = base + 10_000_000

    async def submit_one(number: int) -> None:
        await store.write(submissions.submit([submission(10_000_000 + number, single + number, 1)]))

    async def lease_one(number: int) -> None:
        await store.write(leases.apply_plan([place(single + number, 1)], term, AT))

    async def record_one(number: int) -> None:
        await store.write(leases.record([(NODE, reports(single + number, 1))], AT))

    async def status_one(number: int) -> None:
        await store.read(tasks.task(TaskId(single + number), USER))

    for name, work in (
        ("submit x1", submit_one),
        ("lease x1", lease_one),
        ("record x1", record_one),
        ("status x1", status_one),
    ):
        wall, cpu, each = await timed(work, 200)
        results[name] = {
            "per_s": 200 / wall,
            "wall_us": wall / 200 * 1e6,
            "cpu_us": cpu / 200 * 1e6,
            "p50_ms": statistics.median(each) * 1e3,
        }
    await store.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--url")
    parser.add_argument("--tasks", type=int, default=20_000)
    parser.add_argument("--quick", action="store_true", help="5,000 tasks")
    asked = parser.parse_args()
    tasks = 5000 if asked.quick else asked.tasks
    with tempfile.TemporaryDirectory() as folder:
        url = asked.url or f"sqlite:///{folder}/bench.db"
        results = asyncio.run(measure(url, tasks))
    print("| operation | rows/s | wall µs/row | cpu µs/row | p50 ms/op |\n|---|---|---|---|---|")
    for name, row in results.items():
        print(
            f"| {name} | {row['per_s']:,.0f} | {row['wall_us']:.1f} | {row['cpu_us']:.1f} | {row['p50_ms']:.2f} |"
        )
    if asked.json:
        asked.json.write_text(
            json.dumps({"store": url.split(":")[0], "results": results}, indent=2)
        )


if __name__ == "__main__":
    main()
