"""Nearest changes that would start a waiting task now. Each is planned on a copy first, so every suggestion is true.
Planned as the newest task (submitted again) and with the old age (changed in place); both must start.
One file because every kind of change uses the same trial plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from gpool.core.ids import TaskId
from gpool.core.model import GIB, Gpu, GpuRequest, Instant, Network, Node, Requirements, Shape, Tier
from gpool.core.scheduler.order.builtin import ORDERS
from gpool.core.scheduler.order.orders import Order, Policy
from gpool.core.scheduler.passes.plan import plan
from gpool.core.scheduler.place.fit import (
    fit,
    is_open,
    is_slice,
    possible_prices,
    price_of,
    unfit,
    usable,
)
from gpool.core.scheduler.place.gangs import most_together
from gpool.core.scheduler.place.index import PlacementIndex
from gpool.core.scheduler.state.capacity import GpuRoom
from gpool.core.scheduler.state.events import Placement, QueuedTask, TasksQueued, TasksWithdrawn
from gpool.core.scheduler.state.snapshot import Snapshot
from gpool.core.scheduler.state.state import State
from gpool.core.specs import fields
from gpool.core.specs import gpu as gpuspec

MOST_PLANS = 60
"""Passes tried per question."""

_TRIES = 6  # values tried per kind of change, nearest first
_GB = 1000**3
NEW_TASK = TaskId((1 << 62) - 1)
"""Id of a task that is not submitted yet: newer than every real one."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """`change`: options of `gpool run` ("--gpu RTX4090"). `price_microcredits`: price per hour on each node."""

    kind: str
    change: str
    sentence: str
    requirements: Requirements
    price_microcredits: int = 0


@dataclass(frozen=True, slots=True)
class _Change:
    change: str
    words: str
    requirements: Requirements


@dataclass(frozen=True, slots=True)
class Suggested:
    """`is_complete`: all possible changes were tried."""

    found: tuple[Suggestion, ...] = ()
    is_complete: bool = True


def _never() -> bool:
    return False


def suggest(
    snapshot: Snapshot,
    task: TaskId,
    now: Instant,
    policy: Policy,
    orders: Mapping[str, Order] = ORDERS,
) -> tuple[Suggestion, ...]:
    """Nearest change of each kind; empty if the task starts unchanged or does not wait."""
    return Asking(snapshot, now, policy, orders).of(task).found


class Asking:
    def __init__(
        self, snapshot: Snapshot, now: Instant, policy: Policy, orders: Mapping[str, Order] = ORDERS
    ) -> None:
        self.snapshot, self.state = snapshot, snapshot.state()
        self.index = PlacementIndex()
        self.now, self.policy, self.orders = now, policy, orders

    def of(self, task: TaskId, is_late: Callable[[], bool] = _never) -> Suggested:
        """`is_late` is called before each try; once true, return the results so far."""
        self.state.take_hints(self.snapshot.hints)
        asked = _ChangeTrial(self, task, is_late)
        return Suggested(tuple(asked.found()), asked.is_complete)

    def start_of(self, shape: Shape) -> StartNow | None:
        """Where a new task of this shape would start now; None: it would wait."""
        self.state.take_hints(self.snapshot.hints)
        self.state.fold(TasksQueued(shape, (QueuedTask(NEW_TASK, 0, self.now),)))
        try:
            place = self.started(NEW_TASK)
            return None if place is None else StartNow(place, tuple(prices_of(self.state, place)))
        finally:
            self.state.fold(TasksWithdrawn((NEW_TASK,)))

    def started(self, task: TaskId) -> Placement | None:
        """Placement of the task in a pass now. Queueing behind another lease is no start."""
        for place in plan(self.state, self.index, self.now, self.policy, self.orders).places:
            if place.grants[0].task == task:
                is_new = place.allocation.number not in self.state.nodes[place.node].lines
                return place if is_new else None
        return None


@dataclass(frozen=True, slots=True)
class StartNow:
    """`prices`: micro-credits an hour on each of its nodes."""

    place: Placement
    prices: tuple[int, ...]


class _ChangeTrial:
    def __init__(self, asking: Asking, task: TaskId, is_late: Callable[[], bool]) -> None:
        self.asking, self.now = asking, asking.now
        self.state, self.hints = asking.state, asking.snapshot.hints
        self.plans = 0
        self.is_late, self.is_complete = is_late, True
        self.task = asking.snapshot.task(task)
        entry = self.state.queue_of(task)
        self.shape = None if entry is None else entry.shape

    def found(self) -> Iterator[Suggestion]:
        if self.task is None or self.shape is None:
            return
        if self.is_late():
            self.is_complete = False
            return
        if self._started(self.task.id):
            return
        free = _Free(self.state, self.shape)
        for kind, changes in _kinds(self.shape, free):
            for change in _first(changes, _TRIES):
                if self.plans >= MOST_PLANS or self.is_late():
                    self.is_complete = False
                    return
                shape = replace(self.shape, requirements=change.requirements)
                place = self._place(shape) if free.has_room(shape) else None
                if place is not None:
                    yield self._suggestion(kind, change, place)
                    break

    def _suggestion(self, kind: str, change: _Change, place: Placement) -> Suggestion:
        price = cost_of(self.state, place)
        at = f" at {fields.format_price(price)}" if price else ""
        several = " for each node" if price and place.members else ""
        said = f"It starts now{' ' * bool(change.words)}{change.words}{at}{several}."
        return Suggestion(kind, change.change, said, change.requirements, price)

    def _place(self, shape: Shape) -> Placement | None:
        """None if it would not start, as new or with its old age."""
        assert self.task is not None
        assert self.shape is not None
        again = QueuedTask(NEW_TASK, 0, self.now)
        self.state.fold(TasksWithdrawn((self.task.id,)))
        try:
            place = self._start_of(shape, again)
            return place if place is not None and self._start_of(shape, self.task) else None
        finally:
            self.state.fold(TasksQueued(self.shape, (self.task,)))

    def _start_of(self, shape: Shape, task: QueuedTask) -> Placement | None:
        self.state.take_hints(self.hints)  # trials change them
        self.state.fold(TasksQueued(shape, (task,)))
        try:
            return self._started(task.id)
        finally:
            self.state.fold(TasksWithdrawn((task.id,)))

    def _started(self, task: TaskId) -> Placement | None:
        self.plans += 1
        return self.asking.started(task)


def cost_of(state: State, place: Placement) -> int:
    """Price per hour on a gang's most expensive node."""
    return max(prices_of(state, place), default=0)


