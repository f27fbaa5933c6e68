"""Short ways to say nodes, shapes and tasks in the tests of scheduling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.model import (
    GIB,
    MIB,
    Allocation,
    Gpu,
    Instant,
    Node,
    Offer,
    Requirements,
    Shape,
    TaskKind,
    Tier,
)
from gpool.core.scheduler.order.builtin import ORDERS
from gpool.core.scheduler.order.orders import Order, Policy
from gpool.core.scheduler.passes import plan as passes
from gpool.core.scheduler.place.index import PlacementIndex
from gpool.core.scheduler.place.pricing import USUAL, Pricing
from gpool.core.scheduler.state.events import (
    NodeChanged,
    PassPlan,
    QueuedTask,
    TasksLeased,
    TasksQueued,
)
from gpool.core.scheduler.state.state import State

NOW = Instant(10**15)
OWNER = UserId(99)

MEMORY_MIB = {  # as their drivers say it
    "NVIDIA A10G": 23028,
    "NVIDIA GeForce RTX 4090": 24564,
    "NVIDIA A100-SXM4-40GB": 40960,
    "NVIDIA A100-SXM4-80GB": 81920,
    "NVIDIA H100 80GB HBM3": 81559,
    "NVIDIA H200": 143771,
    "Tesla T4": 15360,
}


def a_gpu(index: int = 0, model: str = "NVIDIA A10G", **more: Any) -> Gpu:
    return Gpu(index, f"GPU-{index}", model, "nvidia", MEMORY_MIB[model] * MIB, **more)


def a_node(
    number: int = 1,
    cpus: int = 4,
    gpus: int | tuple[str, ...] = 0,
    *,
    tiers: frozenset[Tier] = frozenset({Tier.CONTAINER}),
    pythons: frozenset[str] = frozenset({"3.11"}),
    **more: Any,
) -> Node:
    models = ("NVIDIA A10G",) * gpus if isinstance(gpus, int) else gpus
    devices = tuple(a_gpu(index, model) for index, model in enumerate(models))
    site = more.pop("site", "lab")
    reach = {"site": site, "address": f"10.0.0.{number % 250 + 1}", "gang_port": 7000}
    offer = Offer(cpus * 1000, cpus * 4 * GIB, 100 * GIB, devices, pythons, tiers, **reach)
    return Node(NodeId(number), more.pop("owner", OWNER), f"node{number}", offer, **more)


def a_shape(
    user: int = 1, group: str = "f", priority: int = 0, environment: str = "default", **needs: Any
) -> Shape:
    needs_all = Requirements(**needs)
    return Shape(UserId(user), needs_all, priority, TaskKind.FUNCTION, environment, group)


def queued(*tasks: tuple[int, int, int]) -> tuple[QueuedTask, ...]:
    """(id, epoch, queued_at) each."""
    return tuple(QueuedTask(TaskId(i), epoch, Instant(at)) for i, epoch, at in tasks)


def a_state(*nodes: Node) -> State:
    state = State()
    for node in nodes:
        state.fold(NodeChanged(node))
    return state


_INDEX = (
    PlacementIndex()
)  # follows the state of the last call, so that passes over one state share it


def plan(
    state: State,
    now: Instant,
    policy: Policy = passes.DEFAULT,
    orders: Mapping[str, Order] = ORDERS,
) -> PassPlan:
    return passes.plan(state, _INDEX, now, policy, orders)


def index_of(state: State, pricing: Pricing = USUAL) -> PlacementIndex:
    """The index that `plan` uses, up to date with the state."""
    _INDEX.follow(state, pricing)
    return _INDEX


def enqueue(state: State, shape: Shape, ids: range | list[int], at: int = NOW) -> None:
    state.fold(TasksQueued(shape, queued(*((i, 0, at) for i in ids))))


def apply(state: State, plan: PassPlan) -> list[int]:
    """As if the store had written all of it; the tasks leased, in order."""
    for place in plan.places:
        ids = tuple(grant.task for grant in place.grants)
        state.fold(TasksLeased(place.node, place.allocation, place.shape, ids))
    return [grant.task for place in plan.places for grant in place.grants]


def hold(state: State, shape: Shape, node: int, allocation: Allocation, *ids: int) -> None:
    tasks = tuple(TaskId(i) for i in ids)
    state.fold(TasksLeased(NodeId(node), allocation, shape, tasks))
