"""Whether what-if tells the truth: every suggestion is applied, and must start its task in the same pass.

python -m bench.whatif [--suggestions 1000] [--first-seed 0] [--json FILE]

Pools, tasks and policies are drawn by chance: gangs and sites, labels, prices, slices, other models, limits, every order.
Each suggestion is checked on the state it was made for, as a new submission and in the task's old place in line; its price is
compared with that of the place the planner chose.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from time import perf_counter

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.model import (
    GIB,
    MIB,
    SECOND,
    Gpu,
    Instant,
    Network,
    Node,
    Offer,
    Requirements,
    Shape,
    Span,
    TaskKind,
    Tier,
)
from gpool.core.scheduler.explain.whatif import Suggestion, cost_of, suggest
from gpool.core.scheduler.order.builtin import ORDERS
from gpool.core.scheduler.order.limits import GpuLimits
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.passes.plan import plan
from gpool.core.scheduler.place.index import PlacementIndex
from gpool.core.scheduler.state.events import (
    NodeChanged,
    Placement,
    QueuedTask,
    TasksQueued,
    TasksWithdrawn,
)
from gpool.core.scheduler.state.snapshot import take
from gpool.core.scheduler.state.state import State
from gpool.core.specs import gpu

NOW = Instant(10**15)
NEW = TaskId(10**12)
MODELS = {
    "NVIDIA A10G": 23028,
    "NVIDIA GeForce RTX 4090": 24564,
    "NVIDIA A100-SXM4-80GB": 81920,
    "Tesla T4": 15360,
}
SPECS = (None, None, "1", "2", "4", "A100", "RTX4090:2", "40GB+", "0.5", "A10G,T4")
LABELS = ("ssd", "zone=a", "zone=b")
TASKS = 6  # asked about in one pool


def some_node(dice: Random, number: int) -> Node:
    models = [dice.choice(list(MODELS)) for _ in range(dice.choice((0, 1, 2, 4)))]
    cpus = dice.choice((2, 4, 16))
    offer = Offer(
        cpus * 1000,
        cpus * 4 * GIB,
        dice.choice((50, 100)) * GIB,
        tuple(
            Gpu(index, f"GPU-{number}-{index}", model, "nvidia", MODELS[model] * MIB)
            for index, model in enumerate(models)
        ),
        frozenset({"3.11"}),
        frozenset({Tier.CONTAINER, *dice.choice(((), (Tier.VM,)))}),
        site=dice.choice(("lab", "lab", "attic", "")),
        address=f"10.0.0.{number}",
        gang_port=47100,
        labels=frozenset(dice.sample(LABELS, dice.randint(0, 2))),
        price_microcredits=dice.choice((0, 100_000, 310_000, 450_000)),
    )
    return Node(NodeId(number), UserId(99), f"node{number}", offer)


def some_shape(dice: Random) -> Shape:
    spec = dice.choice(SPECS)
    vram = None if spec else dice.choice((None, "6GB", "12GB", "30GB"))
    needs = Requirements(
        gpu.parse(spec, vram),
        dice.choice((1000, 1000, 3000, 8000)),
        dice.choice((None, 2 * GIB, 20 * GIB)),
        dice.choice((None, None, 40 * GIB, 80 * GIB)),
        dice.choice((Tier.CONTAINER, Tier.CONTAINER, Tier.VM)),
        network=dice.choice((Network.NONE, Network.NONE, Network.NONE, Network.EGRESS)),
        nodes=dice.choice((1, 1, 1, 2, 3)),
        labels=tuple(sorted(dice.sample(LABELS, dice.choice((0, 0, 0, 1, 2))))),
        max_price_microcredits=dice.choice((None, None, 0, 100_000, 320_000)),
    )
    priority, user = dice.choice((0, 0, 5)), UserId(dice.randint(1, 3))
    shape = Shape(user, needs, priority, TaskKind.FUNCTION, "default", f"{spec}{vram}")
    return replace(shape, preemptible=dice.random() < 0.2, team=dice.choice((None, None, 7)))


def some_policy(dice: Random) -> Policy:
    limits = GpuLimits(user_milli=dice.choice((None, None, 4000)))
    patience = Span(dice.choice((60 * SECOND, 10**12)))
    return Policy(order=dice.choice(sorted(ORDERS)), patience=patience, limits=limits)


def some_pool(dice: Random) -> tuple[State, Policy, list[TaskId]]:
    """Nodes of all kinds, some of them busy, and tasks that wait."""
    state, policy = State(), some_policy(dice)
    for number in range(1, dice.randint(2, 8)):
        state.fold(NodeChanged(some_node(dice, number)))
    last, waiting, index = 0, [], PlacementIndex()
    for turn in range(dice.randint(3, 30)):
        count = dice.choice((1, 1, 1, 3))
        ids = [TaskId(id_) for id_ in range(last + 1, last + 1 + count)]
        last += count
        at = Instant(NOW - dice.randint(0, 200) * SECOND)
        tasks = tuple(QueuedTask(id_, 0, at) for id_ in ids)
        state.fold(TasksQueued(some_shape(dice), tasks))
        waiting += ids
        if turn % 3 == 0:
            for place in plan(state, index, NOW, policy).places:
                state.fold(place.leased(tuple(grant.task for grant in place.grants), NOW))
    return state, policy, [id_ for id_ in waiting if state.queue_of(id_) is not None]


def start_of(state: State, policy: Policy, task: TaskId) -> Placement | None:
    for place in plan(state, PlacementIndex(), NOW, policy).places:
        if place.grants[0].task == task:
            taken = place.allocation.number in state.nodes[place.node].lines
            return None if taken else place
    return None


def is_true(state: State, policy: Policy, task: TaskId, one: Suggestion) -> bool:
    """Applied to the state itself: as a new submission at the price that was told, and in the task's old place."""
    entry = state.queue_of(task)
    assert entry is not None
    shape, old = entry.shape, entry.queue.entry_of(task)
    assert old is not None
    changed = replace(shape, requirements=one.requirements)
    was = QueuedTask(task, 0, Instant(old[0]))
    state.fold(TasksWithdrawn((task,)))
    found = []
    for again in (QueuedTask(NEW, 0, NOW), was):
        state.fold(TasksQueued(changed, (again,)))
        found.append(start_of(state, policy, again.id))
        state.fold(TasksWithdrawn((again.id,)))
    state.fold(TasksQueued(shape, (was,)))
    return (
        None not in found
        and found[0] is not None
        and cost_of(state, found[0]) == one.price_microcredits
    )