def prices_of(state: State, place: Placement) -> Iterator[int]:
    """Price per hour on each node."""
    parts = [(place.node, place.allocation)]
    parts += [(member.node, member.allocation) for member in place.members]
    for id_, allocation in parts:
        node = state.nodes[id_].node
        if node is not None:
            yield price_of(node, allocation, place.shape)


class _Free:
    def __init__(self, state: State, shape: Shape) -> None:
        self.state = state
        self.shape = shape
        self.nodes = [
            entry.node
            for entry in state.nodes.values()
            if entry.node is not None and is_open(entry.node)
        ]

    def has_room(self, shape: Shape) -> bool:
        wanted = shape.requirements.nodes
        fitting = self.fitting(shape)
        return any(fitting) if wanted == 1 else most_together(fitting) >= wanted

    def fitting(self, shape: Shape) -> Iterator[Node]:
        for node in self.nodes:
            if unfit(node, shape) is None and fit(node, self.state.nodes[node.id].room, shape):
                yield node

    def most_idle(self, request: GpuRequest) -> int:
        counts = Counter(
            node.id
            for node, room in self.gpus()
            if not room.holders and usable(node, room.gpu, request, shape=self.shape)
        )
        return max(counts.values(), default=0)

    def gpus(self) -> Iterator[tuple[Node, GpuRoom]]:
        for node in self.nodes:
            for room in self.state.nodes[node.id].room.gpus.values():
                is_theirs = not room.holders or room.user == self.shape.user
                if is_theirs and room.gpu.index not in node.gpus_withheld:
                    yield node, room

    def idle(self) -> dict[str, tuple[Gpu, int]]:
        counts: dict[tuple[int, str], int] = {}
        found: dict[str, tuple[Gpu, int]] = {}
        for node, room in self.gpus():
            if not room.holders:
                key = (node.id, room.gpu.model)
                counts[key] = counts.get(key, 0) + 1
                most = max(counts[key], found[room.gpu.model][1] if room.gpu.model in found else 0)
                found[room.gpu.model] = room.gpu, most
        return found


