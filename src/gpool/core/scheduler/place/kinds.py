"""Kinds of nodes: equal offers when idle, so each shape is checked once per kind."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from gpool.core.model import Gpu, Health, Node, Owners, Tier
from gpool.core.money.prices import is_priced
from gpool.core.scheduler.place.fit import is_open, joins_gangs, names_owners
from gpool.core.scheduler.place.pricing import Bools, FragmentationTarget, Ints
from gpool.core.scheduler.state.capacity import NOBODY

CLOSED = 0
"""The kind of slots that take nothing: empty ones, and nodes that are away or paused."""

MAX_GPUS = 64
"""GPUs of one node that are used; a wide node makes the rows of all others as wide."""


def lent_gpus(node: Node | None) -> int:
    return 0 if node is None else min(len(node.offer.gpus), MAX_GPUS)


def merit_of(node: Node) -> int:
    """Rank of a node's GPUs in seven bits, best smallest: proven and healthy, then speed in half octaves."""
    if not node.offer.gpus:
        return 0
    is_ailing = any(gpu.health is not Health.HEALTHY for gpu in node.offer.gpus)
    trust = 2 if is_ailing else 0 if node.merit.is_proven else 1
    gigaflops = node.merit.gigaflops
    slowness = 31 - min(31, (gigaflops * gigaflops >> 16).bit_length())
    return (trust << 5) + slowness


def is_for_some(node: Node) -> bool:
    """Whether the node, or one of its GPUs, is lent to some users only."""
    is_whole = node.audience is None and node.reserved_for is None
    return not is_whole or bool(node.gpus_unproven) or any(gpu.untested for gpu in node.offer.gpus)


def kind_key(node: Node) -> tuple[Any, ...]:
    """Equal for nodes that can run the same shapes, if these accept their owners (`OwnerSlots`)."""
    offer = node.offer
    depends_on_owner = is_for_some(node) or Tier.NONE in offer.tiers or is_priced(offer)
    owner = node.owner if depends_on_owner else None
    is_for_teams = bool(node.gpus_unproven) or any(gpu.untested for gpu in offer.gpus)
    return (
        offer.cpu_milli,
        offer.memory_bytes,
        offer.disk_bytes,
        tuple([_gpu_key(gpu) for gpu in offer.gpus]),
        offer.pythons,
        offer.tiers,
        offer.environments,
        offer.builds,
        offer.networks,
        offer.runtimes,
        offer.labels,
        offer.price_microcredits,
        node.free_for,
        node.audience,
        node.reserved_for,
        node.gpus_withheld,
        owner,
        node.gpus_unproven,
        node.owner_teams if is_for_teams else None,
        joins_gangs(offer),
    )


def _gpu_key(gpu: Gpu) -> tuple[object, ...]:
    return (
        gpu.index,
        gpu.model,
        gpu.vendor,
        gpu.memory_bytes,
        bool(gpu.closed),
        gpu.sharing,
        gpu.profiles,
        gpu.untested,
        gpu.guest,
        gpu.price_microcredits,
    )


def _gpu_groups(node: Node) -> tuple[int, ...]:
    known: dict[tuple[object, ...], int] = {}
    lent, withheld, unproven = node.offer.gpus[:MAX_GPUS], node.gpus_withheld, node.gpus_unproven
    keys = [(gpu.index in withheld, gpu.index in unproven, *_gpu_key(gpu)[1:]) for gpu in lent]
    return tuple([known.setdefault(key, len(known)) for key in keys])


class GpuPattern:
    """Free GPUs of nodes of one kind, as arrays, with the figures that follow from them. Compared by identity."""

    __slots__ = ("fragments", "gpus", "idle", "largest", "mix", "total", "whole")

    def __init__(
        self, gpus: tuple[tuple[int, ...], ...], target: FragmentationTarget, unlent: int
    ) -> None:
        _, _, free, holder = gpus
        self.gpus: Ints = np.array(gpus, np.int64)
        self.total = sum(free)
        self.idle = holder.count(NOBODY) - unlent
        self.whole, self.largest = free.count(1000), max(free)
        self.mix = target.mix_of(free)
        self.fragments: dict[int, float] = {}  # by step of CPU


