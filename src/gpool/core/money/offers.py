"""Offers of a pool, grouped by GPU model and price, as one consumer sees them. Pure; reads nodes and their free room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpool.core.model import Gpu, Node, Shape, Span
from gpool.core.money.prices import gpu_hour, is_free_for
from gpool.core.scheduler.place.fit import is_open, unfit, usable
from gpool.core.scheduler.state.capacity import Room
from gpool.core.specs.fields import CREDIT


@dataclass(frozen=True, slots=True)
class OfferFilter:
    """Bounds on what is known of a GPU; an unknown value does not meet a bound above 0."""

    min_mtbf: Span = Span(0)  # noqa: RUF009 - an int
    min_tflops_per_credit: float = 0.0
    min_memory_gb_per_s: int = 0
    only_free: bool = False

    def accepts(self, node: Node, price: int) -> bool:
        merit = node.merit
        if merit.mtbf < self.min_mtbf or merit.memory_gb_per_s < self.min_memory_gb_per_s:
            return False
        if not self.min_tflops_per_credit:
            return True
        value = tflops_per_credit(merit.gigaflops, price)
        return bool(merit.gigaflops) and (value is None or value >= self.min_tflops_per_credit)


def tflops_per_credit(gigaflops: int, price: int) -> float | None:
    """Measured TFLOP/s for a price of one credit an hour; None if it was not measured or costs nothing."""
    if not gigaflops or not price:
        return None
    return gigaflops / 1000 / (price / CREDIT)


class OfferKey(NamedTuple):
    """In the order of listings: the cheapest first."""

    price_microcredits: int  # per hour of a whole GPU
    model: str
    memory_bytes: int
    simulated: bool
    vendor: str


class OfferGroup:
    """GPUs of one model and price. Bounds are those of the least GPU; 0: unknown."""

    __slots__ = (
        "free",
        "gigaflops",
        "gpus",
        "memory_gb_per_s",
        "min_charge_microcredits",
        "mtbf",
        "nodes",
        "notice_s",
        "proven",
        "tiers",
    )

    def __init__(self, node: Node) -> None:
        self.gpus = self.free = self.nodes = self.proven = self.min_charge_microcredits = 0
        self.tiers = set(node.offer.tiers)
        self.notice_s = node.offer.notice_s
        self.mtbf = node.merit.mtbf
        self.gigaflops, self.memory_gb_per_s = node.merit.gigaflops, node.merit.memory_gb_per_s

    def add(self, node: Node, gpus: int, free: int, min_charge: int) -> None:
        offer, merit = node.offer, node.merit
        self.gpus += gpus
        self.free += free
        self.nodes += 1
        self.proven += gpus if merit.is_proven else 0
        self.tiers |= offer.tiers
        self.min_charge_microcredits = max(self.min_charge_microcredits, min_charge)
        self.notice_s = min(self.notice_s, offer.notice_s)
        self.mtbf = min(self.mtbf, merit.mtbf)
        self.gigaflops = min(self.gigaflops, merit.gigaflops)
        self.memory_gb_per_s = min(self.memory_gb_per_s, merit.memory_gb_per_s)


class OfferTable:
    """Groups of the nodes added so far. `shapes`: the same request under each account of the consumer."""

    def __init__(self, shapes: Sequence[Shape], wanted: OfferFilter) -> None:
        self.groups: dict[OfferKey, OfferGroup] = {}
        self._shapes, self._wanted = shapes, wanted

    def add(self, node: Node, room: Room) -> None:
        if not node.offer.gpus or not is_open(node):
            return
        shapes = [shape for shape in self._shapes if unfit(node, shape) is None]
        if not shapes:
            return
        is_free = any(is_free_for(node, shape.user, shape.team) for shape in shapes)
        found: dict[OfferKey, list[int]] = {}
        for gpu in node.offer.gpus:
            if any(_is_usable(node, gpu, shape) for shape in shapes):
                price = 0 if is_free else gpu_hour(node, gpu)
                if not self._wanted.accepts(node, price):
                    continue
                there = room.gpus.get(gpu.index)
                has_room = there is not None and not there.holders
                key = OfferKey(price, gpu.model, gpu.memory_bytes, gpu.simulated, gpu.vendor)
                counts = found.setdefault(key, [0, 0])
                counts[0] += 1
                counts[1] += has_room
        min_charge = 0 if is_free else node.offer.min_charge_microcredits
        for key, (gpus, free) in found.items():
            if free or not self._wanted.only_free:
                group = self.groups.get(key)
                if group is None:
                    group = self.groups[key] = OfferGroup(node)
                group.add(node, gpus, free, min_charge)

    def page(self, after: OfferKey | None, limit: int) -> list[tuple[OfferKey, OfferGroup]]:
        keys = sorted(key for key in self.groups if after is None or key > after)
        return [(key, self.groups[key]) for key in keys[:limit]]


def _is_usable(node: Node, gpu: Gpu, shape: Shape) -> bool:
    needs = shape.requirements
    cap = needs.max_price_microcredits
    return any(usable(node, gpu, request, cap, shape) for request in needs.gpu)
