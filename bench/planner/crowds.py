"""What a scheduling pass costs at most: very many shapes that wait, beside much that could be stopped for them.

python -m bench.crowds [--only NAME …] [--passes 6] [--json FILE]

`first` is the first pass over the queue, `again` the longest of those after it, between which a task ends and another comes.
Milliseconds of the processor's time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from time import process_time
from typing import Any

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.model import (
    GIB,
    MIB,
    SECOND,
    Allocation,
    Gpu,
    GpuRequest,
    Instant,
    Node,
    Offer,
    Requirements,
    Shape,
    Slice,
    Span,
    TaskKind,
)
from gpool.core.scheduler.order.limits import GpuLimits
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.passes.plan import plan
from gpool.core.scheduler.place.index import PlacementIndex
from gpool.core.scheduler.state.events import (
    Leased,
    NodeChanged,
    QueuedTask,
    TasksLeased,
    TasksQueued,
    TasksReleased,
)
from gpool.core.scheduler.state.state import State

NOW = Instant(10**15)
HOUR = 3600 * SECOND
GPUS = 8
Row = dict[str, object]
Made = tuple[State, Policy]


def a_node(number: int) -> Node:
    gpus = tuple(Gpu(i, f"G{i}", "NVIDIA A10G", "nvidia", 24 * GIB) for i in range(GPUS))
    reach = {"site": f"s{number // 20}", "address": "10.0.0.1", "gang_port": 7000}
    offer = Offer(64_000, 256 * GIB, 1000 * GIB, gpus, **reach)  # type: ignore[arg-type]
    return Node(NodeId(number), UserId(1), f"n{number}", offer)


def a_shape(user: int, preemptible: bool = False, **needs: Any) -> Shape:
    asked = Requirements(**needs)
    return Shape(UserId(user), asked, 0, TaskKind.COMMAND, "default", "", preemptible=preemptible)


def running(nodes: int, users: int, *, preemptible: bool = True) -> State:
    """All GPUs of all nodes in use, one each, by tasks of so many users that began an hour ago."""
    state = State()
    for number in range(nodes):
        state.fold(NodeChanged(a_node(number)))
    since = Instant(NOW - HOUR)
    whole = (GpuRequest(1),)
    shapes = [
        a_shape(10**6 + user, preemptible, cpu_milli=1000, memory_bytes=GIB, gpu=whole)
        for user in range(users)
    ]
    for number in range(nodes * GPUS):
        node, gpu = divmod(number, GPUS)
        allocation = Allocation(gpu, 1000, GIB, (Slice(gpu, 24 * GIB, 1000),))
        lease = (Leased(1, since, Span(0)),) if preemptible else ()
        state.fold(
            TasksLeased(
                NodeId(node),
                allocation,
                shapes[number % users],
                (TaskId(10**9 + number),),
                (),
                since,
                lease,
            )
        )
    return state


def wait(state: State, shapes: Iterator[Shape], ago: int = 0) -> None:
    for number, shape in enumerate(shapes):
        state.fold(TasksQueued(shape, (QueuedTask(TaskId(number + 1), 0, Instant(NOW - ago)),)))


def distinct(count: int, users: int, gpus: Callable[[int], int], **more: Any) -> Iterator[Shape]:
    for number in range(count):
        asked = gpus(number)
        yield a_shape(
            number % users + 1,
            cpu_milli=1000 + number % 977,
            memory_bytes=GIB + number * MIB // 8,
            gpu=(GpuRequest(asked),) if asked else (),
            **more,
        )


FAIR = Policy()


def users_beside_preemptible() -> Made:
    """A thousand users, each with a shape of their own, and 2,000 tasks of 100 others that could be stopped."""
    state = running(250, 100)
    wait(state, distinct(1000, 1000, lambda n: 1 + n % 8))
    return state, FAIR


def users_in_vain() -> Made:
    """As before, but of tasks that no node has room for even when all that could be stopped is."""
    state = running(250, 100)
    wait(state, distinct(1000, 1000, lambda n: 9 + n % 8))
    return state, FAIR


def users_of_equal_share() -> Made:
    """Those who run have about as much as those who wait would have: nothing is stopped."""
    state = running(250, 1000)
    wait(state, distinct(1000, 1000, lambda n: 1 + n % 8))
    return state, FAIR


def equals_among_themselves() -> Made:
    """Those who wait are those who run."""
    state = running(250, 1000)
    shapes = distinct(1000, 1000, lambda n: 1 + n % 8)
    wait(state, (a_shape(10**6 + n, **_needs(s)) for n, s in enumerate(shapes)))
    return state, FAIR


def _needs(shape: Shape) -> dict[str, Any]:
    needs = shape.requirements
    return {"cpu_milli": needs.cpu_milli, "memory_bytes": needs.memory_bytes, "gpu": needs.gpu}


def slices_beside_preemptible() -> Made:
    state = running(250, 100)
    wait(
        state,
        (
            a_shape(n + 1, cpu_milli=1000, gpu=(GpuRequest(vram_bytes=GIB * (1 + n % 30)),))
            for n in range(1000)
        ),
    )
    return state, FAIR


def cpus_beside_preemptible() -> Made:
    """CPU only, and more of it than is free."""
    state = running(250, 100)
    wait(state, (a_shape(n + 1, cpu_milli=56_500 + n, memory_bytes=GIB) for n in range(1000)))
    return state, FAIR


def gangs_beside_preemptible() -> Made:
    state = running(250, 100)
    wait(state, distinct(1000, 1000, lambda n: 1 + n % 8, nodes=4))
    return state, FAIR


def guaranteed_beside_preemptible() -> Made:
    state = running(250, 100)
    wait(state, distinct(1000, 1000, lambda n: 1 + n % 8))
    sure = {("user", n): 4000 for n in range(1, 1001)}
    sure |= {("user", 10**6 + n): 19_000 for n in range(100)}
    return state, Policy(limits=GpuLimits(guaranteed=sure))  # type: ignore[arg-type]


def kinds_of_few() -> Made:
    """Ten thousand shapes of ten users; nothing can be stopped."""
    state = running(250, 100, preemptible=False)
    wait(state, distinct(10_000, 10, lambda n: 1 + n % 8))
    return state, FAIR


def kinds_of_many() -> Made:
    """Ten thousand shapes of as many users."""
    state = running(250, 100, preemptible=False)
    wait(state, distinct(10_000, 10_000, lambda n: 1 + n % 8))
    return state, FAIR


def kinds_waiting_long() -> Made:
    """The same, past the policy's patience."""
    state = running(250, 100, preemptible=False)
    wait(state, distinct(10_000, 10_000, lambda n: 1 + n % 8), HOUR)
    return state, FAIR