def _kinds(shape: Shape, free: _Free) -> Iterator[tuple[str, Iterator[_Change]]]:
    yield "vram", _less_vram(shape, free)
    yield "share", _less_share(shape, free)
    yield "gpus", _fewer_gpus(shape, free)
    yield "nodes", _fewer_nodes(shape, free)
    yield "model", _other_models(shape, free)
    yield "price", _higher_prices(shape, free)
    yield "labels", _fewer_labels(shape)
    yield "slice", _a_slice(shape, free)
    yield "cpus", _fewer_cpus(shape, free)
    yield "memory", _less_memory(shape, free)
    yield "disk", _less_disk(shape, free)
    yield "tier", _lower_tiers(shape)
    yield "network", _no_network(shape)
    yield "on", _any_owner(shape)


def _less_vram(shape: Shape, free: _Free) -> Iterator[_Change]:
    asked = _only(shape)
    if asked is None or asked.vram_bytes is None:
        return
    sizes = {room.free_memory // _GB * _GB for _, room in free.gpus()}
    for size in sorted(sizes, reverse=True):
        if 0 < size < asked.vram_bytes:
            needs = _gpu(shape, replace(asked, vram_bytes=size))
            yield _Change(f"--vram {_gb(size)}", f"with at most {_gb(size)} of GPU memory", needs)


def _less_share(shape: Shape, free: _Free) -> Iterator[_Change]:
    asked = _only(shape)
    if asked is None or asked.vram_bytes is not None or asked.share_milli >= 1000:
        return
    shares = {room.free_share // 50 * 50 for _, room in free.gpus()}
    for share in sorted(shares, reverse=True):
        if 0 < share < asked.share_milli:
            needs = _gpu(shape, replace(asked, share_milli=share))
            said = f"with {share / 1000:g} of a GPU instead of {asked.share_milli / 1000:g}"
            yield _Change(f"--gpu {gpuspec.format(needs.gpu)}", said, needs)


def _fewer_gpus(shape: Shape, free: _Free) -> Iterator[_Change]:
    asked = _only(shape)
    if asked is None or is_slice(asked):
        return
    for count in range(min(asked.count - 1, free.most_idle(asked)), 0, -1):
        needs = _gpu(shape, replace(asked, count=count))
        said = f"with {count} GPU{'s' if count > 1 else ''} instead of {asked.count}"
        yield _Change(f"--gpu {gpuspec.format(needs.gpu)}", said, needs)


def _fewer_nodes(shape: Shape, free: _Free) -> Iterator[_Change]:
    asked = shape.requirements.nodes
    if asked == 1:
        return
    most = min(asked - 1, most_together(free.fitting(shape)))
    for count in (*range(most, max(1, most - _TRIES + 1), -1), 1):
        needs = replace(shape.requirements, nodes=count)
        said = f"with {count} node{'s' if count > 1 else ''} instead of {asked}"
        yield _Change(f"--nodes {count}", said, needs)


def _other_models(shape: Shape, free: _Free) -> Iterator[_Change]:
    wanted = shape.requirements.gpu
    if not wanted or any(is_slice(request) for request in wanted):
        return
    count = min(request.count for request in wanted)
    idle = sorted(free.idle().values(), key=lambda one: (-one[0].memory_bytes, one[0].model))
    for gpu, most in idle:
        if most < count or any(gpuspec.matches(request, gpu) for request in wanted):
            continue
        needs = _gpu(shape, GpuRequest(count, _model_of(gpu)))
        spec = gpuspec.format(needs.gpu)
        yield _Change(f"--gpu {spec}", f"on {gpu.model} ({gpuspec.gib(gpu.memory_bytes)})", needs)


def _higher_prices(shape: Shape, free: _Free) -> Iterator[_Change]:
    cap = shape.requirements.max_price_microcredits
    if cap is None:
        return
    uncapped = replace(shape, requirements=replace(shape.requirements, max_price_microcredits=None))
    costs = {
        each
        for node in free.nodes
        if unfit(node, uncapped) is None
        for each in possible_prices(node, shape)
    }
    for cost in sorted(costs):
        if cost > cap:
            needs = replace(shape.requirements, max_price_microcredits=cost)
            yield _Change(
                f"--max-price {fields.format_price(cost)}", "", needs
            )  # the price is in the suggestion


def _fewer_labels(shape: Shape) -> Iterator[_Change]:
    asked = shape.requirements.labels
    for count in sorted({1, len(asked)} if asked else ()):
        for given_up in combinations(asked, count):
            left = tuple(label for label in asked if label not in given_up)
            said = " ".join(f"--label {label}" for label in given_up)
            needs = replace(shape.requirements, labels=left)
            words = f"without the label{'s' if count > 1 else ''} {', '.join(given_up)}"
            yield _Change(f"without {said}", words, needs)


def _a_slice(shape: Shape, free: _Free) -> Iterator[_Change]:
    asked = _only(shape)
    if asked is None or is_slice(asked) or asked.count > 1:
        return
    plain = replace(asked, min_memory_bytes=None, max_memory_bytes=None)
    sizes = {
        room.free_memory // _GB * _GB
        for _, room in free.gpus()
        if room.holders and gpuspec.matches(plain, room.gpu)
    }
    for size in sorted(sizes, reverse=True):
        if size > 0:
            needs = _gpu(shape, GpuRequest(vram_bytes=size))
            yield _Change(f"--vram {_gb(size)}", f"with at most {_gb(size)} of one GPU", needs)


def _fewer_cpus(shape: Shape, free: _Free) -> Iterator[_Change]:
    asked = shape.requirements.cpu_milli
    amounts = {free.state.nodes[node.id].room.free_cpu // 500 * 500 for node in free.nodes}
    for amount in sorted(amounts, reverse=True):
        if 0 < amount < asked:
            needs = replace(shape.requirements, cpu_milli=amount, cpu_by_gpus=False)
            said = f"with {amount / 1000:g} CPUs instead of {asked / 1000:g}"
            yield _Change(f"--cpus {amount / 1000:g}", said, needs)


def _less_memory(shape: Shape, free: _Free) -> Iterator[_Change]:
    asked = shape.requirements.memory_bytes
    amounts = {free.state.nodes[node.id].room.free_memory // GIB * GIB for node in free.nodes}
    for amount in sorted(amounts, reverse=True):
        if amount > 0 and (asked is None or amount < asked):
            needs = replace(shape.requirements, memory_bytes=amount, memory_by_gpus=False)
            said = f"with at most {amount // GIB} GiB of memory"
            yield _Change(f"--memory {amount // GIB}GiB", said, needs)


def _less_disk(shape: Shape, free: _Free) -> Iterator[_Change]:
    asked = shape.requirements.disk_bytes
    if asked is None:
        return
    rooms = (free.state.nodes[node.id].room for node in free.nodes)
    for amount in sorted({room.free_disk // GIB * GIB for room in rooms}, reverse=True):
        if 0 < amount < asked:
            needs = replace(shape.requirements, disk_bytes=amount)
            said = f"with at most {amount // GIB} GiB of disk"
            yield _Change(f"--disk {amount // GIB}GiB", said, needs)


def _lower_tiers(shape: Shape) -> Iterator[_Change]:
    asked = shape.requirements.tier
    for tier in (Tier.CONTAINER, Tier.NONE):
        if tier is Tier.NONE and shape.requirements.nodes > 1:
            continue  # a gang's network needs a sandbox
        if tier.strength < asked.strength:
            needs = replace(shape.requirements, tier=tier)
            whose = ", on a node of your own" if tier is Tier.NONE else ""
            yield _Change(f"--tier {tier}", f"with isolation '{tier}'{whose}", needs)


def _no_network(shape: Shape) -> Iterator[_Change]:
    if shape.requirements.network is not Network.NONE:
        needs = replace(shape.requirements, network=Network.NONE)
        yield _Change("--network none", "without network", needs)


def _any_owner(shape: Shape) -> Iterator[_Change]:
    if shape.requirements.on is not None:
        needs = replace(shape.requirements, on=None)
        words = "on a node of another owner, who can read its inputs and secrets"
        yield _Change("--on anyone", words, needs)


def _model_of(gpu: Gpu) -> str:
    words = gpu.model.replace("-", " ").split()
    for count in range(1, len(words)):
        name = gpuspec.normalise(" ".join(words[:count]))
        if name and gpuspec.is_model(name, gpu.model):
            return name
    return gpuspec.normalise(gpu.model)


def _only(shape: Shape) -> GpuRequest | None:
    wanted = shape.requirements.gpu
    return wanted[0] if len(wanted) == 1 else None


def _gpu(shape: Shape, request: GpuRequest) -> Requirements:
    return replace(shape.requirements, gpu=(request,))


def _gb(size: int) -> str:
    return f"{size // _GB}GB"


def _first(changes: Iterable[_Change], count: int) -> Iterator[_Change]:
    for change, _ in zip(changes, range(count), strict=False):
        yield change
