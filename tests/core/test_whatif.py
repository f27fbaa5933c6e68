"""What-if: whatever is suggested is true, and worked cases of what is said."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from scheduling_builders import NOW, a_node, a_shape, a_state, apply, enqueue, queued

from gpool.core import gpuspec
from gpool.core.ids import TaskId
from gpool.core.model import GIB, SECOND, Network, Shape, Tier
from gpool.core.scheduling.events import TasksQueued, TasksWithdrawn
from gpool.core.scheduling.orders import ORDERS, Policy
from gpool.core.scheduling.plan import plan
from gpool.core.scheduling.snapshot import take
from gpool.core.scheduling.state import State
from gpool.core.scheduling.whatif import Suggestion, suggest

FCFS = Policy(order="fcfs")
MODELS = ("NVIDIA A10G", "NVIDIA GeForce RTX 4090", "NVIDIA A100-SXM4-80GB", "Tesla T4")


def told(state: State, task: int, policy: Policy = FCFS) -> dict[str, Suggestion]:
    return {one.kind: one for one in suggest(take(state), TaskId(task), NOW, policy)}


def gpu(spec: str | None = None, vram: str | None = None, user: int = 1, **needs: object) -> Shape:
    return a_shape(user, f"{spec}{vram}", gpu=gpuspec.parse(spec, vram), **needs)


def test_fewer_gpus_are_suggested_where_fewer_are_idle() -> None:
    state = a_state(a_node(1, 8, 4))
    enqueue(state, gpu("1", user=2), [1])
    apply(state, plan(state, NOW, FCFS))
    enqueue(state, gpu("4"), [2])
    found = told(state, 2)["gpus"]
    assert found.change == "--gpu 3"
    assert found.sentence == "It starts now with 3 GPUs instead of 4."


def test_another_model_is_suggested_where_one_is_idle() -> None:
    state = a_state(a_node(1, 8, ("NVIDIA H200",)), a_node(2, 8, ("NVIDIA GeForce RTX 4090",)))
    enqueue(state, gpu("H200", user=2), [1])
    apply(state, plan(state, NOW, FCFS))
    enqueue(state, gpu("H200"), [2])
    found = told(state, 2)["model"]
    assert found.change == "--gpu RTX4090"
    assert found.sentence == "It starts now on NVIDIA GeForce RTX 4090 (25GB)."


def test_the_largest_slice_that_starts_is_suggested() -> None:
    state = a_state(a_node(1, 8, ("NVIDIA A10G",)))
    enqueue(state, gpu(vram="4GB"), [1])
    apply(state, plan(state, NOW, FCFS))
    enqueue(state, gpu(vram="22GB"), [2])
    assert told(state, 2)["vram"].change == "--vram 20GB"


def test_a_lower_tier_is_suggested_where_no_node_has_the_higher() -> None:
    state = a_state(a_node(1))
    enqueue(state, a_shape(tier=Tier.VM), [1])
    assert told(state, 1)["tier"].change == "--tier container"


def test_nothing_is_suggested_for_a_task_that_starts_as_it_is() -> None:
    state = a_state(a_node(1))
    enqueue(state, a_shape(), [1])
    assert told(state, 1) == {}


def test_nothing_is_suggested_while_those_ahead_would_take_it_all() -> None:
    state = a_state(a_node(1, 2))
    enqueue(state, a_shape(1, "small", cpu_milli=1000), [1, 2], at=NOW - SECOND)
    enqueue(state, a_shape(2, cpu_milli=3000), [3])
    assert told(state, 3) == {}


def some_state(dice: Random) -> tuple[State, Policy, list[int]]:
    """Nodes of all kinds, some of them busy, and tasks that wait."""
    state = a_state(
        *(
            a_node(
                number,
                dice.choice((2, 4, 16)),
                tuple(dice.choice(MODELS) for _ in range(dice.choice((0, 1, 2, 4)))),
                tiers=frozenset({Tier.CONTAINER, *dice.choice(((), (Tier.VM,)))}),
            )
            for number in range(1, dice.randint(2, 7))
        )
    )
    order = dice.choice(sorted(ORDERS))
    policy = Policy(order=order, patience=dice.choice((Policy().patience, 10**12)))  # type: ignore[arg-type]
    last, waiting = 0, []
    for turn in range(dice.randint(3, 30)):
        count = dice.choice((1, 1, 1, 3))
        ids = list(range(last + 1, last + 1 + count))
        last += count
        at = NOW - dice.randint(0, 200) * SECOND
        enqueue(state, some_shape(dice), ids, at)
        waiting += ids
        if turn % 3 == 0:
            started = set(apply(state, plan(state, NOW, policy)))
            waiting = [id_ for id_ in waiting if id_ not in started]
    return state, policy, waiting


def some_shape(dice: Random) -> Shape:
    spec = dice.choice((None, None, "1", "2", "4", "A100", "RTX4090:2", "40GB+", "0.5", "A10G,T4"))
    vram = None if spec else dice.choice((None, "6GB", "12GB", "30GB"))
    return gpu(
        spec,
        vram,
        dice.randint(1, 3),
        priority=dice.choice((0, 0, 5)),
        cpu_milli=dice.choice((1000, 1000, 3000, 8000)),
        memory_bytes=dice.choice((None, 2 * GIB, 20 * GIB)),
        tier=dice.choice((Tier.CONTAINER, Tier.CONTAINER, Tier.VM)),
        network=dice.choice((Network.NONE, Network.NONE, Network.NONE, Network.EGRESS)),
    )


def is_started(state: State, policy: Policy, task: int) -> bool:
    return any(
        place.grants[0].task == task
        and place.allocation.number not in state.nodes[place.node].lines
        for place in plan(state, NOW, policy).places
    )


def test_a_suggestion_is_always_true_1000_of_1000() -> None:
    """Applied to the real state, in place or as a new submission, each starts its task in the same pass."""
    checked, kinds, seed = 0, set(), 0
    while checked < 1000:
        state, policy, waiting = some_state(Random(seed))
        seed += 1
        for task in waiting[:6]:
            entry = state.queue_of(TaskId(task))
            assert entry is not None
            shape = entry.shape
            old = next(one for one in entry.queue.entries() if one[1] == task)
            before = state.truth()
            for one in suggest(take(state), TaskId(task), NOW, policy):
                assert state.truth() == before
                changed = replace(shape, requirements=one.requirements)
                state.fold(TasksWithdrawn((TaskId(task),)))
                for id_, at in ((task, old[0]), (10**9, NOW)):
                    state.fold(TasksQueued(changed, queued((id_, 0, at))))
                    assert is_started(state, policy, id_), (seed, task, one)
                    state.fold(TasksWithdrawn((TaskId(id_),)))
                state.fold(TasksQueued(shape, queued((task, 0, old[0]))))
                checked += 1
                kinds.add(one.kind)
    assert {"gpus", "model", "cpus", "memory", "tier", "vram", "network"} <= kinds


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_a_snapshot_always_plans_as_its_state(order: str) -> None:
    for seed in range(60):
        state, policy, _ = some_state(Random(seed))
        policy = replace(policy, order=order)
        twin = take(state).state()
        assert twin == state
        assert plan(twin, NOW, policy) == plan(state, NOW, policy)
