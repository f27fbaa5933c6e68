"""An overloaded pool: short tasks stay short, long ones are not stopped again and again, none starves."""

from __future__ import annotations

from random import Random
from statistics import fmean

import pytest
from bench.jct import Gpool
from bench.jct_references import REFERENCES
from bench.philly import Job

from gpool.core.ids import TaskId
from gpool.core.model import SECOND
from gpool.core.scheduler.order.orders import Policy

NODES, DAY = 3, 86_400.0
POLICY = Policy()


def jobs(seed: int) -> list[Job]:
    """Five days of twice as much work as the pool can do, with the long tail of real run times."""
    draw, found = Random(seed), []
    work, at = 0.0, 0.0
    while at < 5 * DAY:
        at += draw.expovariate(1 / 900)
        seconds = min(4 * DAY, draw.lognormvariate(6.5, 2.2))
        gpus = draw.choice([1, 1, 1, 2, 4, 8, 16])
        if work + seconds * gpus < 2 * at * NODES * 8:
            work += seconds * gpus
            found.append(Job(len(found), at, seconds, gpus, "one", seconds))
    return found


class WatchedPool(Gpool):
    def stop(self, task: TaskId, now: float) -> None:
        ran = now - self.begun[task]
        assert self.epochs[task] == 1 or ran >= POLICY.protection / SECOND - 1
        super().stop(task, now)


@pytest.mark.parametrize("seed", [1, 2])
def test_overload_costs_no_more_stops_than_mlfq_and_no_longer_completion(seed: int) -> None:
    own = jobs(seed)
    WatchedPool(NODES, POLICY, preemptible=True, step=0.0).run(own)
    rivals = {}
    for name in ("LAS", "MLFQ", "FIFO"):
        rivals[name] = jobs(seed)
        REFERENCES[name](rivals[name], NODES)

    def completion(of: list[Job]) -> float:
        return fmean(job.end - job.at for job in of)

    def longest(of: list[Job]) -> float:
        return max(job.wait for job in of)

    best = min(completion(rivals[name]) for name in ("LAS", "MLFQ"))
    assert best < 0.5 * completion(rivals["FIFO"]), "the pool was not overloaded"
    assert completion(own) <= 1.05 * best
    stops = fmean(job.stops for job in rivals["MLFQ"])
    assert fmean(job.stops for job in own) <= max(0.6, 1.2 * stops)
    assert longest(own) <= 1.5 * min(longest(rivals[name]) for name in ("LAS", "MLFQ"))
