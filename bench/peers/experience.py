"""What placement gains by what it knows of nodes: inputs that lie there already, and nodes that often go away.

python -m bench.experience [--seeds 3] [--first-seed 42] [--json FILE]

*warm*: 16 nodes with a GPU each keep the last 4 models they had; tasks need one of many models, a few of them most often; loading
one takes 20 s. Reported: how often the model lay there, and the mean time from arrival to end. *flaky*: nodes' mean times between
losses are lognormal with a median of 20 h; tasks run as in the Philly trace (median 13 min, a long tail) and lose what no
checkpoint kept. Reported: useful GPU time of all that was spent. Both are synthetic. `any`: the same planner, knowing nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import accumulate
from pathlib import Path
from random import Random
from statistics import fmean

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.model import (
    GIB,
    SECOND,
    Gpu,
    Instant,
    Merit,
    Node,
    Offer,
    Requirements,
    Shape,
    Span,
    TaskKind,
)
from gpool.core.reliability import ReliabilityRecord
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.passes.plan import plan
from gpool.core.scheduler.place.index import PlacementIndex
from gpool.core.scheduler.state.events import (
    NodeChanged,
    QueuedTask,
    RunTimesObserved,
    TasksQueued,
    TasksReleased,
)
from gpool.core.scheduler.state.state import State
from gpool.core.specs import gpu as gpuspec

POLICY = Policy(order="fcfs")
PLAIN = Shape(UserId(1), Requirements(gpuspec.parse("1")), 0, TaskKind.COMMAND, "default", "python")
HOUR = 3600
Row = dict[str, object]


def a_node(number: int) -> Node:
    gpu = Gpu(0, f"GPU-{number}", "NVIDIA A10G", "nvidia", 22 * GIB)
    return Node(NodeId(number), UserId(9), f"n{number}", Offer(8000, 32 * GIB, GIB, (gpu,)))


class Pool:
    """Tasks come and are started by the planner; `run` says how long one stays on its node."""

    def __init__(self, nodes: list[Node], run: Callable[[TaskId, NodeId, float], float]) -> None:
        self.state = State()
        self.index = PlacementIndex()
        self.run = run
        self.ends: list[tuple[float, TaskId]] = []
        for node in nodes:
            self.state.fold(NodeChanged(node))

    def arrive(self, task: int, shape: Shape, now: float) -> None:
        self.finish(now)
        at = Instant(round(now * SECOND))
        self.state.fold(TasksQueued(shape, (QueuedTask(TaskId(task), 0, at),)))
        self.start(now)

    def finish(self, until: float) -> None:
        while self.ends and self.ends[0][0] <= until:
            now, task = heappop(self.ends)
            line = self.state.held[task]
            took = Span(round(now * SECOND) - line.since)
            self.state.fold(RunTimesObserved(line.shape, 1, took))
            self.state.fold(TasksReleased((task,)))
            self.start(now)

    def start(self, now: float) -> None:
        at = Instant(round(now * SECOND))
        for place in plan(self.state, self.index, at, POLICY).places:
            for grant in place.grants:
                self.state.fold(place.leased((grant.task,), at))
                heappush(self.ends, (now + self.run(grant.task, place.node, now), grant.task))


# ---- models that lie there


@dataclass(frozen=True, slots=True)
class Warm:
    """The trace it stands for has some 60 models; random placement finds a model in about half of all cases."""

    nodes: int = 16
    models: int = 60
    kept: int = 4
    load_s: float = 20.0
    run_s: float = 28.0
    busy: float = 0.4
    tasks: int = 6000


def warm(seed: int, *, knows: bool, told: Warm = Warm()) -> Row:  # noqa: B008 - frozen
    dice = Random(seed)
    weights = list(accumulate(1 / (rank + 1) ** 1.5 for rank in range(told.models)))
    disks: dict[NodeId, list[int]] = {}
    wants: dict[TaskId, tuple[int, float, float]] = {}
    hits, latencies = 0, []

    def run(task: TaskId, node: NodeId, now: float) -> float:
        nonlocal hits
        model, seconds, came = wants[task]
        there = disks.setdefault(node, [])
        is_there = model in there
        hits += is_there
        disks[node] = [*(each for each in there if each != model), model][-told.kept :]
        takes = seconds + (0 if is_there else told.load_s)
        latencies.append(now - came + takes)
        return takes

    ids = list(range(1, told.nodes + 1))
    dice.shuffle(ids)
    pool, now = Pool([a_node(number) for number in ids], run), 0.0
    size = round(told.load_s * 100_000_000)
    shapes = [
        replace(PLAIN, group=f"m{n}", data=f"m{n}", data_bytes=size) for n in range(told.models)
    ]
    for task in range(1, told.tasks + 1):
        now += dice.expovariate(told.busy * told.nodes / told.run_s)
        model = dice.choices(range(told.models), cum_weights=weights)[0]
        wants[TaskId(task)] = (model, dice.expovariate(1 / told.run_s), now)
        if not knows:
            # Among idle nodes that are alike the planner takes the smallest id; chance is a fairer measure of knowing nothing.
            _renumber(pool, dice)
        pool.arrive(task, shapes[model] if knows else PLAIN, now)
    pool.finish(float("inf"))
    return {
        "measure": "warm",
        "policy": "gpool" if knows else "any",
        "seed": seed,
        "hit": round(hits / told.tasks, 4),
        "latency_s": round(fmean(latencies), 2),
    }


def _renumber(pool: Pool, dice: Random) -> None:
    """Makes one idle node better than the others by chance."""
    idle = [entry.node for entry in pool.state.nodes.values() if entry.node and not entry.lines]
    for node in idle:
        if node.merit != Merit():
            pool.state.fold(NodeChanged(replace(node, merit=Merit())))
    if idle:
        chosen = dice.choice(idle)
        pool.state.fold(NodeChanged(replace(chosen, merit=Merit(is_proven=True))))


# ---- nodes that go away


@dataclass(frozen=True, slots=True)
class Flaky:
    nodes: int = 100
    median_h: float = 20.0
    spread: float = 1.0
    checkpoint_s: float = 1800.0
    restart_s: float = 60.0
    busy: float = 0.5
    tasks: int = 6000
    learnt_h: float = 24.0 * 14  # for which nodes were watched before


def flaky(seed: int, *, knows: bool, told: Flaky = Flaky()) -> Row:  # noqa: B008 - frozen
    dice = Random(seed)
    spent = useful = 0.0
    mtbf = {
        NodeId(n): HOUR * told.median_h * dice.lognormvariate(0, told.spread)
        for n in range(1, told.nodes + 1)
    }
    needs: dict[TaskId, float] = {}

    def run(task: TaskId, node: NodeId, now: float) -> float:  # noqa: ARG001 - a Pool's question
        """All attempts on that node: after a loss it comes back there, having lost what was not kept."""
        nonlocal spent, useful
        left, took = needs[task], 0.0
        useful += left
        while True:
            loss = dice.expovariate(1 / mtbf[node])
            if loss >= left:
                spent += took + left
                return took + left
            kept = loss // told.checkpoint_s * told.checkpoint_s
            left, took = left - kept, took + loss + told.restart_s

    nodes = []
    for id_, mean in mtbf.items():
        hours, losses = told.learnt_h, 0
        at = dice.expovariate(1 / mean)
        while at < hours * HOUR:
            losses, at = losses + 1, at + dice.expovariate(1 / mean)
        at_end = Instant(round(hours * HOUR * SECOND))
        record = ReliabilityRecord(at=at_end).later(at_end, Span(at_end), losses)
        nodes.append(replace(a_node(id_), merit=Merit(record.mtbf) if knows else Merit()))
    pool, now = Pool(nodes, run), 0.0
    shape = replace(PLAIN, checkpoint_every=Span(round(told.checkpoint_s * SECOND)))
    runs = [min(48 * HOUR, 780 * dice.lognormvariate(0, 2.0)) for _ in range(told.tasks)]
    for seconds in runs[:50]:
        pool.state.fold(RunTimesObserved(shape, 1, Span(round(seconds * SECOND))))
    for task, seconds in enumerate(runs, 1):
        now += dice.expovariate(told.busy * told.nodes / fmean(runs))
        needs[TaskId(task)] = seconds
        if not knows:
            _renumber(pool, dice)
        pool.arrive(task, shape, now)
    pool.finish(float("inf"))
    return {
        "measure": f"flaky, checkpoints every {told.checkpoint_s / 60:.0f} min",
        "policy": "gpool" if knows else "any",
        "seed": seed,
        "useful": round(useful / spent, 4),
    }


def measure(seeds: range) -> list[Row]:
    rows: list[Row] = []
    often = replace(Flaky(), checkpoint_s=600.0)
    for seed in seeds:
        for knows in (False, True):
            rows.append(warm(seed, knows=knows))
            rows.append(flaky(seed, knows=knows))
            rows.append(flaky(seed, knows=knows, told=often))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=42)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = measure(range(given.first_seed, given.first_seed + given.seeds))
    print("| measure | policy | hit | latency s | useful GPU time |\n|---|---|---|---|---|")
    for kind, policy in dict.fromkeys((row["measure"], row["policy"]) for row in rows):
        mine = [row for row in rows if (row["measure"], row["policy"]) == (kind, policy)]
        cells = [
            f"{fmean(float(str(row[key])) for row in mine):.3f}" if key in mine[0] else ""
            for key in ("hit", "latency_s", "useful")
        ]
        print(f"| {kind} | {policy} | {' | '.join(cells)} |")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
