"""CPUs, memory and GPUs of a task in words: what it has, or what it would get on the nodes that could run it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from gpool.core.ids import TaskId
from gpool.core.model import Allocation, Gpu, Node, Requirements, Shape
from gpool.core.scheduler.explain.mismatch import list_of
from gpool.core.scheduler.place.fit import slice_of, unfit, usable
from gpool.core.scheduler.place.shares import most_cpu, most_memory
from gpool.core.scheduler.state.state import State
from gpool.core.specs import gpu as gpuspec
from gpool.core.specs.gpu_topology import Closeness, closeness

_MOST_NODES = 3
"""Different shares that are listed for a waiting task."""

_MOST_COMPARED = 200
"""Nodes looked at for a waiting task."""


class _GpuPart(NamedTuple):
    node: Node
    gpu_milli: int

    @property
    def text(self) -> str:
        return f"{self.gpu_milli / 1000:g}/{len(self.node.offer.gpus)}"


def resource_lines(state: State, task: TaskId) -> tuple[str, ...]:
    """One line each for CPUs, memory and GPUs, of each node of a gang; empty if the task is neither held nor waiting."""
    line = state.held.get(task)
    if line is not None:
        parts = [line, *line.members]
        lines = []
        for part in parts:
            node = state.nodes[part.node].node
            if node is not None:
                where = f"{node.name}: " if len(parts) > 1 else ""
                held = _held(node, line.shape.requirements, part.allocation)
                lines += [where + each for each in held]
        return tuple(lines)
    waiting = state.queue_of(task)
    return () if waiting is None else tuple(_expected(state, waiting.shape))


def gpu_closeness(state: State, task: TaskId) -> str | None:
    """Closeness of a leased task's GPUs, of a gang the least close; None if unknown, or with one GPU at most."""
    line, found = state.held.get(task), []
    for part in () if line is None else (line, *line.members):
        node = state.nodes[part.node].node
        near = None if node is None else closeness(_gpus(node, part.allocation))
        if near is not None:
            found.append(near)
    return max(found, key=list(Closeness).index).value if found else None


def _gpus(node: Node, has: Allocation) -> list[Gpu]:
    indexes = {part.gpu_index for part in has.slices}
    return [gpu for gpu in node.offer.gpus if gpu.index in indexes]


def _held(node: Node, needs: Requirements, has: Allocation) -> Iterable[str]:
    part = _GpuPart(node, sum(each.share_milli for each in has.slices))
    cpu, memory = most_cpu(node, needs, part.gpu_milli), most_memory(node, needs, part.gpu_milli)
    yield f"CPUs: {_granted(needs.cpu_by_gpus, has.cpu_milli, cpu, part, _cpus)}"
    yield f"Memory: {_granted(needs.memory_by_gpus, has.memory_bytes, memory, part, gpuspec.gib)}"
    indexes = [each.gpu_index for each in has.slices]
    if indexes:
        near = closeness(_gpus(node, has))
        numbers = ", ".join(str(index) for index in indexes)
        yield f"GPUs: {numbers}" + (f" ({near.value})" if near is not None else "")


def _granted(
    is_share: bool, has: int, share: int, part: _GpuPart, worded: Callable[[int], str]
) -> str:
    if not is_share:
        return worded(has)
    if has < share:
        return f"{worded(has)}; its share of the node ({part.text}: {worded(share)}) was not free"
    return f"share of the node ({part.text}: {worded(has)})"


def _expected(state: State, shape: Shape) -> Iterable[str]:
    needs = shape.requirements
    if not needs.cpu_by_gpus and not needs.memory_by_gpus:
        return
    cpus: dict[str, None] = {}
    memory: dict[str, None] = {}
    for number, entry in enumerate(state.nodes.values()):
        node = entry.node
        if number >= _MOST_COMPARED or len(cpus) >= _MOST_NODES:
            break
        if node is None or unfit(node, shape) is not None:
            continue
        part = _part(node, needs)
        cpus[f"{part.text}: {_cpus(most_cpu(node, needs, part.gpu_milli))}"] = None
        most = most_memory(node, needs, part.gpu_milli)
        memory[f"{part.text}: {gpuspec.gib(most)}"] = None
    for name, wanted, found in (
        ("CPUs", needs.cpu_by_gpus, cpus),
        ("Memory", needs.memory_by_gpus, memory),
    ):
        if wanted:
            yield f"{name}: share of the node" + (f" ({list_of(list(found))})" if found else "")


def _part(node: Node, needs: Requirements) -> _GpuPart:
    """GPUs that the task takes of this node when it is idle: by its first possible alternative."""
    for request in needs.gpu:
        for gpu in node.offer.gpus:
            if usable(node, gpu, request):
                return _GpuPart(node, request.count * slice_of(gpu, request).share_milli)
    return _GpuPart(node, 0)


def _cpus(milli: int) -> str:
    return f"{milli / 1000:g}"
