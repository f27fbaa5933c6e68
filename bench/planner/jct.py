"""How long jobs of the Philly trace take from submission to end: gpool's planner beside published policies.

python -m bench.jct --trace FILE --nodes 72 [--policies NAME …] [--json FILE]
python -m bench.jct --trace FILE --nodes 52 --first 2017-10-30 --last 2017-12-11    # weeks on which nothing was chosen

gpool goes through its State, plan and events as in the server, and preempts, restarts and waits as it would there; a restart
costs 60 seconds of every GPU. A pass is made at each submission, each end, and whenever who comes before whom may have changed
by mere time: no step of the clock decides anything (`--step` makes passes rarer). It is told sizes, submission times and virtual
clusters (as users, where it predicts or shares fairly between them: `gpool fair share`). The references work on bare counts, the
preempting ones once a minute as published.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from pathlib import Path
from statistics import fmean, median
from time import process_time

from bench.jct_references import REFERENCES
from bench.philly import MODEL, OCTOBER, Job, as_nodes, read_jobs, shape_of

from gpool.core.ids import TaskId
from gpool.core.model import SECOND, Instant, Shape, Span
from gpool.core.scheduler.order.orders import AGES, Policy
from gpool.core.scheduler.order.promotion import FACTOR
from gpool.core.scheduler.passes.plan import plan
from gpool.core.scheduler.place.index import PlacementIndex
from gpool.core.scheduler.state.events import (
    NodeChanged,
    QueuedTask,
    RunTimesObserved,
    TasksPreempted,
    TasksQueued,
    TasksReleased,
)
from gpool.core.scheduler.state.state import State

RESTART = 60.0
MOMENT = 0.001  # past the roundings of the clock
EPOCH = 10**15


class Gpool:
    """A pool of these nodes under gpool's own planner."""

    def __init__(
        self, nodes: int, policy: Policy, *, preemptible: bool, step: float, tenants: bool = False
    ) -> None:
        self.state = State()
        self.index = PlacementIndex()
        for node in as_nodes(nodes):
            self.state.fold(NodeChanged(node))
        self.policy, self.preemptible, self.step = policy, preemptible, step
        self.tenants = tenants  # each virtual cluster is a tenant; else all are one user
        self.shapes: dict[tuple[int, int], Shape] = {}
        self.users: dict[str, int] = {}
        self.jobs: dict[TaskId, Job] = {}
        self.epochs: dict[TaskId, int] = {}
        self.ends: list[tuple[float, int, TaskId]] = []
        self.begun: dict[TaskId, float] = {}
        # When who comes before whom may change though nothing happens: of a task that has this epoch, and waits or runs.
        self.looks: list[tuple[float, TaskId, int, bool]] = []
        self.passes = 0

    def run(self, jobs: Sequence[Job]) -> None:
        coming, now, done = 0, 0.0, 0
        while done < len(jobs):
            due = [self.ends[0][0]] if self.ends else []
            if coming < len(jobs):
                due.append(jobs[coming].at)
            while self.looks and self.is_idle(*self.looks[0]):
                heappop(self.looks)
            if self.state.queued_count and self.looks:
                due.append(self.looks[0][0])
            now = max(now + self.step, min(due))
            while self.looks and self.looks[0][0] <= now:
                heappop(self.looks)
            while self.ends and self.ends[0][0] <= now:
                done += self.finish(*heappop(self.ends))
            while coming < len(jobs) and jobs[coming].at <= now:
                self.submit(jobs[coming])
                coming += 1
            self.schedule(now)

    def look_at(self, at: float, task: TaskId) -> None:
        """Make a pass then, unless the task has started or stopped before."""
        heappush(self.looks, (at + MOMENT, task, self.epochs[task], task in self.begun))

    def look_at_promotions(self, since: float, task: TaskId) -> None:
        """`since`: when it was submitted, plus its run time."""
        waits = {self.policy.promotion}
        if self.preemptible:
            waits |= {self.policy.starvation, Span(FACTOR * self.policy.starvation)}
        for wait in waits:
            self.look_at(since + wait / SECOND, task)

    def is_idle(self, _: float, task: TaskId, epoch: int, runs: bool) -> bool:
        return self.epochs[task] != epoch or (task in self.begun) != runs

    def submit(self, job: Job) -> None:
        task = TaskId(job.number + 1)
        self.jobs[task], self.epochs[task] = job, 0
        self.state.fold(TasksQueued(self.shape(job), (QueuedTask(task, 0, instant(job.at)),)))
        self.look_at(job.at + self.policy.restart / SECOND, task)
        self.look_at_promotions(job.at, task)

    def shape(self, job: Job) -> Shape:
        is_one = self.preemptible and not self.tenants
        user = 1 if is_one else self.users.setdefault(job.cluster, len(self.users) + 1)
        key = (user, job.gpus)
        if key not in self.shapes:
            team = None if self.tenants else 1
            self.shapes[key] = shape_of(job, user, team, preemptible=self.preemptible)
        return self.shapes[key]

    def finish(self, at: float, epoch: int, task: TaskId) -> bool:
        if self.epochs[task] != epoch or task not in self.begun:
            return False
        job = self.jobs[task]
        job.end = at
        del self.begun[task]
        ran = Span(round(job.seconds * SECOND))
        self.state.fold(RunTimesObserved(self.shape(job), 1, ran, MODEL))
        self.state.fold(TasksReleased((task,), instant(at)))
        return True

    def schedule(self, now: float) -> None:
        at = instant(now)
        while True:
            self.passes += 1
            decided = plan(self.state, self.index, at, self.policy)
            for place in decided.places:
                tasks = tuple(grant.task for grant in place.grants)
                self.state.fold(place.leased(tasks, at))
                for grant in place.grants:
                    self.start(grant.task, grant.epoch, now)
            for stop in decided.preemptions:
                self.state.fold(TasksPreempted((stop.task,), (stop.beneficiary,)))
            for stop in decided.preemptions:
                self.stop(stop.task, now)
            if not decided.preemptions:
                return

    def start(self, task: TaskId, epoch: int, now: float) -> None:
        job = self.jobs[task]
        self.epochs[task], self.begun[task] = epoch, now
        if epoch > 1:
            job.left += RESTART
            self.look_at(now + self.policy.protection / SECOND, task)
        if self.tenants:
            self.look_at(now + self.policy.quantum / SECOND, task)
        if self.preemptible:
            ran = self.state.attained(task, instant(now))
            for age in AGES:
                if age > ran and age - ran < job.left * SECOND:
                    self.look_at(now + (age - ran) / SECOND, task)
        heappush(self.ends, (now + job.left, epoch, task))

    def stop(self, task: TaskId, now: float) -> None:
        job, at = self.jobs[task], instant(now)
        job.left -= now - self.begun.pop(task)
        job.stops += 1
        attained = self.state.attained(task, at)
        self.state.fold(TasksReleased((task,), at))
        waiting = QueuedTask(task, self.epochs[task], instant(job.at), attained)
        self.look_at_promotions(job.at + attained / SECOND, task)
        self.state.fold(TasksQueued(self.shape(job), (waiting,)))


