"""What-if: whatever is suggested is true, and worked cases of what is said."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from bench.whatif import check, some_pool

from gpool.core.ids import TaskId
from gpool.core.model import SECOND, Node, Shape, Tier
from gpool.core.scheduler.explain.whatif import Asking, Suggested, Suggestion, suggest
from gpool.core.scheduler.order.builtin import ORDERS
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.state.snapshot import take
from gpool.core.scheduler.state.state import State
from gpool.core.specs import gpu as gpuspec
from tests.core.scheduler.state.builders import NOW, a_node, a_shape, a_state, apply, enqueue, plan

FCFS = Policy(order="fcfs")


def told(state: State, task: int, policy: Policy = FCFS) -> dict[str, Suggestion]:
    return {one.kind: one for one in suggest(take(state), TaskId(task), NOW, policy)}


def gpu(spec: str | None = None, vram: str | None = None, user: int = 1, **needs: object) -> Shape:
    return a_shape(user, f"{spec}{vram}", gpu=gpuspec.parse(spec, vram), **needs)


def priced(node: Node, price: int) -> Node:
    return replace(node, offer=replace(node.offer, price_microcredits=price))


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
    assert found.sentence == "It starts now on NVIDIA GeForce RTX 4090 (24 GiB)."


def test_what_a_suggestion_costs_is_told_with_it() -> None:
    cheap = priced(a_node(2, 8, ("NVIDIA GeForce RTX 4090",) * 2), 310_000)
    state = a_state(priced(a_node(1, 8, ("NVIDIA H200",)), 2_000_000), cheap)
    enqueue(state, gpu("H200", user=2), [1])
    apply(state, plan(state, NOW, FCFS))
    enqueue(state, gpu("H200"), [2])
    found = told(state, 2)["model"]
    assert found.sentence == "It starts now on NVIDIA GeForce RTX 4090 (24 GiB) at 0.31/h."
    assert found.price_microcredits == 310_000


def test_a_higher_price_a_label_less_and_fewer_nodes_are_suggested() -> None:
    state = a_state(priced(a_node(1, 8, 2), 310_000), priced(a_node(2, 8, 2), 400_000))
    enqueue(state, gpu("1", max_price_microcredits=300_000), [1])
    found = told(state, 1)["price"]
    assert (found.change, found.sentence) == ("--max-price 0.31/h", "It starts now at 0.31/h.")
    enqueue(state, gpu("1", labels=("ssd",)), [2])
    found = told(state, 2)["labels"]
    assert found.change == "without --label ssd"
    assert found.sentence == "It starts now without the label ssd at 0.31/h."
    enqueue(state, gpu("2", nodes=3), [3])
    found = told(state, 3)["nodes"]
    assert found.change == "--nodes 2"
    said = "It starts now with 2 nodes instead of 3 at 0.80/h for each node."
    assert found.sentence == said


def test_what_is_far_from_what_was_asked_is_suggested_as_well() -> None:
    state = a_state(a_node(1, 64, 1), a_node(2, 64, 1))
    enqueue(state, gpu("16"), [1])
    assert told(state, 1)["gpus"].change == "--gpu 1"
    enqueue(state, gpu("1", nodes=100), [2])
    assert told(state, 2)["nodes"].change == "--nodes 2"
    apart = a_state(a_node(1, 64, 1, site=""), a_node(2, 64, 1, site=""))
    enqueue(apart, gpu("1", nodes=100), [1])
    assert told(apart, 1)["nodes"].change == "--nodes 1"


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


@pytest.mark.parametrize("first_seed", [0, 10_000, 20_000])
def test_a_suggestion_is_always_true(first_seed: int) -> None:
    """Applied, in place or as a new submission, each starts its task in the same pass; `bench.whatif` does it 1,000 times."""
    found = check(100, first_seed)
    assert found.false == []
    assert found.told.total() == found.true.total() == 100
    assert {"nodes", "labels", "price", "model", "cpus", "memory", "tier"} <= set(found.told)
    assert found.of_gangs > 0


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_a_snapshot_always_plans_as_its_state(order: str) -> None:
    for seed in range(60):
        state, policy, _ = some_pool(Random(seed))
        policy = replace(policy, order=order)
        twin = take(state).state()
        assert twin == state
        assert plan(twin, NOW, policy) == plan(state, NOW, policy)


@pytest.mark.parametrize("seed", range(8))
def test_who_is_asked_about_after_others_is_always_told_the_same(seed: int) -> None:
    """Those who ask at once share one copy of the pool, and trying leaves no trace on it."""
    state, policy, waiting = some_pool(Random(seed))
    asking = Asking(take(state), NOW, policy)
    for task in waiting[:8]:
        assert asking.of(task).found == suggest(take(state), task, NOW, policy)


def test_what_is_late_is_told_as_far_as_it_got() -> None:
    state = a_state(a_node(1, 8, 4))
    enqueue(state, gpu("1", user=2), [1])
    apply(state, plan(state, NOW, FCFS))
    enqueue(state, gpu("4"), [2])
    looks = iter([False, False, True])
    asking = Asking(take(state), NOW, FCFS)
    assert asking.of(TaskId(2), lambda: True) == Suggested((), is_complete=False)
    found = asking.of(TaskId(2), lambda: next(looks, True))
    assert ([one.kind for one in found.found], found.is_complete) == (["gpus"], False)
    assert asking.of(TaskId(2)).is_complete


def test_a_copy_of_very_many_queues_has_a_shorter_front_and_whoever_is_asked_about() -> None:
    state = a_state(a_node(1, 8))
    for user in range(1, 31):
        enqueue(state, a_shape(user, cpu_milli=9000), range(1000 * user, 1000 * user + 999))
    taken = take(state, [TaskId(5998), TaskId(5990)])
    fronts = [len(event.tasks) for event in taken.queued]
    assert (min(fronts), max(fronts)) == (666, 668)
    assert sum(fronts) <= 20_000 + 2
    assert taken.task(TaskId(5998)) is not None
    assert taken.left_out == 30 * 999 - sum(fronts)
