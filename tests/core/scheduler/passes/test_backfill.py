"""Reservations: what passes one that waits does not delay it while predictions hold, and nothing depends on their holding."""

from __future__ import annotations

from heapq import heappop, heappush

from hypothesis import given, settings
from hypothesis import strategies as st

from gpool.core.ids import TaskId
from gpool.core.model import SECOND, GpuRequest, Instant, Shape, Span
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.state.events import (
    QueuedTask,
    RunTimesObserved,
    TasksQueued,
    TasksReleased,
)
from tests.core.scheduler.state.builders import NOW, a_node, a_shape, a_state, plan

FCFS = Policy(order="fcfs")
PATIENCE = FCFS.patience // SECOND
LARGE = 1
LATER = 100
Job = tuple[int, int, int]
"""GPUs, seconds it runs, second it comes."""


def a_job(number: int, gpus: int) -> Shape:
    """Of a name of its own, so that a prediction is about it alone."""
    needs = {"gpu": (GpuRequest(gpus),), "cpu_milli": 100, "memory_bytes": 1 << 20}
    return a_shape(1, f"job{number}", **needs)


class Pool:
    """Nodes of four GPUs, jobs that run for their time, and a planner that believes `predicted`."""

    def __init__(self, nodes: int, jobs: dict[int, Job], predicted: dict[int, int]) -> None:
        self.state = a_state(*(a_node(n, cpus=8, gpus=4) for n in range(1, nodes + 1)))
        self.jobs = jobs
        self.shapes = {number: a_job(number, job[0]) for number, job in jobs.items()}
        for number, seconds in predicted.items():
            told = RunTimesObserved(self.shapes[number], 3, Span(3 * seconds * SECOND))
            self.state.fold(told)
        self.starts: dict[int, int] = {}

    def run(self, shut_at: int | None = None) -> None:
        """Until all have ended; from `shut_at` on none that comes after the large one may start."""
        coming = sorted((job[2], number) for number, job in self.jobs.items())
        looks = [at for at, _ in coming] + [self.jobs[LARGE][2] + PATIENCE]
        ends: list[tuple[int, int]] = []
        looks.sort(reverse=True)
        while looks or ends:
            now = min([*looks[-1:], *(end for end, _ in ends[:1])])
            while looks and looks[-1] <= now:
                looks.pop()
            while ends and ends[0][0] <= now:
                self.state.fold(TasksReleased((TaskId(heappop(ends)[1]),)))
            while coming and coming[0][0] <= now:
                at, number = coming.pop(0)
                if shut_at is None or at < shut_at or number <= LATER:
                    queued = QueuedTask(TaskId(number), 0, Instant(NOW + at * SECOND))
                    self.state.fold(TasksQueued(self.shapes[number], (queued,)))
            self.start(now, ends, is_shut=shut_at is not None and now >= shut_at)

    def start(self, now: int, ends: list[tuple[int, int]], *, is_shut: bool) -> None:
        at = Instant(NOW + now * SECOND)
        for place in plan(self.state, at, FCFS).places:
            tasks = tuple(grant.task for grant in place.grants)
            if is_shut and tasks[0] > LATER:
                continue  # refused by the store: it goes on waiting
            self.state.fold(place.leased(tasks, at))
            for task in tasks:
                self.starts[int(task)] = now
                heappush(ends, (now + self.jobs[int(task)][1], int(task)))


running_before = st.lists(
    st.tuples(st.integers(1, 4), st.integers(100, 2000)), min_size=1, max_size=8
)
coming_after = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 4000), st.integers(2, 1500)), max_size=16
)


def the_jobs(before: list[tuple[int, int]], after: list[Job]) -> dict[int, Job]:
    """Some that run already, one that needs a whole node, others that come after it."""
    jobs = {LARGE: (4, 100, 1)}
    jobs |= {n: (gpus, seconds, 0) for n, (gpus, seconds) in enumerate(before, LARGE + 1)}
    jobs |= dict(enumerate(after, LATER + 1))
    return jobs


def those_that_start(nodes: int, before: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of these jobs, all there at once, those for which there is room."""
    jobs = {number: (gpus, seconds, 0) for number, (gpus, seconds) in enumerate(before, LARGE + 1)}
    pool = Pool(nodes, jobs, {})
    for number, shape in pool.shapes.items():
        pool.state.fold(TasksQueued(shape, (QueuedTask(TaskId(number), 0, Instant(NOW)),)))
    pool.start(0, [], is_shut=False)
    return [jobs[number][:2] for number in sorted(pool.starts)]


@settings(max_examples=150, deadline=None)
@given(nodes=st.integers(1, 3), before=running_before, after=coming_after)
def test_what_passes_never_delays_a_reservation_while_predictions_are_right(
    nodes: int, before: list[tuple[int, int]], after: list[Job]
) -> None:
    """The large one stands first: what came before it runs. One that stood behind another has no promise of its own."""
    jobs = the_jobs(those_that_start(nodes, before), after)
    right = {number: job[1] for number, job in jobs.items()}
    with_others, alone = Pool(nodes, jobs, right), Pool(nodes, jobs, right)
    with_others.run()
    alone.run(shut_at=jobs[LARGE][2] + PATIENCE)
    assert with_others.starts[LARGE] <= alone.starts[LARGE]


@settings(max_examples=100, deadline=None)
@given(
    nodes=st.integers(1, 3),
    before=running_before,
    after=coming_after,
    wrong=st.dictionaries(st.integers(1, LATER + 16), st.integers(1, 10**6)),
)
def test_wrong_predictions_never_keep_anything_from_running(
    nodes: int, before: list[tuple[int, int]], after: list[Job], wrong: dict[int, int]
) -> None:
    jobs = the_jobs(before, after)
    pool = Pool(nodes, jobs, {number: wrong[number] for number in jobs if number in wrong})
    pool.run()
    assert pool.starts.keys() == jobs.keys()
    moments = {pool.starts[number] for number in jobs}
    for moment in moments:
        used = sum(
            job[0]
            for number, job in jobs.items()
            if pool.starts[number] <= moment < pool.starts[number] + job[1]
        )
        assert used <= 4 * nodes


def test_a_stream_of_tasks_that_lie_about_their_length_never_starves_a_large_one() -> None:
    jobs = {LARGE: (4, 100, 1)}
    jobs |= dict.fromkeys((2, 3, 4, 5), (1, 700, 0))
    jobs |= {LATER + n: (1, 700, 20 * n) for n in range(1, 200)}
    pool = Pool(1, jobs, dict.fromkeys(jobs, 1))
    pool.run()
    assert pool.starts[LARGE] <= 2 * 700 + PATIENCE


def test_a_short_task_passes_and_a_long_one_does_not() -> None:
    jobs = {LARGE: (4, 100, 1), 2: (2, 1000, 0), LATER + 1: (1, 800, 100), LATER + 2: (1, 990, 100)}
    pool = Pool(1, jobs, {number: job[1] for number, job in jobs.items()})
    pool.run()
    assert pool.starts[LATER + 1] == 100
    assert pool.starts[LARGE] == 1000
    assert pool.starts[LATER + 2] == 1100


def test_the_node_that_is_ready_first_is_kept() -> None:
    jobs = {2: (3, 5000, 0), 3: (3, 900, 0), LARGE: (4, 100, 1)}
    jobs |= {LATER + 1: (1, 10_000, 100)}
    pool = Pool(2, jobs, {number: job[1] for number, job in jobs.items()})
    pool.run()
    assert pool.starts[LARGE] == 900
    assert pool.starts[LATER + 1] == 100  # beside the longer one