class KindTable:
    def __init__(self, target: FragmentationTarget) -> None:
        self.nodes: list[Node | None] = [None]  # one node of each kind
        self.gpu_groups: list[tuple[int, ...]] = [()]  # of each kind
        self.patterns: dict[tuple[object, ...], GpuPattern] = {}
        self._target = target
        self._kinds: dict[tuple[Any, ...], int] = {}
        self._sites: dict[str, int] = {}
        target.forget_kinds()

    @property
    def size(self) -> int:
        return max(len(self.nodes), len(self._sites))

    def kind(self, node: Node) -> int:
        if not is_open(node):
            return CLOSED
        key = kind_key(node)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = len(self.nodes)
            self.nodes.append(node)
            self.gpu_groups.append(_gpu_groups(node))
            self._target.add_kind(node)
        return kind

    def site(self, node: Node) -> int:
        if not joins_gangs(node.offer):
            return 0
        return self._sites.setdefault(node.offer.site, len(self._sites) + 1)


class OwnerSlots:
    """Slots of each user's nodes and of each team's members, for tasks that accept some owners only."""

    __slots__ = ("_by_slot", "_masks", "_of_node", "_of_team", "_of_user")

    def __init__(self) -> None:
        self._masks: dict[Owners, Bools] = {}  # until an owner changes
        self._by_slot: dict[int, tuple[int, frozenset[int], int]] = {}
        self._of_node: dict[int, int] = {}
        self._of_user: dict[int, set[int]] = {}
        self._of_team: dict[int, set[int]] = {}

    def put(self, slot: int, node: Node) -> None:
        entry = (node.owner, node.owner_teams, node.id)
        if self._by_slot.get(slot) == entry:
            return
        self.remove(slot)
        self._masks.clear()
        self._by_slot[slot] = entry
        self._of_node[node.id] = slot
        self._of_user.setdefault(node.owner, set()).add(slot)
        for team in node.owner_teams:
            self._of_team.setdefault(team, set()).add(slot)

    def remove(self, slot: int) -> None:
        if slot in self._by_slot:
            self._masks.clear()
            owner, teams, node = self._by_slot.pop(slot)
            if self._of_node.get(node) == slot:
                del self._of_node[node]
            _discard(self._of_user, owner, slot)
            for team in teams:
                _discard(self._of_team, team, slot)

    def mask(self, on: Owners, size: int) -> Bools:
        """Mask of the `size` slots: True if the slot is an accepted owner's. Do not write to it."""
        known = self._masks.get(on)
        if known is not None and len(known) == size:
            return known
        found = [self._of_user.get(user, _NO_SLOTS) for user in on.users]
        found += [self._of_team.get(team, _NO_SLOTS) for team in on.teams]
        mask = np.full(size, on.node is not None and not names_owners(on))
        for slots in found:
            mask[list(slots)] = True
        if on.node is not None:
            there = self._of_node.get(on.node)
            is_accepted = there is not None and bool(mask[there])
            mask[:] = False
            if there is not None:
                mask[there] = is_accepted
        if len(self._masks) >= _MAX_MASKS:
            self._masks.clear()
        self._masks[on] = mask
        return mask


_NO_SLOTS: set[int] = set()
_MAX_MASKS = 1024


def _discard(slots: dict[int, set[int]], key: int, slot: int) -> None:
    slots[key].discard(slot)
    if not slots[key]:
        del slots[key]


class EqualGroups:
    """Number for each slot, equal for equal values; never more numbers than slots."""

    __slots__ = ("_counts", "_numbers", "_unused", "_values")

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._values: dict[int, Hashable] = {}  # by slot
        self._counts: list[int] = []  # by number
        self._unused: list[int] = []

    def set(self, slot: int, value: Hashable) -> int:
        self.remove(slot)
        number = self._numbers.get(value)
        if number is None:
            if self._unused:
                number = self._unused.pop()
            else:
                number = len(self._counts)
                self._counts.append(0)
            self._numbers[value] = number
        self._counts[number] += 1
        self._values[slot] = value
        return number

    def remove(self, slot: int) -> None:
        if slot in self._values:
            value = self._values.pop(slot)
            number = self._numbers[value]
            self._counts[number] -= 1
            if not self._counts[number]:
                del self._numbers[value]
                self._unused.append(number)
