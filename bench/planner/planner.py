"""What one scheduling pass and one folded task cost, as queues, shapes and nodes grow.

python -m bench.planner [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import process_time

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.model import (
    GIB,
    Gpu,
    GpuDetails,
    GpuRequest,
    Instant,
    Node,
    Offer,
    Requirements,
    Shape,
    Span,
    TaskKind,
)
from gpool.core.scheduler.explain.waiting import explain
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.passes.plan import plan
from gpool.core.scheduler.place.index import PlacementIndex
from gpool.core.scheduler.state.events import (
    NodeChanged,
    QueuedTask,
    RunTimesObserved,
    TasksLeased,
    TasksQueued,
    TasksReleased,
)
from gpool.core.scheduler.state.state import State
from gpool.core.specs.gpu_topology import PciePath

NOW = Instant(10**15)
FIRST_ID = 1 << 60


def shape(user: int) -> Shape:
    return Shape(UserId(user), Requirements(), 0, TaskKind.FUNCTION, "default", "f")


def batch(first: int, count: int) -> tuple[QueuedTask, ...]:
    ids = range(FIRST_ID + first, FIRST_ID + first + count)
    return tuple([QueuedTask(TaskId(i), 0, NOW) for i in ids])


def pool(tasks: int, shapes: int, nodes: int) -> State:
    state = State()
    for number in range(nodes):
        offer = Offer(4000, 16 * GIB, GIB)
        state.fold(NodeChanged(Node(NodeId(number), UserId(1), f"n{number}", offer)))
    for number in range(shapes):
        state.fold(TasksQueued(shape(number), batch(number * 10**6, tasks // shapes)))
    return state


def best(action: Callable[[], object], times: int) -> float:
    spent = []
    for _ in range(times):
        start = process_time()
        action()
        spent.append(process_time() - start)
    return min(spent)


def passes() -> list[dict[str, float]]:
    """`first` starts tasks on every free slot; `full` finds nothing free."""
    rows = []
    for tasks, shapes, nodes in (
        (1_000, 10, 10),
        (100_000, 10, 10),
        (1_000, 10, 200),
        (100_000, 10, 200),
        (100_000, 100, 200),
        (100_000, 1, 1),
    ):
        state = pool(tasks, shapes, nodes)
        policy, index = Policy(order="fcfs"), PlacementIndex()
        first = best(partial(plan, state, index, NOW, policy), 9)
        places = plan(state, index, NOW, policy).places
        for place in places:
            ids = tuple(grant.task for grant in place.grants)
            state.fold(TasksLeased(place.node, place.allocation, place.shape, ids))
        full = best(partial(plan, state, index, NOW, policy), 9)
        last = TaskId(FIRST_ID + tasks // shapes - 1)
        told = best(lambda s=state, t=last: explain(s, t, NOW), 5)  # type: ignore[misc]
        rows.append(
            {
                "tasks": tasks,
                "shapes": shapes,
                "nodes": nodes,
                "starts": len(places),
                "first_us": round(first * 1e6),
                "full_us": round(full * 1e6),
                "explain_us": round(told * 1e6),
            }
        )
    return rows


def gpus_of_a_box(*, linked: bool) -> tuple[Gpu, ...]:
    """Eight GPUs in pairs below a switch, two pairs to a NUMA node; without `linked` nothing is known of them."""

    def path(one: int, other: int) -> PciePath:
        if one // 4 != other // 4:
            return PciePath.SYS
        return PciePath.PIX if one // 2 == other // 2 else PciePath.NODE

    near = {i: tuple((j, int(path(i, j))) for j in range(8) if j != i) for i in range(8)}
    return tuple(
        Gpu(
            index,
            f"GPU-{index}",
            "H100",
            "nvidia",
            80 * GIB,
            details=GpuDetails(numa=index // 4, near=near[index]) if linked else None,
        )
        for index in range(8)
    )


def gpu_passes(nodes: int = 150) -> list[dict[str, object]]:
    """A pass that starts tasks of 1, 2, 4 and 8 GPUs on every node: plain, by shares, and by shares and closeness."""
    ways = {
        "requested CPUs": (False, False),
        "share of the node": (True, False),
        "share, closeness": (True, True),
    }
    spent: dict[str, list[float]] = {way: [] for way in ways}
    starts = {}
    for _ in range(5):  # alternating
        for way, (shared, linked) in ways.items():
            offer = Offer(192_000, 2048 * GIB, GIB, gpus_of_a_box(linked=linked))
            state = State()
            for number in range(nodes):
                state.fold(NodeChanged(Node(NodeId(number), UserId(1), f"n{number}", offer)))
            for number in range(nodes * 4):
                request = GpuRequest((1, 2, 4, 1)[number % 4])
                memory = None if shared else 8 * GIB
                needs = Requirements(
                    (request,), 1000, memory, cpu_by_gpus=shared, memory_by_gpus=shared
                )
                wanted = Shape(UserId(number), needs, 0, TaskKind.COMMAND, "default", "f")
                state.fold(TasksQueued(wanted, batch(number * 10**6, 1)))
            index, policy = PlacementIndex(), Policy(order="fcfs")
            start = process_time()
            decided = plan(state, index, NOW, policy)
            spent[way].append(process_time() - start)
            starts[way] = len(decided.places)
    return [
        {
            "gpu tasks": way,
            "nodes": nodes,
            "starts": starts[way],
            "us_a_start": round(min(times) / starts[way] * 1e6),
        }
        for way, times in spent.items()
    ]


def folding(total: int = 100_000) -> dict[str, float]:
    """A backlog queued in batches of 10,000 and drained through two lines of up to 500."""
    spent = {"queue": 0.0, "plan": 0.0, "lease": 0.0, "release": 0.0}
    state, index = pool(0, 1, 0), PlacementIndex()
    offer = Offer(2000, 16 * GIB, GIB)
    state.fold(NodeChanged(Node(NodeId(1), UserId(1), "n1", offer)))
    state.fold(RunTimesObserved(shape(0), 10, Span(400)))
    for first in range(0, total, 10_000):
        event = TasksQueued(shape(0), batch(first, 10_000))
        start = process_time()
        state.fold(event)
        spent["queue"] += process_time() - start
    while state.queued_count or state.held:
        start = process_time()
        decided = plan(state, index, NOW)
        spent["plan"] += process_time() - start
        for place in decided.places:
            ids = tuple(grant.task for grant in place.grants)
            leased = TasksLeased(place.node, place.allocation, place.shape, ids)
            start = process_time()
            state.fold(leased)
            spent["lease"] += process_time() - start
        released = TasksReleased(tuple(list(state.held)[:300]))
        start = process_time()
        state.fold(released)
        spent["release"] += process_time() - start
    return {f"{name}_us_a_task": round(t / total * 1e6, 3) for name, t in spent.items()}


def memory(total: int = 100_000) -> float:
    state = State()
    tracemalloc.start()
    for first in range(0, total, 500):
        state.fold(TasksQueued(shape(0), batch(first, 500)))
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return round(used / 1e6, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="20,000 tasks folded")
    arguments = parser.parse_args()
    total = 20_000 if arguments.quick else 100_000
    rows, costs, megabytes = passes(), folding(total), memory(total)
    names = list(rows[0])
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
    for row in rows:
        print("| " + " | ".join(f"{value}" for value in row.values()) + " |")
    shares = gpu_passes(30 if arguments.quick else 150)
    print("\n| " + " | ".join(shares[0]) + " |\n" + "|---" * len(shares[0]) + "|")
    for line in shares:
        print("| " + " | ".join(f"{value}" for value in line.values()) + " |")
    print("\n| folding | |\n|---|---|")
    for name, value in costs.items():
        print(f"| {name} | {value} |")
    print(f"| {total} waiting, MB | {megabytes} |")
    if arguments.json:
        figures = {
            "passes": rows,
            "gpu_passes": shares,
            "folding": costs,
            "queued": total,
            "queued_mb": megabytes,
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
