"""How true the start estimates are: the Philly trace through gpool's planner, each waiting task's stated range beside its true start.

python -m bench.eta --trace DIR [--nodes N] [--days N] [--every S] [--order NAME] [--json FILE] [--quick]

A forecast is made every so many seconds of the trace (as the server caches it) and told to the tasks that arrived since the
last one and wait. It knows only what had happened by then; so does the calibration.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import sys
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from heapq import heappop, heappush
from pathlib import Path
from time import process_time

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.model import (
    GIB,
    SECOND,
    Gpu,
    GpuRequest,
    Instant,
    Node,
    Offer,
    Requirements,
    Shape,
    Span,
    TaskKind,
)
from gpool.core.scheduling.calibration import Calibration, Told
from gpool.core.scheduling.events import (
    NodeChanged,
    QueuedTask,
    TasksQueued,
    TasksReleased,
)
from gpool.core.scheduling.forecast import Bounds, Question, courses, waits
from gpool.core.scheduling.orders import Policy
from gpool.core.scheduling.plan import plan
from gpool.core.scheduling.run_times import RunTimes
from gpool.core.scheduling.snapshot import take
from gpool.core.scheduling.state import State

FIRST_DAY = datetime(2017, 10, 2, tzinfo=UTC)
GPUS = 8
LATELY = 400  # arrivals remembered
WARM_UP = 50  # forecasts compared before any counts


@dataclass(frozen=True, slots=True)
class Job:
    id: TaskId
    at: Instant
    duration: Span
    shape: Shape


@dataclass(frozen=True, slots=True)
class Stated:
    job: Job
    told: Told
    simulated: tuple[Span, Span]


def load(trace: Path, days: int) -> tuple[list[Job], int]:
    """The jobs, and how many of them are larger than a node."""
    found = trace / "philly_pollux.csv.gz" if trace.is_dir() else trace
    shapes: dict[tuple[str, int], Shape] = {}
    users: dict[str, int] = {}
    rows, larger = [], 0
    with gzip.open(found) as raw:
        for row in csv.DictReader(io.TextIOWrapper(raw)):
            at = datetime.fromisoformat(row["timestamp"]).replace(tzinfo=UTC) - FIRST_DAY
            seconds, gpus = at.total_seconds(), int(row["num_gpus"])
            if not 0 <= seconds < days * 86400 or float(row["duration"]) <= 0:
                continue
            larger += gpus > GPUS
            rows.append((round(seconds * SECOND), float(row["duration"]), gpus, row["cluster"]))
    rows.sort()
    jobs = []
    for number, (at_us, duration, gpus, cluster) in enumerate(rows):
        shape = shapes.get((cluster, gpus))
        if shape is None:
            user = UserId(users.setdefault(cluster, len(users) + 1))
            nodes = -(-gpus // GPUS)  # more than a node has: whole ones, all at once
            each = GpuRequest(min(gpus, GPUS))
            needs = Requirements((each,), cpu_milli=0, memory_bytes=0, nodes=nodes)
            shape = Shape(user, needs, 0, TaskKind.COMMAND, "default", "job")
            shapes[cluster, gpus] = shape
        span = Span(round(duration * SECOND))
        jobs.append(Job(TaskId(number + 1), Instant(at_us), span, shape))
    return jobs, larger


def a_node(number: int) -> Node:
    gpus = tuple(Gpu(i, f"{number}-{i}", "V100", "nvidia", 16 * GIB) for i in range(GPUS))
    return Node(NodeId(number), UserId(0), f"n{number}", Offer(64_000, 256 * GIB, GIB, gpus))


class Trial:
    def __init__(self, nodes: int, policy: Policy, every: Span, passes: int) -> None:
        self.state, self.policy, self.every = State(), policy, every
        self.bounds = Bounds(passes)
        for number in range(1, nodes + 1):
            self.state.fold(NodeChanged(a_node(number)))
        self.ends: list[tuple[Instant, TaskId]] = []
        self.jobs: dict[TaskId, Job] = {}
        self.since: dict[TaskId, Instant] = {}
        self.times, self.calibration = RunTimes(), Calibration()
        self.lately: deque[tuple[Instant, Shape]] = deque(maxlen=LATELY)
        self.untold: dict[TaskId, Job] = {}
        self.open: dict[TaskId, Stated] = {}
        self.done: list[tuple[Stated, Span]] = []
        self.waited: list[Span] = []
        self.forecasts, self.spent = 0, 0.0

    def run(self, jobs: list[Job]) -> None:
        coming, next_at = deque(jobs), Instant(0)
        while coming or self.ends:
            now = min(
                coming[0].at if coming else self.ends[0][0],
                self.ends[0][0] if self.ends else coming[0].at,
            )
            while self.ends and self.ends[0][0] <= now:
                self.end(heappop(self.ends)[1])
            while coming and coming[0].at <= now:
                self.arrive(coming.popleft())
            self.start(now)
            if now >= next_at and self.untold:
                self.forecast(now)
                next_at = Instant(now + self.every)

    def arrive(self, job: Job) -> None:
        self.jobs[job.id] = self.untold[job.id] = job
        self.lately.append((job.at, job.shape))
        self.state.fold(TasksQueued(job.shape, (QueuedTask(job.id, 0, job.at),)))

    def end(self, task: TaskId) -> None:
        job = self.jobs.pop(task)
        del self.since[task]
        self.times.observe(job.shape, job.duration)
        self.state.fold(TasksReleased((task,)))

    def start(self, now: Instant) -> None:
        for place in plan(self.state, now, self.policy).places:
            tasks = tuple(grant.task for grant in place.grants)
            self.state.fold(place.leased(tasks, now))
            for task in tasks:
                job = self.jobs[task]
                self.since[task] = now
                self.untold.pop(task, None)
                self.waited.append(Span(now - job.at))
                heappush(self.ends, (Instant(now + job.duration), task))
                stated = self.open.pop(task, None)
                if stated is not None:
                    truth = Span(now - stated.told.at)
                    self.calibration.note(stated.told, truth)
                    self.done.append((stated, truth))

    def forecast(self, now: Instant) -> None:
        begun = process_time()
        asked = Question(take(self.state), now, self.times, self.since, tuple(self.lately))
        found = courses(asked, self.policy, bounds=self.bounds)
        for job in self.untold.values():
            told = waits(found, job.id, self.state.queued_count, now)
            if told is None:
                continue
            middle = told[len(told) // 2]
            stated = self.calibration.told(middle, now)
            self.open[job.id] = Stated(job, stated, (told[0], told[-1]))
        self.untold.clear()
        self.forecasts += 1
        self.spent += process_time() - begun


def quantile(values: list[float], part: float) -> float:
    values = sorted(values)
    return values[min(len(values) - 1, int(part * len(values)))] if values else 0.0


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--trace", type=Path, required=True)
    asked.add_argument("--nodes", type=int, default=72)
    asked.add_argument("--days", type=int, default=28)
    asked.add_argument("--every", type=float, default=3600, help="seconds between forecasts")
    asked.add_argument("--order", default=Policy().order)
    asked.add_argument("--passes", type=int, default=Bounds().passes)
    asked.add_argument("--json", type=Path)
    asked.add_argument("--quick", action="store_true", help="one week")
    options = asked.parse_args()
    jobs, larger = load(options.trace, 7 if options.quick else options.days)
    policy = Policy(order=options.order)
    trial = Trial(options.nodes, policy, Span(round(options.every * SECOND)), options.passes)
    begun = process_time()
    trial.run(jobs)
    counted = trial.done[WARM_UP:]
    inside = [one.told.range.low <= truth <= one.told.range.high for one, truth in counted]
    bare = [one.simulated[0] <= truth <= one.simulated[1] for one, truth in counted]
    errors = [abs(truth - one.told.range.middle) / SECOND for one, truth in counted]
    relative = [
        abs(truth - one.told.range.middle) / max(truth, 60 * SECOND) for one, truth in counted
    ]
    truths = [truth / SECOND for _, truth in counted]
    widths = [(one.told.range.high - one.told.range.low) / SECOND for one, _ in counted]
    covered = 100 * sum(inside) / max(1, len(inside))
    row = {
        "trace": "philly",
        "order": options.order,
        "nodes": options.nodes,
        "jobs": len(jobs),
        "gangs": larger,
        "forecasts": trial.forecasts,
        "told": len(counted),
        "covered_pct": round(covered, 1),
        "covered_by_simulation_alone_pct": round(100 * sum(bare) / max(1, len(bare)), 1),
        "median_error_s": round(quantile(errors, 0.5)),
        "median_relative_error": round(quantile(relative, 0.5), 2),
        "median_wait_s": round(quantile(truths, 0.5)),
        "p90_wait_s": round(quantile(truths, 0.9)),
        "median_width_s": round(quantile(widths, 0.5)),
        "forecast_cpu_s": round(trial.spent / max(1, trial.forecasts), 2),
        "cpu_s": round(process_time() - begun),
    }
    for name, value in row.items():
        print(f"{name:34} {value}")
    if options.json:
        options.json.write_text(json.dumps([row], indent=2) + "\n")
    return 0 if 75 <= covered <= 85 else 1


if __name__ == "__main__":
    sys.exit(main())
