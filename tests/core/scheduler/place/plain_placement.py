"""The rules of placement (see `gpool.core.scheduler.place.index`) written down plainly, one node and one GPU at a time, to compare with.

It is slow, remembers nothing, and knows neither lost time nor hardware slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import floor

from gpool.core.ids import NodeId
from gpool.core.model import GpuRequest, Node, Shape
from gpool.core.scheduler.place.fit import (
    cpu_price,
    gpu_price,
    is_open,
    is_slice,
    may_join,
    slice_of,
    suits,
    unfit,
    usable,
)
from gpool.core.scheduler.place.kinds import MAX_GPUS, merit_of
from gpool.core.scheduler.place.pricing import WEIGHT, Pricing, size_of
from gpool.core.scheduler.place.rows import price_step
from gpool.core.scheduler.place.shares import granted, least_memory
from gpool.core.scheduler.state.capacity import Room
from gpool.core.scheduler.state.state import State

Rank = tuple[int, ...]


def best_place(
    state: State, shape: Shape, turn: int, pricing: Pricing
) -> tuple[NodeId, int] | None:
    """The node, and of a slice the GPU (else -1)."""
    requests = shape.requirements.gpu
    request = requests[turn] if requests else None
    found: list[tuple[Rank, int]] = []
    for entry in state.nodes.values():
        if entry.node is not None and is_open(entry.node) and unfit(entry.node, shape) is None:
            found += _places(entry.node, entry.room, shape, request, pricing)
    if not found:
        return None
    rank, gpu = min(found)
    return NodeId(rank[-1]), gpu


def _places(
    node: Node, room: Room, shape: Shape, request: GpuRequest | None, pricing: Pricing
) -> Iterator[tuple[Rank, int]]:
    """At most one: how it ranks, the least first, its id last; and the GPU."""
    needs, offer = shape.requirements, node.offer
    memory = least_memory(node, needs)
    if room.free_cpu < needs.cpu_milli or room.free_memory < memory:
        return
    if room.free_disk < (needs.disk_bytes or 0):
        return
    free = free_parts(node, room)
    lent = offer.gpus[:MAX_GPUS]
    cap = needs.max_price_microcredits
    cards = [] if request is None else [g for g in lent if usable(node, g, request, cap, shape)]
    afters: list[tuple[list[int], float, int, int, int]] = []  # free, worth lost, had, GPU, took
    if request is None:
        afters.append((free, 0.0, 0, -1, 0))
    elif len(cards) < request.count:
        return
    elif is_slice(request):
        for place, card in enumerate(lent):
            there = room.gpus[card.index]
            part = slice_of(card, request) if card in cards else None
            if part is None or not may_join(there, shape.user):
                continue
            if there.free_share < part.share_milli or there.free_memory < part.memory_bytes:
                continue
            takes = max(part.share_milli, 1000 * part.memory_bytes // max(1, card.memory_bytes))
            rest = max(0, free[place] - takes)
            worth = pricing.remnants[free[place]] / 1000 - pricing.remnants[rest] / 1000
            after = [*free[:place], rest, *free[place + 1 :]]
            afters.append((after, worth, free[place], place, part.share_milli))
    else:
        idle = [
            place for place, g in enumerate(lent) if g in cards and not room.gpus[g.index].holders
        ]
        if len(idle) < request.count:
            return
        taken = idle[: request.count]
        after = [0 if place in taken else f for place, f in enumerate(free)]
        afters.append((after, 0.0, 0, -1, 1000 * request.count))
    if not afters:
        return
    now = room.free_cpu, room.free_memory
    steps = []
    for after, worth, had, gpu, took in afters:
        cpu, memory = granted(node, needs, took, *now)
        left = room.free_cpu - cpu, room.free_memory - memory
        steps.append((-_step(node, pricing, (free, *now), (after, *left), worth), had, gpu))
    step, _, gpu = min(steps)
    if request is None:
        price, virtue = cpu_price(node, needs.cpu_milli, shape), int(bool(offer.gpus))
    else:
        price = min(gpu_price(node, g, request, shape) for g in cards)
        virtue = merit_of(node)
    smallest = min((g.memory_bytes for g in cards), default=0) >> 20
    lesser = (smallest, max(0, room.free_cpu), max(0, room.free_memory) >> 20, node.id)
    yield (step, price_step(price), virtue, sum(free), *lesser), gpu


def free_parts(node: Node, room: Room) -> list[int]:
    found = []
    for card in node.offer.gpus[:MAX_GPUS]:
        there = room.gpus[card.index]
        by_memory = 1000 * there.free_memory // max(1, card.memory_bytes)
        is_lent = not card.closed and card.index not in node.gpus_withheld
        found.append(max(0, min(there.free_share, by_memory)) if is_lent else 0)
    return found


State3 = tuple[list[int], int, int]  # free parts of GPUs, CPU, memory


def _step(node: Node, pricing: Pricing, before: State3, after: State3, worth: float) -> int:
    weights = pricing.weights
    gain = _fragments(node, pricing, before) - _fragments(node, pricing, after)
    lost = -weights.stranding * _stranded(pricing, before) + weights.remnants * worth
    lost += weights.stranding * _stranded(pricing, after)
    return floor((gain * (weights.fragmentation / WEIGHT) - lost) / weights.step)


def _fragments(node: Node, pricing: Pricing, there: State3) -> int:
    free, cpu, _ = there
    lost = 0
    for wanted, weight in pricing.mix:
        size = size_of(wanted.gpu[0])
        fitting = sum(part >= size for part in free)
        can = suits(node, wanted) and cpu >= wanted.cpu_milli and fitting >= wanted.gpu[0].count
        lost += weight * (sum(part for part in free if part < size) if can else sum(free))
    return lost


def _stranded(pricing: Pricing, there: State3) -> float:
    free, cpu, memory = there
    if not free:
        return 0.0
    fed = cpu * (pricing.gpu_milli / max(1, pricing.cpu_milli))
    if pricing.memory_bytes and pricing.gpu_milli:
        fed = min(fed, memory * (pricing.gpu_milli / pricing.memory_bytes))
    return max(sum(free) - fed, 0.0)
