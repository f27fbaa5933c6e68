"""Worked cases: why a task waits, in the words a person reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduling_builders import NOW, a_node, a_shape, a_state, apply, enqueue, hold

from gpool.core import gpuspec
from gpool.core.explain import explain
from gpool.core.ids import TaskId
from gpool.core.model import GIB, Allocation, Availability, Node, Shape, Slice, Tier
from gpool.core.scheduling.events import TasksWithdrawn
from gpool.core.scheduling.orders import Policy
from gpool.core.scheduling.plan import plan

FCFS = Policy(order="fcfs")


def gpu(spec: str, user: int = 1) -> Shape:
    return a_shape(user, spec, gpu=gpuspec.parse(spec))


def why(shape: Shape, *nodes: Node) -> tuple[str, str]:
    state = a_state(*nodes)
    enqueue(state, shape, [1])
    told = explain(state, TaskId(1), NOW, FCFS)
    return told.code, told.sentence


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
    assert told.sentence == "The only node that can run it is busy; it is next in line."


def test_tasks_ahead_are_those_that_could_use_the_same_nodes() -> None:
    state = a_state(a_node(1, cpus=2))
    enqueue(state, a_shape(2), range(100, 110), at=NOW - 9)
    enqueue(state, gpu("H100", 3), range(200, 210), at=NOW - 9)
    enqueue(state, a_shape(1), [1])
    told = explain(state, TaskId(1), NOW, FCFS)
    assert (told.code, told.position) == ("ahead", 11)
    assert told.sentence == "10 tasks are ahead of it in line."


def test_the_place_in_line_is_that_of_the_order_in_force() -> None:
    state = a_state(a_node(1, cpus=1))
    enqueue(state, a_shape(2), range(100, 1100), at=NOW - 9)
    enqueue(state, a_shape(1, priority=1), [1, 2])
    position = {
        name: explain(state, TaskId(2), NOW, Policy(order=name)).position
        for name in ("fcfs", "priority", "round_robin")
    }
    assert position == {"fcfs": 1002, "priority": 2, "round_robin": 4}


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
]


@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 9)), min_size=1, max_size=12),
    st.sampled_from(["fcfs", "round_robin", "priority"]),
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
