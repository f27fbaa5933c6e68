"""Published policies on bare counts of free GPUs, to stand beside gpool in `bench.jct`. Jobs are gangs; nothing is gpool's here.

FIFO starts jobs strictly in order; EASY lets others pass that do not delay the first that waits, by predicted run times; QSSF
orders by predicted GPU time. LAS, MLFQ and SRTF preempt: each minute in which something changed, the best jobs that fit by number
are wanted, and one that finds no room stops unwanted ones where that is cheapest; all of its nodes or none.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from heapq import heappop, heappush
from math import inf
from statistics import median

from bench.philly import GPUS, Job

RESTART, TICK = 60.0, 60.0
Spots = list[tuple[int, int]]


class Pool:
    def __init__(self, nodes: int) -> None:
        self.free = [GPUS] * nodes
        self.idle = nodes * GPUS

    def place(self, gpus: int, barred: Collection[int] = ()) -> Spots | None:
        """The tightest node, or whole free ones and a tight one for the rest."""
        if gpus > self.idle:
            return None
        spots: Spots = []
        if gpus > GPUS:
            empty = [n for n, free in enumerate(self.free) if free == GPUS and n not in barred]
            if len(empty) < gpus // GPUS:
                return None
            spots = [(n, GPUS) for n in empty[: gpus // GPUS]]
            gpus %= GPUS
        if gpus:
            used = {n for n, _ in spots}
            able = [
                (free, n)
                for n, free in enumerate(self.free)
                if free >= gpus and n not in used and n not in barred
            ]
            if not able:
                return None
            spots.append((min(able)[1], gpus))
        self.take(spots, 1)
        return spots

    def take(self, spots: Spots, sign: int) -> None:
        for node, gpus in spots:
            self.free[node] -= sign * gpus
            self.idle -= sign * gpus


class Predictor:
    """The median of the last jobs of the same cluster and size that ended, else of the size, else of all."""

    def __init__(self) -> None:
        self.seen: dict[object, deque[float]] = defaultdict(lambda: deque(maxlen=15))

    def learn(self, job: Job) -> None:
        for key in ((job.cluster, job.gpus), job.gpus, None):
            self.seen[key].append(job.seconds)

    def __call__(self, job: Job) -> float:
        for key in ((job.cluster, job.gpus), job.gpus, None):
            if len(self.seen[key]) >= 3:
                return median(self.seen[key])
        return 3600.0


class Waits:
    """Jobs that run to their end once started."""

    def __init__(self, nodes: int, rank: Callable[[Job, float], float], *, easy: bool) -> None:
        self.pool, self.predict, self.rank, self.easy = Pool(nodes), Predictor(), rank, easy
        self.predicted: dict[int, float] = {}
        self.running: list[tuple[float, int, Job, Spots, float]] = []
        self.queues: dict[int, list[tuple[float, int, Job]]] = defaultdict(list)

    def run(self, jobs: Sequence[Job]) -> None:
        coming = 0
        while coming < len(jobs) or self.running:
            now = min(
                jobs[coming].at if coming < len(jobs) else inf,
                self.running[0][0] if self.running else inf,
            )
            while self.running and self.running[0][0] <= now:
                _, _, job, spots, _ = heappop(self.running)
                self.pool.take(spots, -1)
                self.predict.learn(job)
            while coming < len(jobs) and jobs[coming].at <= now:
                job = jobs[coming]
                coming += 1
                self.predicted[job.number] = self.predict(job)
                key = self.rank(job, self.predicted[job.number])
                heappush(self.queues[job.gpus], (key, job.number, job))
            self.start(now)

    def start(self, now: float) -> None:
        below, shadow, kept = 1 << 30, None, set[int]()
        aside: list[tuple[int, tuple[float, int, Job]]] = []
        while self.pool.idle:
            heads = [(q[0][:2], g) for g, q in self.queues.items() if q and g < below]
            if not heads:
                break
            gpus = min(heads)[1]
            job = self.queues[gpus][0][2]
            is_late = shadow is not None and now + self.predicted[job.number] > shadow
            spots = self.pool.place(gpus, kept if is_late else ())
            if spots:
                heappop(self.queues[gpus])
                job.end = now + job.seconds
                heappush(self.running, (job.end, job.number, job, spots, now))
            elif is_late and len(aside) < 30:
                aside.append((gpus, heappop(self.queues[gpus])))
            elif not self.easy:
                break
            else:
                if shadow is None:
                    shadow, kept = self.reserve(gpus, now)
                below = gpus
        for gpus, item in aside:
            heappush(self.queues[gpus], item)

    def reserve(self, gpus: int, now: float) -> tuple[float, set[int]]:
        """When, by prediction, which nodes will have room for it."""
        free, need = list(self.pool.free), -(-gpus // GPUS)
        ends = sorted(
            (max(now, begun + self.predicted[job.number]), job.number, spots)
            for _, _, job, spots, begun in self.running
        )
        for end, _, spots in ends:
            for node, count in spots:
                free[node] += count
            able = [n for n, f in enumerate(free) if f >= min(gpus, GPUS)]
            if len(able) >= need:
                return end, set(able[:need])
        return inf, set()


class Preempts:
    """Jobs that are stopped for better ones and started again."""

    def __init__(self, nodes: int, rank: Callable[[Job, float], float]) -> None:
        self.nodes, self.pool, self.rank = nodes, Pool(nodes), rank
        self.live: dict[int, Job] = {}
        self.at: dict[int, Spots] = {}
        self.since: dict[int, float] = {}
        self.attained: dict[int, float] = {}

    def run(self, jobs: Sequence[Job]) -> None:
        coming, now = 0, 0.0
        while coming < len(jobs) or self.live:
            due = [self.since[n] + self.live[n].left for n in self.at]
            if len(self.live) > len(self.at):
                due.append(now + 10 * TICK)
            if coming < len(jobs):
                due.append(jobs[coming].at)
            now = max(now + TICK, min(due))
            for number in list(self.at):
                self.age(self.live[number], now)
            while coming < len(jobs) and jobs[coming].at <= now:
                self.live[jobs[coming].number] = jobs[coming]
                coming += 1
            self.schedule(now)

    def age(self, job: Job, now: float) -> None:
        since, number = self.since[job.number], job.number
        if since + job.left <= now:
            job.end = since + job.left
            self.pool.take(self.at.pop(number), -1)
            del self.live[number]
            return
        self.attained[number] = self.attained.get(number, 0.0) + (now - since) * job.gpus
        job.left -= now - since
        self.since[number] = now

    def schedule(self, now: float) -> None:
        ranked = sorted(
            self.live.values(),
            key=lambda job: (self.rank(job, self.attained.get(job.number, 0.0)), job.number),
        )
        wanted, left = set(), self.nodes * GPUS
        for job in ranked:
            if job.gpus <= left:
                wanted.add(job.number)
                left -= job.gpus
        unwanted: dict[int, list[Job]] = defaultdict(list)
        for job in ranked:
            if job.number in self.at and job.number not in wanted:
                for node, _ in self.at[job.number]:
                    unwanted[node].append(job)
        for job in ranked:
            is_wanted = job.number in wanted
            if job.number in self.at or not (self.pool.idle or is_wanted):
                continue
            spots = self.pool.place(job.gpus)
            if spots is None and is_wanted and self.evict(job, unwanted):
                spots = self.pool.place(job.gpus)
            if spots is not None:
                job.left += RESTART if job.number in self.since else 0.0
                self.at[job.number], self.since[job.number] = spots, now

    def evict(self, job: Job, unwanted: dict[int, list[Job]]) -> bool:
        need, room = (job.gpus // GPUS, GPUS) if job.gpus > GPUS else (1, job.gpus)
        options = []
        for node in range(self.nodes):
            there = [other for other in unwanted.get(node, ()) if other.number in self.at]
            freed = sum(c for other in there for n, c in self.at[other.number] if n == node)
            if self.pool.free[node] + freed >= room:
                options.append((sum(other.gpus for other in there), node, there))
        if len(options) < need:
            return False
        options.sort(key=lambda option: option[:2])
        for _, node, there in options[:need]:
            for other in sorted(there, key=lambda other: -other.gpus):
                if other.number in self.at and self.pool.free[node] < room:
                    self.pool.take(self.at.pop(other.number), -1)
                    other.stops += 1
        return True


def _las(job: Job, attained: float) -> float:
    level = 0 if attained < 3600 else 1 if attained < 36_000 else 2
    return level * 1e12 + job.at


def _mlfq(job: Job, attained: float) -> float:
    age = attained / job.gpus
    level = 0 if age < 1800 else 1 if age < 7200 else 2 if age < 28_800 else 3
    return level * 1e12 + job.at


REFERENCES: dict[str, Callable[[Sequence[Job], int], None]] = {
    "FIFO": lambda jobs, nodes: Waits(nodes, lambda job, _: job.at, easy=False).run(jobs),
    "FIFO + EASY": lambda jobs, nodes: Waits(nodes, lambda job, _: job.at, easy=True).run(jobs),
    "QSSF + EASY": lambda jobs, nodes: Waits(
        nodes, lambda job, predicted: predicted * job.gpus, easy=True
    ).run(jobs),
    "LAS": lambda jobs, nodes: Preempts(nodes, _las).run(jobs),
    "MLFQ": lambda jobs, nodes: Preempts(nodes, _mlfq).run(jobs),
    "SRTF oracle": lambda jobs, nodes: Preempts(nodes, lambda job, _: job.left * job.gpus).run(
        jobs
    ),
}