def kinds_and_preemptible() -> Made:
    state = running(250, 100)
    wait(state, distinct(10_000, 10_000, lambda n: 1 + n % 8))
    return state, FAIR


def kinds_with_room() -> Made:
    """Ten thousand shapes and an empty pool: the most starts a pass may make."""
    state = State()
    for number in range(250):
        state.fold(NodeChanged(a_node(number)))
    wait(state, distinct(10_000, 10_000, lambda n: n % 2))
    return state, FAIR


def kinds_some_fit() -> Made:
    """CPU is free, GPUs are not: half of the shapes could start."""
    state = running(250, 100, preemptible=False)
    wait(state, distinct(10_000, 10_000, lambda n: n % 2))
    return state, FAIR


def kinds_of_slices() -> Made:
    """Slices are scored for each user apart."""
    state = running(250, 100, preemptible=False)
    wait(
        state,
        (
            a_shape(n + 1, cpu_milli=1000, gpu=(GpuRequest(vram_bytes=MIB * (100 + n)),))
            for n in range(10_000)
        ),
    )
    return state, FAIR


def kinds_by_price() -> Made:
    """Orders other than fair share."""
    state, _ = kinds_of_many()
    return state, Policy(order="shortest")


SCENES: dict[str, Callable[[], Made]] = {
    name: scene
    for name, scene in globals().items()
    if callable(scene) and getattr(scene, "__annotations__", {}).get("return") == "Made"
}


def measure(name: str, scene: Callable[[], Made], passes: int) -> Row:
    state, policy = scene()
    now, spent, starts, stops = NOW, [], 0, 0
    index = PlacementIndex()
    for number in range(passes):
        now = Instant(now + SECOND)
        if number:
            if state.held:
                state.fold(TasksReleased((next(iter(state.held)),), now))
            new = a_shape(10**7 + number, cpu_milli=1500, memory_bytes=GIB, gpu=(GpuRequest(2),))
            state.fold(TasksQueued(new, (QueuedTask(TaskId(10**8 + number), 0, now),)))
        state.pass_time(now)
        began = process_time()
        decided = plan(state, index, now, policy)
        spent.append(1000 * (process_time() - began))
        starts, stops = starts + len(decided.places), stops + len(decided.preemptions)
    return {
        "scene": name,
        "first": round(spent[0], 1),
        "again": round(max(spent[1:], default=0.0), 1),
        "starts": starts,
        "stops": stops,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=sorted(SCENES), default=list(SCENES))
    parser.add_argument("--passes", type=int, default=6)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    print("| scene | first ms | again ms | starts | stops |\n|---|---|---|---|---|", flush=True)
    rows = []
    for name in given.only:
        rows.append(measure(name, SCENES[name], given.passes))
        print("| " + " | ".join(str(value) for value in rows[-1].values()) + " |", flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
