"""How much GPU stays idle when a cluster fills up, and how fast decisions are: gpool's planner beside published policies.

python -m bench.placement --nodes FILE --pods FILE [FILE …] --mode fill|churn --seeds 10 [--first-seed 42] [--json FILE]

gpool learns from earlier arrivals: another random draw of the same trace, never the run that is measured. It goes through
its State, plan and events as in the server; the references work on bare arrays. Rates count the processor's time, so that a busy
machine does not lower them; `p99_wall_ms` is by the clock on the wall.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from random import Random
from statistics import fmean, quantiles, stdev
from time import perf_counter, process_time
from typing import TypeVar

from bench.openb import LOAD, Machine, Pod, arrivals, as_nodes, read_machines, read_pods
from bench.placement_references import REFERENCES, Cluster

from gpool.core.ids import TaskId
from gpool.core.model import Instant, Node
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.place.portfolio import choose
from gpool.core.scheduler.place.pricing import Pricing
from gpool.core.scheduler.predict.simulation import Replay

EARLIER = 1_000_000  # the seeds of earlier arrivals start here; no measured seed does
CHURN_ARRIVALS = 40_000
Row = dict[str, object]
T = TypeVar("T")


class Watch:
    """Times single decisions, by the processor's clock and the one on the wall."""

    def __init__(self) -> None:
        self.cpu: list[float] = []
        self.wall: list[float] = []

    def time(self, act: Callable[[], T]) -> T:
        wall, cpu = perf_counter(), process_time()
        answer = act()
        self.cpu.append(process_time() - cpu)
        self.wall.append(perf_counter() - wall)
        return answer


class Gpool:
    """The planner of the server."""

    def __init__(self, nodes: list[Node], pricing: Pricing) -> None:
        self.replay = Replay(nodes, Policy(order="fcfs", pricing=pricing))
        self.now = 0

    def place(self, pod: Pod) -> TaskId | None:
        self.now += 1
        placed = self.replay.arrive(pod.shape, Instant(self.now))
        return placed.grants[0].task if placed else None

    def end(self, placed: TaskId) -> None:
        self.replay.end(placed)

    def unallocated(self) -> float:
        return self.replay.unallocated_pct


class Reference:
    def __init__(self, nodes: list[Node], pods: list[Pod], name: str, seed: int) -> None:
        self.cluster = Cluster(nodes)
        self.capacity = int(self.cluster.total.sum())
        self.left = self.capacity
        self.choose = REFERENCES[name](pods, self.cluster, Random(seed))

    def place(self, pod: Pod) -> tuple[Pod, int, tuple[int, ...]] | None:
        able = self.cluster.able(pod)
        if not len(able):
            return None
        node, gpus = self.choose(self.cluster, pod, able)
        self.cluster.take(pod, node, gpus)
        self.left -= pod.gpu_milli
        return pod, node, gpus

    def end(self, placed: tuple[Pod, int, tuple[int, ...]]) -> None:
        self.cluster.take(*placed, sign=-1)
        self.left += placed[0].gpu_milli

    def unallocated(self) -> float:
        return 100 * self.left / self.capacity


def fill(policy: Gpool | Reference, sequence: Sequence[Pod], watch: Watch) -> tuple[float, float]:
    refused = 0
    for pod in sequence:
        refused += watch.time(partial(policy.place, pod)) is None
    return policy.unallocated(), 100 * refused / len(sequence)


