"""A long queue: how fast it is taken, what it weighs in the server, and whether it drains as fast at its end as at its start.

    python -m bench.backlog [--tasks 100000] [--quick] [--json FILE]

Server and agent are processes of their own. A submission counts when the server has acknowledged it, so when it is on
disk. `memory` is the growth of the server's peak while the queue is filled; rates of draining count from the first result.
Slower at its end means: in time and in processor time alike, since a machine shared with others is slower now and then.
"""

from __future__ import annotations

import argparse
import binascii
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter

from gpool.client.client import Client
from gpool.client.mapping import ReaderFailure, ResultReader
from gpool.client.values import PYTHON, dumps_call
from tests.tools.processes import Daemon, Pool, cpu_s

CHUNK = 4000
FIFTHS = 5
SUBMISSIONS_PER_S, MEMORY_MB, SLOWER = 10_000, 150, 1.2
"""What is promised for 100,000 tasks."""


def nothing() -> None:
    """The task."""


@dataclass(frozen=True, slots=True)
class Fifth:
    """One fifth of the queue, as it drained."""

    tasks_per_s: int
    server_cpu_us_a_task: float
    agent_cpu_us_a_task: float


@dataclass(frozen=True, slots=True)
class Backlog:
    tasks: int
    submissions_per_s: int
    memory_mb: float
    fifths: tuple[Fifth, ...]
    succeeded: int
    load: float

    @property
    def slows_by(self) -> float:
        """How many times slower the last fifth drained than the first."""
        return self.fifths[0].tasks_per_s / self.fifths[-1].tasks_per_s

    @property
    def costs_more_by(self) -> float:
        """The same in processor time, which others on the machine hardly touch."""
        first, last = (
            fifth.server_cpu_us_a_task + fifth.agent_cpu_us_a_task
            for fifth in (self.fifths[0], self.fifths[-1])
        )
        return last / first

    def short_of(self) -> list[str]:
        """What is promised and does not hold."""
        checks = (
            (self.submissions_per_s >= SUBMISSIONS_PER_S, f"under {SUBMISSIONS_PER_S} a second"),
            (self.memory_mb <= MEMORY_MB, f"more than {MEMORY_MB} MB"),
            (
                self.slows_by <= SLOWER,
                f"drains {self.slows_by:.2f} times slower at its end",
            ),
            (self.succeeded == self.tasks, f"{self.tasks - self.succeeded} did not succeed"),
        )
        return [said for holds, said in checks if not holds]


def fill(client: Client, tasks: int) -> tuple[str, float]:
    """The batch with all tasks in it, and the seconds until the last of them was acknowledged."""
    task = client.task(nothing)
    function = {"sha256": client.artifacts.put(task.pickled()), "python": PYTHON}
    batch = None
    began = perf_counter()
    for first in range(0, tasks, CHUNK):
        count = min(CHUNK, tasks - first)
        calls = [_text(dumps_call(nothing, (), {})) for _ in range(count)]
        document = {
            "function": function,
            "calls": calls,
            "batch": batch,
            "more": first + count < tasks,
        }
        batch = client.api.send_json("POST", "/v1/tasks", document)["batch"]
    assert batch is not None
    return batch, perf_counter() - began


def drain(client: Client, batch: str, tasks: int, pool: Pool) -> tuple[tuple[Fifth, ...], int]:
    """Every fifth's rates, and how many succeeded."""
    agent = pool.join("first", "--slots", "2")
    reader = ResultReader(client.api, batch)
    marks: list[tuple[int, float, float, float]] = []
    seen = succeeded = 0
    while seen < tasks:
        found = reader.inbox.get()
        if isinstance(found, ReaderFailure):
            raise found.error
        if seen == 0 or seen // (tasks // FIFTHS) < (seen + len(found)) // (tasks // FIFTHS):
            used = (pool.server.cpu_s(), tree_cpu_s(agent))
            marks.append((0 if seen == 0 else seen + len(found), perf_counter(), *used))
        seen += len(found)
        succeeded += sum(result.status == "succeeded" for result in found)
    reader.stop()
    fifths = []
    for before, after in pairwise(marks):
        count, wall, server, machine = (b - a for a, b in zip(before, after, strict=True))
        fifths.append(
            Fifth(
                round(count / wall),
                round(server / count * 1e6, 1),
                round(machine / count * 1e6, 1),
            )
        )
    return tuple(fifths), succeeded


def tree_cpu_s(agent: Daemon) -> float:
    """The agent's own and its sandboxes' so far."""
    return agent.cpu_s() + sum(map(cpu_s, agent.descendants()))


def measure(folder: Path, tasks: int) -> Backlog:
    pool = Pool(folder)
    try:
        pool.start_server()
        client = Client(pool.address, pool.key)
        fill(client, 100)  # everything is imported and warm
        before = pool.server.peak_memory_bytes()
        batch, seconds = fill(client, tasks)
        grown = pool.server.peak_memory_bytes() - before
        fifths, succeeded = drain(client, batch, tasks, pool)
        client.close()
    finally:
        pool.stop()
    return Backlog(
        tasks,
        round(tasks / seconds),
        round(grown / 1e6, 1),
        fifths,
        succeeded,
        round(os.getloadavg()[0], 1),
    )


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--tasks", type=int, default=100_000)
    asked.add_argument("--quick", action="store_true", help="20,000 tasks")
    asked.add_argument("--json", type=Path)
    options = asked.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), 20_000 if options.quick else options.tasks)
    print(
        f"{found.tasks} tasks queued with no node, then drained by two slots (load {found.load})\n"
    )
    print("| | measured | promised |\n|---|---|---|")
    print(f"| durable submissions/s | {found.submissions_per_s} | ≥ {SUBMISSIONS_PER_S} |")
    print(f"| server memory, MB more | {found.memory_mb} | ≤ {MEMORY_MB} |")
    rates = " · ".join(str(fifth.tasks_per_s) for fifth in found.fifths)
    print(f"| drained/s, by fifths | {rates} | |")
    server = " · ".join(f"{fifth.server_cpu_us_a_task:g}" for fifth in found.fifths)
    print(f"| server CPU µs a task | {server} | |")
    agent = " · ".join(f"{fifth.agent_cpu_us_a_task:g}" for fifth in found.fifths)
    print(f"| agent and runners, CPU µs | {agent} | |")
    print(f"| slower at its end, wall | {found.slows_by:.2f}× | ≤ {SLOWER}× |")
    print(f"| dearer at its end, CPU | {found.costs_more_by:.2f}× | |")
    if options.json:
        ratios = {"slows_by": found.slows_by, "costs_more_by": found.costs_more_by}
        figures = asdict(found) | {name: round(value, 3) for name, value in ratios.items()}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    short = found.short_of()
    for said in short:
        print(f"falls short: {said}")
    return 1 if short else 0


def _text(pickled: bytes) -> str:
    return binascii.b2a_base64(pickled, newline=False).decode("ascii")


if __name__ == "__main__":
    sys.exit(main())
