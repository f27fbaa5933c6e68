"""Worked cases: why a task waits, in the words a person reads."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from bench.whatif import some_pool
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import (
    GIB,
    Allocation,
    Audience,
    Availability,
    EndReason,
    Node,
    Shape,
    Slice,
    Tier,
)
from gpool.core.scheduler.explain.mismatch import Explanation
from gpool.core.scheduler.explain.waiting import Story, explain, with_story
from gpool.core.scheduler.order.builtin import ORDERS
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.state.events import NodeRemoved, TasksWithdrawn
from gpool.core.specs import gpu as gpuspec
from tests.core.scheduler.state.builders import (
    NOW,
    a_node,
    a_shape,
    a_state,
    apply,
    enqueue,
    hold,
    plan,
)

FCFS = Policy(order="fcfs")


def with_labels(node: Node, *labels: str) -> Node:
    return replace(node, offer=replace(node.offer, labels=frozenset(labels)))


def gpu(spec: str, user: int = 1) -> Shape:
    return a_shape(user, spec, gpu=gpuspec.parse(spec))


def why(shape: Shape, *nodes: Node) -> tuple[str, str]:
    state = a_state(*nodes)
    enqueue(state, shape, [1])
    told = explain(state, TaskId(1), NOW, FCFS)
    return told.code, told.sentence


def offering(number: int, gpus: int = 0, **more: Any) -> Node:
    node = a_node(number, gpus=gpus)
    return replace(node, offer=replace(node.offer, **more))


def labelled(number: int, *labels: str) -> Node:
    return offering(number, labels=frozenset(labels))


def priced(number: int, price: int, gpus: int) -> Node:
    return offering(number, gpus, price_microcredits=price)


def placed_at(number: int, site: str) -> Node:
    return offering(number, site=site)


PAUSED = Availability.PAUSED
H200 = ("NVIDIA H200",)


@pytest.mark.parametrize(
    ("shape", "nodes", "code", "sentence"),
    [
        (
            a_shape(),
            (),
            "no_node",
            "No node has joined the pool yet; `gpool join` on any machine adds one.",
        ),
        (
            a_shape(python="3.12"),
            (a_node(1, pythons=frozenset({"3.9", "3.11"})), a_node(2)),
            "no_python",
            "No node has Python 3.12; there are: 3.9, 3.11.",
        ),
        (
            a_shape(environment="torch"),
            (a_node(1),),
            "no_environment",
            "No node has the environment 'torch'; there are: default.",
        ),
        (
            a_shape(tier=Tier.VM),
            (a_node(1),),
            "no_tier",
            "No node isolates as strongly as 'vm'; there are: container.",
        ),
        (
            a_shape(tier=Tier.NONE),
            (a_node(1, tiers=frozenset(Tier)),),
            "no_tier",
            "Isolation 'none' is only given on your own nodes, and none of yours offers it; start its agent with --allow-process.",
        ),
        (
            a_shape(cpu_milli=6500),
            (a_node(1, cpus=2), a_node(2, cpus=4)),
            "too_many_cpus",
            "It asks for 6.5 CPUs; the largest node has 4.",
        ),
        (
            a_shape(memory_bytes=20 * GIB),
            (a_node(1),),
            "too_much_memory",
            "It asks for 20 GiB of memory; the largest node has 16 GiB.",
        ),
        (
            a_shape(disk_bytes=200 * GIB),
            (a_node(1),),
            "too_much_disk",
            "It asks for 200 GiB of disk; the largest node has 100 GiB.",
        ),
        (
            a_shape(labels=("ssd", "zone=b")),
            (labelled(1, "zone=a"), labelled(2, "ssd")),
            "no_label",
            "No node has the label zone=b; there are: ssd, zone=a.",
        ),
        (
            a_shape(labels=("ssd", "zone=a")),
            (labelled(1, "zone=a"), labelled(2, "ssd")),
            "no_label",
            "No node has all of the labels ssd, zone=a together.",
        ),
        (
            a_shape(gpu=gpuspec.parse("2"), max_price_microcredits=500_000),
            (priced(1, 310_000, 2), priced(2, 400_000, 2), a_node(3)),
            "over_price",
            "It may cost 0.50/h; the cheapest that could run it costs 0.62/h.",
        ),
        (
            a_shape(nodes=3),
            (a_node(1), a_node(2), placed_at(3, "attic")),
            "no_site",
            "No site has 3 nodes that could run it; the most in one is 2.",
        ),
        (
            a_shape(nodes=2),
            (a_node(1), a_node(2, connected=False), placed_at(3, "attic")),
            "not_connected",
            "node2 could run it, but is not connected just now.",
        ),
        (
            a_shape(nodes=2),
            (a_node(1), a_node(2, cordoned=True), placed_at(3, "attic")),
            "cordoned",
            "It needs 2 nodes of one site, and just now no site has more than 1: node2 could run it, "
            "but an operator lets nothing new start there just now.",
        ),
        (
            a_shape(nodes=2),
            (a_node(1), a_node(2)),
            "next",
            "It starts with the next scheduling pass.",
        ),
        (gpu("1"), (a_node(1),), "no_gpu", "It asks for a GPU (1) and no node lends one."),
        (
            gpu("1"),
            (a_node(1, gpus=1, gpus_withheld=frozenset({0})),),
            "withheld",
            "The owners have set all GPUs unavailable.",
        ),
        (
            gpu("80GB"),
            (a_node(1, gpus=("Tesla T4", "NVIDIA A10G")),),
            "gpu_too_small",
            "No GPU is that large (80GB); the largest is NVIDIA A10G (22.5 GiB).",
        ),
        (
            gpu("vram=30GB"),
            (a_node(1, gpus=1),),
            "gpu_too_small",
            "No GPU is that large (vram=30GB); the largest is NVIDIA A10G (22.5 GiB).",
        ),
        (
            gpu("A10G:4"),
            (a_node(1, gpus=1), a_node(2, gpus=2)),
            "too_few_gpus",
            "It asks for 4 GPUs of one node (A10G:4); the most on one is 2.",
        ),
        (
            gpu("H100,A100"),
            (a_node(1, gpus=1), a_node(2, gpus=H200)),
            "no_such_gpu",
            "No node lends such a GPU (H100,A100); there are: NVIDIA A10G (22.5 GiB), NVIDIA H200 (140.4 GiB).",
        ),
        (
            a_shape(gpu=gpuspec.parse("H200"), labels=("ssd",)),
            (with_labels(a_node(1, gpus=1), "ssd"), a_node(2, gpus=H200)),
            "no_label",
            "No node with such a GPU (H200) has the label ssd; without that it could run on node2.",
        ),
        (
            a_shape(gpu=gpuspec.parse("H200"), labels=("fast", "ssd")),
            (
                with_labels(a_node(1, gpus=1), "fast", "ssd"),
                with_labels(a_node(2, gpus=H200), "ssd"),
                a_node(3, gpus=H200),
            ),
            "no_label",
            "No node with such a GPU (H200) has the labels fast, ssd; without that it could run on node2, node3.",
        ),
        (
            a_shape(cpu_milli=6000, labels=("ssd",)),
            (with_labels(a_node(1), "ssd"), a_node(2, cpus=8)),
            "no_label",
            "No node that could run it has the label ssd; without that it could run on node2.",
        ),
        (
            a_shape(gpu=gpuspec.parse("H100"), labels=("ssd",)),
            (with_labels(a_node(1, gpus=1), "ssd"), a_node(2, gpus=H200)),
            "no_such_gpu",  # whatever its labels
            "No node lends such a GPU (H100); there are: NVIDIA A10G (22.5 GiB).",
        ),
        (
            a_shape(),
            (a_node(1, availability=PAUSED),),
            "paused",
            "node1 could run it, but its owner takes no new tasks just now.",
        ),
        (
            a_shape(),
            (a_node(1, connected=False), a_node(2, connected=False)),
            "not_connected",
            "Each of node1, node2 could run it, but is not connected just now.",
        ),
        (a_shape(), (a_node(1),), "next", "It starts with the next scheduling pass."),
        (
            a_shape(),
            (a_node(1), a_node(2, availability=PAUSED)),
            "next",
            "It starts with the next scheduling pass.",
        ),
    ],
)
def test_every_reason_is_said_plainly(
    shape: Shape, nodes: tuple[Node, ...], code: str, sentence: str
) -> None:
    assert why(shape, *nodes) == (code, sentence)


def whole(number: int, index: int) -> Allocation:
    return Allocation(number, 1000, GIB, (Slice(index, 0, 1000),))


def test_busy_gpus_are_counted() -> None:
    state = a_state(a_node(1, gpus=2))
    hold(state, gpu("1", 2), 1, whole(0, 0), 101)
    hold(state, gpu("1", 2), 1, whole(1, 1), 102)
    enqueue(state, gpu("1"), [1, 2, 3])
    first, third = (explain(state, TaskId(i), NOW, FCFS) for i in (1, 3))
    assert first.sentence == "All 2 matching GPUs are busy; it is next in line."
    assert (first.code, first.position) == ("gpus_busy", 1)
    assert third.sentence == "All 2 matching GPUs are busy; 2 tasks are ahead of it in line."
    assert third.position == 3


def test_half_of_what_is_needed_is_said_too() -> None:
    state = a_state(a_node(1, gpus=2))
    hold(state, gpu("1", 2), 1, whole(0, 0), 101)
    enqueue(state, gpu("2"), [1])
    told = explain(state, TaskId(1), NOW, FCFS)
    assert told.sentence == "1 of the 2 matching GPUs is busy; it is next in line."


def test_a_busy_node_is_named_as_such() -> None:
    state = a_state(a_node(1, cpus=1, gpus=1))
    hold(state, a_shape(2), 1, Allocation(0, 1000, GIB), 101)
    enqueue(state, gpu("1"), [1])
    told = explain(state, TaskId(1), NOW, FCFS)
    assert told.code == "nodes_busy"
    assert told.sentence == (
        "A matching GPU is free, but its node has too few free processors for it now; "
        "it is next in line."
    )


def test_tasks_ahead_are_those_that_could_use_the_same_nodes() -> None:
    state = a_state(a_node(1, cpus=2))
    enqueue(state, a_shape(2), range(100, 110), at=NOW - 9)
    enqueue(state, gpu("H100", 3), range(200, 210), at=NOW - 9)
    enqueue(state, a_shape(1), [1])
    told = explain(state, TaskId(1), NOW, FCFS)
    assert (told.code, told.position) == ("ahead", 11)
    assert told.sentence == "10 tasks are ahead of it in line."


class Asked(frozenset[str]):
    """Counts how often it was asked what it holds."""

    times = 0

    def __contains__(self, thing: object) -> bool:
        type(self).times += 1
        return super().__contains__(thing)


def test_many_kinds_of_tasks_never_make_an_answer_look_at_every_node_for_each() -> None:
    pythons = Asked({"3.11"})
    state = a_state(*(a_node(number, 4, 1, pythons=pythons) for number in range(1, 201)))
    enqueue(state, gpu("1"), [*range(1, 202)])
    apply(state, plan(state, NOW))
    for number in range(300):
        enqueue(state, a_shape(2, cpu_milli=5000 + number, python="3.11"), [1000 + number])
    Asked.times = 0
    told = explain(state, TaskId(201), NOW)
    assert (told.code, told.position) == ("gpus_busy", 1)
    assert 0 < Asked.times < 1000


def test_the_place_in_line_is_that_of_the_order_in_force() -> None:
    state = a_state(a_node(1, cpus=1))
    enqueue(state, a_shape(2), range(100, 1100), at=NOW - 9)
    enqueue(state, a_shape(1, priority=1), [1, 2])
    position = {
        name: explain(state, TaskId(2), NOW, Policy(order=name)).position
        for name in ("fcfs", "priority", "round_robin")
    }
    assert position == {"fcfs": 1002, "priority": 2, "round_robin": 4}


def test_the_place_by_fair_share_counts_what_those_ahead_take() -> None:
    """Both have a thousand tasks: the tenth of one comes after about ten of the other, not after none or all."""
    state = a_state(a_node(1, cpus=100))
    hold(state, a_shape(9), 1, Allocation(0, 100_000, GIB), 5000)
    enqueue(state, a_shape(2), range(1000, 2000), at=NOW - 9)
    enqueue(state, a_shape(1), range(1, 1001))
    position = explain(state, TaskId(10), NOW, Policy(order="fair_share")).position
    assert position in (19, 20, 21)


def test_what_an_operator_holds_back_is_told_beside_what_is_busy() -> None:
    kept = Audience(frozenset({7}))
    state = a_state(a_node(1, 1), a_node(2, cordoned=True), a_node(3, reserved_for=kept))
    hold(state, a_shape(2), 1, Allocation(0, 1000, GIB), 101)
    enqueue(state, a_shape(), [1])
    told = explain(state, TaskId(1), NOW, FCFS)
    assert told.code == "nodes_busy"
    assert told.sentence == (
        "The only node that can run it is busy; it is next in line. node2 could run it too, but is cordoned. "
        "node3 could run it too, but is reserved for others just now."
    )


def test_a_gang_is_told_how_many_nodes_of_one_site_have_room() -> None:
    state = a_state(a_node(1, 1), a_node(2, 1), placed_at(3, "attic"))
    hold(state, a_shape(2), 1, Allocation(0, 1000, GIB), 101)
    enqueue(state, a_shape(nodes=2), [1])
    told = explain(state, TaskId(1), NOW, FCFS)
    assert (told.code, told.position) == ("nodes_busy", 1)
    assert told.sentence == (
        "No site has 2 nodes with room for it just now, 1 is the most in one; it is next in line."
    )
    hold(state, a_shape(2), 2, Allocation(0, 1000, GIB), 102)
    state.fold(NodeRemoved(NodeId(3)))
    assert "none has any" in explain(state, TaskId(1), NOW, FCFS).sentence


def test_a_node_that_is_only_reserved_is_nearer_than_one_that_is_too_small() -> None:
    kept = a_node(2, 8, reserved_for=Audience(frozenset({7})))
    code, said = why(a_shape(cpu_milli=8000), a_node(1, 2), kept)
    assert (code, said) == ("reserved", "node2 could run it, but is reserved for others just now.")
    code, said = why(a_shape(nodes=2), a_node(1), kept)
    assert (code, said) == ("reserved", "node2 could run it, but is reserved for others just now.")


WAITS = Explanation("gpus_busy", "All 2 matching GPUs are busy; it is next in line.", 1)


@pytest.mark.parametrize(
    ("story", "code", "sentence"),
    [
        (Story(), "gpus_busy", WAITS.sentence),
        (
            Story(
                tries=2, last="exited on node1, code 7", why=EndReason.EXITED, log="gpool logs t-1"
            ),
            "keeps_failing",
            "It failed 2 times by itself (last: exited on node1, code 7), and waits for its next start. "
            "`gpool logs t-1` shows what it wrote. " + WAITS.sentence,
        ),
        (
            Story(tries=1, last="out of memory on node1", why=EndReason.OUT_OF_MEMORY),
            "gpus_busy",
            "It failed 1 time by itself (last: out of memory on node1), and waits for its next start. "
            "Ask for more memory (--memory), or for less work at once. " + WAITS.sentence,
        ),
        (
            Story(losses=2, preempted=1, lost="node2"),
            "loses_nodes",
            "It was stopped 1 time for other tasks or by its node's owner and lost 2 nodes under it (last: node2), and waits for its next start. "
            "After three it is given up: see that it does not take its nodes down. "
            + WAITS.sentence,
        ),
    ],
)
def test_no_capacity_is_told_from_what_keeps_crashing(
    story: Story, code: str, sentence: str
) -> None:
    told = with_story(WAITS, story)
    assert (told.code, told.sentence, told.position) == (code, sentence, 1)


def test_cancelled_tasks_are_not_counted() -> None:
    state = a_state(a_node(1, cpus=1))
    enqueue(state, a_shape(), range(1, 11))
    state.fold(TasksWithdrawn((TaskId(3), TaskId(5))))
    assert explain(state, TaskId(10), NOW, FCFS).position == 8


def test_a_task_that_does_not_wait_is_told_where_it_is() -> None:
    state = a_state(a_node(1, cpus=1))
    enqueue(state, a_shape(), [1])
    apply(state, plan(state, NOW, FCFS))
    assert explain(state, TaskId(1), NOW, FCFS).sentence == "It does not wait: node1 has it."
    assert explain(state, TaskId(7), NOW, FCFS).code == "not_waiting"
    hold(state, a_shape(), 1, Allocation(0, 1000, 4 * GIB), 2)
    told = explain(state, TaskId(1), NOW, FCFS)
    assert told.sentence == "node1 has it, in one line with 1 other of its kind."


KINDS = [
    gpu("1"),
    gpu("0.5", 2),
    gpu("2", 3),
    a_shape(2),
    a_shape(3, cpu_milli=4000),
    a_shape(1, priority=5),
    a_shape(2, nodes=2),
    replace(a_shape(4), team=7),
]


@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 9)), min_size=1, max_size=12),
    st.sampled_from(sorted(ORDERS)),
    st.integers(0, 8),
)
def test_what_explain_calls_next_always_starts_in_the_next_plan(
    tasks: list[tuple[Shape, int]], order: str, running: int
) -> None:
    policy = Policy(order=order)
    state = a_state(a_node(1, gpus=2), a_node(2))
    for number, (shape, age) in enumerate(tasks):
        if number == running:
            apply(state, plan(state, NOW, policy))
        enqueue(state, shape, [number], at=NOW - age)
    waiting = [number for number in range(len(tasks)) if state.queue_of(TaskId(number))]
    told = {number: explain(state, TaskId(number), NOW, policy) for number in waiting}
    started = set(apply(state, plan(state, NOW, policy)))
    assert {number for number in waiting if told[number].code == "next"} <= started
    for number in waiting:
        assert told[number].sentence.endswith(".")
        assert (told[number].position or 1) <= len(waiting)


@pytest.mark.parametrize("first", [0, 10, 20])
def test_explain_never_contradicts_the_planner(first: int) -> None:
    """Pools by chance, with gangs, labels, prices and limits: what it calls next starts, and what it says cannot does not."""
    for seed in range(first, first + 10):
        state, policy, waiting = some_pool(Random(seed))
        told = {task: explain(state, task, NOW, policy) for task in waiting}
        started = {
            place.grants[0].task
            for place in plan(state, NOW, policy).places
            if place.allocation.number not in state.nodes[place.node].lines
        }
        for task, found in told.items():
            assert task in started or found.code != "next", (seed, task)
            assert task not in started or found.code in ("next", "ahead"), (seed, task, found)
            assert (found.position or 1) <= len(waiting)


def test_a_label_that_a_node_has_is_not_blamed_for_its_price_or_its_owners_choice() -> None:
    wanted = a_shape(labels=("ssd",), max_price_microcredits=10)
    dear = offering(1, labels=frozenset({"ssd"}), price_microcredits=10**6)
    assert why(wanted, dear, a_node(2))[0] == "over_price"
    others = replace(labelled(1, "ssd"), audience=Audience(frozenset({7})))
    assert why(a_shape(labels=("ssd",)), others, a_node(2))[0] == "not_for_you"
    assert why(a_shape(labels=("ssd",)), a_node(1), a_node(2))[0] == "no_label"
