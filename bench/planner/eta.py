"""How true the start estimates are: the Philly trace through gpool's planner, each waiting task's stated range beside its true start.

python -m bench.eta --trace FILE [--nodes N] [--first DAY --last DAY] [--every S] [--sample K] [--order NAME] [--json FILE] [--quick]
python -m bench.eta --trace FILE --nodes 52 --first 2017-10-30 --last 2017-12-11 --sample 7    # weeks on which nothing was chosen

A forecast is made every so many seconds of the trace (as the server caches it) and told to the tasks that arrived since the
last one and wait. It knows only what had happened by then; so does the calibration, which learns from nothing else. With
`--sample K` only every K-th of these forecasts is made and told; the tasks between are told nothing and teach nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from time import process_time

from bench.philly import GPUS, MODEL, OCTOBER, as_nodes, read_jobs, shape_of

from gpool.core.ids import TaskId
from gpool.core.model import SECOND, Instant, Shape, Span
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.passes.plan import plan
from gpool.core.scheduler.place.index import PlacementIndex
from gpool.core.scheduler.predict.forecast import (
    Bounds,
    Calibration,
    ForecastQuestion,
    StatedForecast,
    courses,
    waits,
)
from gpool.core.scheduler.predict.run_times import RunTimes
from gpool.core.scheduler.state.events import (
    NodeChanged,
    QueuedTask,
    RunTimesObserved,
    TasksQueued,
    TasksReleased,
)
from gpool.core.scheduler.state.snapshot import take
from gpool.core.scheduler.state.state import State

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
    told: StatedForecast
    simulated: tuple[Span, Span]


def load(trace: Path, first: str, last: str) -> tuple[list[Job], int]:
    """The jobs, virtual clusters as users, and how many of them are larger than a node."""
    shapes: dict[tuple[str, int], Shape] = {}
    users: dict[str, int] = {}
    jobs = []
    found = read_jobs(trace, first, last)
    for each in found:
        shape = shapes.get((each.cluster, each.gpus))
        if shape is None:
            user = users.setdefault(each.cluster, len(users) + 1)
            shape = shape_of(each, user, None, preemptible=False)
            shapes[each.cluster, each.gpus] = shape
        at, lasts = Instant(round(each.at * SECOND)), Span(round(each.seconds * SECOND))
        jobs.append(Job(TaskId(each.number + 1), at, lasts, shape))
    return jobs, sum(each.gpus > GPUS for each in found)


class Trial:
    def __init__(
        self, nodes: int, policy: Policy, every: Span, passes: int, sample: int = 1
    ) -> None:
        self.state, self.policy, self.every = State(), policy, every
        self.index = PlacementIndex()
        self.sample, self.due = sample, 0
        self.bounds = Bounds(passes)
        for node in as_nodes(nodes):
            self.state.fold(NodeChanged(node))
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
        self.cut_short = 0  # told though not all courses came so far

    def run(self, jobs: Sequence[Job]) -> None:
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
                if self.due % self.sample == 0:
                    self.forecast(now)
                self.untold.clear()
                self.due += 1
                next_at = Instant(now + self.every)

    def arrive(self, job: Job) -> None:
        self.jobs[job.id] = self.untold[job.id] = job
        self.lately.append((job.at, job.shape))
        self.state.fold(TasksQueued(job.shape, (QueuedTask(job.id, 0, job.at),)))

    def end(self, task: TaskId) -> None:
        job = self.jobs.pop(task)
        del self.since[task]
        self.times.observe(job.shape, job.duration)
        self.state.fold(RunTimesObserved(job.shape, 1, job.duration, MODEL))
        self.state.fold(TasksReleased((task,)))

    def start(self, now: Instant) -> None:
        for place in plan(self.state, self.index, now, self.policy).places:
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
        wanted = frozenset(self.untold)
        asked = ForecastQuestion(
            take(self.state), now, self.times, self.since, tuple(self.lately), wanted
        )
        found = courses(asked, self.policy, bounds=self.bounds)
        for job in self.untold.values():
            told = waits(found, job.id, self.state.queued_count, now)
            if told is None:
                continue
            self.cut_short += any(job.id not in course.starts for course in found)
            middle = told[len(told) // 2]
            stated = self.calibration.told(middle, now)
            self.open[job.id] = Stated(job, stated, (told[0], told[-1]))
        self.forecasts += 1
        self.spent += process_time() - begun


def quantile(values: list[float], part: float) -> float:
    values = sorted(values)
    return values[min(len(values) - 1, int(part * len(values)))] if values else 0.0


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--trace", type=Path, required=True)
    asked.add_argument("--nodes", type=int, default=72)
    asked.add_argument("--first", default=OCTOBER[0])
    asked.add_argument("--last", default=OCTOBER[1])
    asked.add_argument("--every", type=float, default=3600, help="seconds between forecasts")
    asked.add_argument("--sample", type=int, default=1, help="make and tell every K-th only")
    asked.add_argument("--order", default=Policy().order)
    asked.add_argument("--passes", type=int, default=Bounds().passes)
    asked.add_argument("--json", type=Path)
    asked.add_argument("--quick", action="store_true", help="one week")
    options = asked.parse_args()
    jobs, larger = load(options.trace, options.first, options.last)
    if options.quick:
        jobs = [job for job in jobs if job.at < 7 * 24 * 3600 * SECOND]
    policy = Policy(order=options.order)
    every = Span(round(options.every * SECOND))
    trial = Trial(options.nodes, policy, every, options.passes, options.sample)
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
        "trace": f"philly {options.first} to {options.last}",
        "order": options.order,
        "nodes": options.nodes,
        "jobs": len(jobs),
        "gangs": larger,
        "forecasts": trial.forecasts,
        "of_forecasts_due": trial.due,
        "told": len(counted),
        "told_beyond_the_courses_pct": round(100 * trial.cut_short / max(1, len(trial.done)), 1),
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