def instant(seconds: float) -> Instant:
    return Instant(EPOCH + round(seconds * SECOND))


def gpool(jobs: Sequence[Job], nodes: int, step: float) -> None:
    Gpool(nodes, Policy(), preemptible=True, step=step).run(jobs)


def gpool_without_preemption(jobs: Sequence[Job], nodes: int, step: float) -> None:
    Gpool(nodes, Policy(order="shortest"), preemptible=False, step=step).run(jobs)


def gpool_fair_share(jobs: Sequence[Job], nodes: int, step: float) -> None:
    Gpool(nodes, Policy(), preemptible=True, step=step, tenants=True).run(jobs)


OWN: dict[str, Callable[[Sequence[Job], int, float], None]] = {
    "gpool": gpool,
    "gpool fair share": gpool_fair_share,
    "gpool without preemption": gpool_without_preemption,
}


def measure(name: str, jobs: Sequence[Job], nodes: int, step: float) -> dict[str, object]:
    start = process_time()
    if name in OWN:
        OWN[name](jobs, nodes, step)
    else:
        REFERENCES[name](jobs, nodes)
    waits = sorted(job.wait for job in jobs)
    return {
        "policy": name,
        "nodes": nodes,
        "jct_s": round(fmean(job.end - job.at for job in jobs)),
        "wait_median_s": round(median(waits)),
        "wait_p99_s": round(waits[min(len(waits) - 1, int(0.99 * len(waits)))]),
        "wait_max_s": round(waits[-1]),
        "stops_a_job": round(fmean(job.stops for job in jobs), 3),
        "cpu_s": round(process_time() - start, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--nodes", type=int, default=72)
    parser.add_argument("--first", default=OCTOBER[0])
    parser.add_argument("--last", default=OCTOBER[1])
    parser.add_argument("--step", type=float, default=0.0, help="seconds between passes, at least")
    parser.add_argument(
        "--first-seed", type=int, default=0, help="nothing here is drawn: no effect"
    )
    parser.add_argument("--policies", nargs="*", default=[*REFERENCES, *OWN])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    names = list(dict.fromkeys(["FIFO", *arguments.policies]))
    rows: list[dict[str, object]] = []
    for name in names:
        jobs = read_jobs(arguments.trace, arguments.first, arguments.last)
        row = measure(name, jobs, arguments.nodes, arguments.step)
        base = rows[0]["jct_s"] if rows else row["jct_s"]
        row = {"policy": name, "jct_x_fifo": round(row["jct_s"] / base, 4), **row}  # type: ignore[operator]
        if not rows:
            print("| " + " | ".join(row) + " |\n" + "|---" * len(row) + "|")
        rows.append(row)
        print("| " + " | ".join(str(value) for value in row.values()) + " |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