@dataclass
class Found:
    asked: int = 0
    seconds: float = 0.0
    told: Counter[str] = field(default_factory=Counter)
    true: Counter[str] = field(default_factory=Counter)
    of_gangs: int = 0
    false: list[tuple[int, int, str]] = field(default_factory=list)  # seed, task, change


def check(wanted: int, first_seed: int = 0) -> Found:
    """Pools by their seeds, until so many suggestions were made."""
    found, seed = Found(), first_seed
    while found.told.total() < wanted:
        for task, one, truth in checked(seed, found):
            found.told[one.kind] += 1
            found.true[one.kind] += truth
            if not truth:
                found.false.append((seed, task, one.change))
            if found.told.total() >= wanted:
                break
        seed += 1
    return found


def checked(seed: int, found: Found) -> Iterator[tuple[TaskId, Suggestion, bool]]:
    state, policy, waiting = some_pool(Random(seed))
    for task in waiting[:TASKS]:
        entry = state.queue_of(task)
        assert entry is not None
        is_gang = entry.shape.requirements.nodes > 1
        before = state.truth()
        began = perf_counter()
        suggestions = suggest(take(state), task, NOW, policy)
        found.seconds += perf_counter() - began
        found.asked += 1
        assert state.truth() == before, "asking changed something"
        for one in suggestions:
            found.of_gangs += is_gang
            yield task, one, is_true(state, policy, task, one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suggestions", type=int, default=1000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = check(given.suggestions, given.first_seed)
    told, true = found.told.total(), found.true.total()
    print("| change | suggested | true |\n|---|---|---|")
    for kind, count in found.told.most_common():
        print(f"| {kind} | {count} | {found.true[kind]} |")
    mean_ms = 1000 * found.seconds / found.asked
    print(f"| all | {told} | {true} |\n")
    print(
        f"{found.asked} tasks asked about, {mean_ms:.1f} ms each; {found.of_gangs} suggestions for gangs"
    )
    for seed, task, change in found.false[:10]:
        print(f"false: seed {seed}, task {task}: {change}")
    if given.json:
        rows = [
            {"kind": kind, "suggested": count, "true": found.true[kind]}
            for kind, count in found.told.items()
        ]
        answer = {
            "suggested": told,
            "true": true,
            "asked": found.asked,
            "ms": mean_ms,
            "kinds": rows,
        }
        given.json.write_text(json.dumps(answer, indent=2) + "\n")
    raise SystemExit(true != told)


if __name__ == "__main__":
    main()