def churn(policy: Gpool | Reference, run: Run, watch: Watch) -> tuple[float, float]:
    """Time average over the second half."""
    pods, capacity, random = run.pods, _capacity(run.nodes), Random(run.seed)
    count = run.limit or CHURN_ARRIVALS
    gap = fmean(pod.gpu_milli for pod in pods) / (LOAD * capacity)  # the mean run time is 1
    ends: list[tuple[float, int, object]] = []
    now = area = since = 0.0
    refused = 0
    for number in range(count):
        arrival = now + random.expovariate(1 / gap)
        while ends and ends[0][0] < arrival:
            at, _, placed = heappop(ends)
            area, now = area + (at - now) * policy.unallocated(), at
            start = process_time()
            policy.end(placed)  # type: ignore[arg-type]  # its own
            watch.cpu[-1] += process_time() - start
        area, now = area + (arrival - now) * policy.unallocated(), arrival
        if number == count // 2:
            area, since, refused = 0.0, now, 0
        pod = random.choice(pods)
        taken = watch.time(partial(policy.place, pod))
        if taken is None:
            refused += 1
        else:
            heappush(ends, (now + random.expovariate(1.0), number, taken))
    return area / (now - since), 100 * refused / (count - count // 2)


def learnt(machines: list[Machine], pods: list[Pod]) -> Pricing:
    """What the pool learnt before: from another draw, on nodes with other names."""
    random = Random(EARLIER)
    nodes = as_nodes(machines, random)
    before = arrivals(pods, _capacity(nodes), random)
    return choose(nodes, [pod.shape for pod in before])


def _capacity(nodes: list[Node]) -> int:
    return sum(1000 * len(node.offer.gpus) for node in nodes)


@dataclass(frozen=True, slots=True)
class Run:
    """One seed of one workload; every policy gets the same."""

    workload: str
    mode: str
    seed: int
    nodes: list[Node]
    pods: list[Pod]
    pricing: Pricing
    limit: int | None = None


def measure(name: str, run: Run) -> Row:
    nodes, pods, seed = run.nodes, run.pods, run.seed
    policy = Gpool(nodes, run.pricing) if name == "gpool" else Reference(nodes, pods, name, seed)
    watch = Watch()
    if run.mode == "fill":
        sequence = arrivals(pods, _capacity(nodes), Random(seed))
        result = fill(policy, sequence[: run.limit], watch)
    else:
        result = churn(policy, run, watch)
    marks = quantiles(watch.cpu, n=100)
    return {
        "policy": name,
        "workload": run.workload,
        "mode": run.mode,
        "seed": seed,
        "unallocated_pct": round(result[0], 4),
        "refused_pct": round(result[1], 3),
        "decisions": len(watch.cpu),
        "decisions_per_s": round(len(watch.cpu) / sum(watch.cpu), 1),
        "p50_ms": round(1000 * marks[49], 4),
        "p99_ms": round(1000 * marks[98], 4),
        "p99_wall_ms": round(1000 * quantiles(watch.wall, n=100)[98], 4),
    }


def table(rows: list[Row]) -> None:
    print(
        "| workload | policy | unallocated % | ± | refused % | decisions/s | p99 ms |\n|---|---|---|---|---|---|---|"
    )
    for workload, name in dict.fromkeys((row["workload"], row["policy"]) for row in rows):
        mine = [row for row in rows if (row["workload"], row["policy"]) == (workload, name)]
        column: Callable[[str], list[float]] = lambda key, m=mine: [float(str(r[key])) for r in m]  # type: ignore[misc]  # noqa: E731
        idle = column("unallocated_pct")
        spread = stdev(idle) if len(idle) > 1 else 0.0
        print(
            f"| {workload} | {name} | {fmean(idle):.2f} | {spread:.2f} | {fmean(column('refused_pct')):.2f} "
            f"| {fmean(column('decisions_per_s')):.0f} | {max(column('p99_ms')):.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=Path, required=True)
    parser.add_argument("--pods", type=Path, nargs="+", required=True)
    parser.add_argument("--mode", choices=("fill", "churn"), default="fill")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=42)
    parser.add_argument("--policies", default="Random,Best-fit,FGD,gpool")
    parser.add_argument("--replicate", type=int, default=1, help="so many times the nodes")
    parser.add_argument("--limit", type=int, help="only so many arrivals")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    machines = read_machines(given.nodes)
    rows: list[Row] = []
    for path in given.pods:
        workload = path.name.split(".")[0].removeprefix("openb_pod_list_")
        pods = read_pods(path)
        pricing = learnt(machines, pods)
        for seed in range(given.first_seed, given.first_seed + given.seeds):
            nodes = as_nodes(machines, Random(seed), given.replicate)
            run = Run(workload, given.mode, seed, nodes, pods, pricing, given.limit)
            rows += [measure(name, run) for name in given.policies.split(",")]
    table(rows)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
