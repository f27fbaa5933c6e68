"""Whether one node could ever run a shape, and how the shape fits into its free room. Compares no nodes.
A slice goes onto a GPU already shared, then where the least memory is left; whole GPUs are the smallest of one model.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import NamedTuple

from gpool.core.ids import UserId
from gpool.core.model import (
    Allocation,
    Audience,
    Availability,
    Gpu,
    GpuRequest,
    Network,
    Node,
    Offer,
    Owners,
    Requirements,
    RuntimeOffer,
    Shape,
    Sharing,
    Slice,
    Tier,
)
from gpool.core.money.prices import gpu_hour, is_free_for, is_priced, node_hour
from gpool.core.scheduler.place.shares import granted, least_memory
from gpool.core.scheduler.state.capacity import ANYBODY, GpuRoom, Room
from gpool.core.specs import fields, gpu_slices, gpu_topology
from gpool.core.specs import gpu as gpuspec


class Fit(NamedTuple):
    cpu_milli: int
    memory_bytes: int
    slices: tuple[Slice, ...]
    disk_bytes: int = 0

    def numbered(self, number: int) -> Allocation:
        return Allocation(number, self.cpu_milli, self.memory_bytes, self.slices, self.disk_bytes)


class Unfit(StrEnum):
    """In the order of checks."""

    SIBLINGS = "siblings"
    OWNER = "owner"
    AUDIENCE = "audience"
    RESERVED = "reserved"
    LABELS = "labels"
    ENVIRONMENT = "environment"
    PYTHON = "python"
    TIER = "tier"
    NETWORK = "network"
    RUNTIME = "runtime"
    CPU = "cpu"
    MEMORY = "memory"
    DISK = "disk"
    GPU = "gpu"
    PRICE = "price"
    SITE = "site"


def is_open(node: Node) -> bool:
    return (
        node.connected
        and node.availability is Availability.AVAILABLE
        and not node.offer.closed
        and not node.cordoned
        and not node.resting
    )


def unfit(node: Node, shape: Shape) -> Unfit | None:
    """First unmet requirement, if any."""
    if shape.requirements.siblings:
        return Unfit.SIBLINGS
    if not accepts_owner(shape.requirements, node):
        return Unfit.OWNER
    return unfit_for_any_owner(node, shape)


def accepts_owner(needs: Requirements, node: Node) -> bool:
    """Return whether the task may run on this owner's nodes: what it reads there, the owner can read."""
    on = needs.on
    if on is None:
        return True
    if on.node is not None and on.node != node.id:
        return False
    is_anyones = on.node is not None and not names_owners(on)
    return is_anyones or node.owner in on.users or not node.owner_teams.isdisjoint(on.teams)


def names_owners(on: Owners) -> bool:
    """Return whether the consumer named owners; a sibling of a task for anyone names a node only."""
    return bool(on.users or on.teams)


def unfit_for_any_owner(node: Node, shape: Shape) -> Unfit | None:
    """First unmet requirement other than the owner: equal for all nodes of one kind (`kinds`)."""
    offer, needs = node.offer, shape.requirements
    if needs.siblings:
        return Unfit.SIBLINGS
    if node.audience is not None and not _is_for(node, node.audience, shape):
        return Unfit.AUDIENCE
    if node.reserved_for is not None and not _is_for(node, node.reserved_for, shape):
        return Unfit.RESERVED
    if needs.labels and not offer.labels.issuperset(needs.labels):
        return Unfit.LABELS
    if shape.environment not in offer.environments and (
        fields.environment_kind(shape.environment) not in offer.builds
    ):
        return Unfit.ENVIRONMENT
    if needs.python is not None and needs.python not in offer.pythons:
        return Unfit.PYTHON
    if not tier_allows(node, needs.tier, shape.user):
        return Unfit.TIER
    if needs.network not in offer.networks:
        return Unfit.NETWORK
    if offer.runtimes and not any(_gives(runtime, shape) for runtime in offer.runtimes):
        return Unfit.RUNTIME
    if offer.cpu_milli < needs.cpu_milli:
        return Unfit.CPU
    if offer.memory_bytes < least_memory(node, needs):
        return Unfit.MEMORY
    if needs.disk_bytes is not None and offer.disk_bytes < needs.disk_bytes:
        return Unfit.DISK
    if needs.gpu and not any(_enough(node, request, shape) for request in needs.gpu):
        return Unfit.GPU
    cap = needs.max_price_microcredits
    if cap is not None and is_priced(offer) and not _affordable(node, shape, cap):
        return Unfit.PRICE
    if needs.nodes > 1 and not joins_gangs(offer):
        return Unfit.SITE
    return None


def joins_gangs(offer: Offer) -> bool:
    return bool(offer.site and offer.address and offer.gang_port)


def _gives(runtime: RuntimeOffer, shape: Shape) -> bool:
    """A gang member needs a sandbox network, as egress does."""
    needs = shape.requirements
    return (
        runtime.tier.strength >= needs.tier.strength
        and needs.network in runtime.networks
        and (needs.nodes == 1 or (runtime.gangs and Network.EGRESS in runtime.networks))
        and runtime.images
        == (fields.environment_kind(shape.environment) == fields.IMAGE_ENVIRONMENT)
        and (runtime.gpus or not needs.gpu)
    )


def suits(node: Node, needs: Requirements) -> bool:
    """Ignores users, environments and amounts of CPU and memory."""
    offer = node.offer
    return (
        (needs.python is None or needs.python in offer.pythons)
        and any(tier.strength >= needs.tier.strength for tier in offer.tiers)
        and needs.network in offer.networks
        and (not needs.gpu or any(_enough(node, request, None) for request in needs.gpu))
    )


def _affordable(node: Node, shape: Shape, cap: int) -> bool:
    needs = shape.requirements
    if not needs.gpu:
        return cpu_price(node, needs.cpu_milli, shape) <= cap
    return any(_enough(node, request, shape, cap) for request in needs.gpu)


def _enough(node: Node, request: GpuRequest, shape: Shape | None, cap: int | None = None) -> bool:
    return sum(usable(node, gpu, request, cap, shape) for gpu in node.offer.gpus) >= request.count


def _is_for(node: Node, audience: Audience, shape: Shape) -> bool:
    user, team = shape.user, shape.team
    return user == node.owner or user in audience.users or team in audience.teams


def tier_allows(node: Node, floor: Tier, user: UserId) -> bool:
    """No isolation only for the node's owner."""
    tiers = node.offer.tiers
    if floor is Tier.NONE:
        return node.owner == user and Tier.NONE in tiers
    return any(tier.strength >= floor.strength for tier in tiers)


def is_lent_to(node: Node, gpu: Gpu, shape: Shape) -> bool:
    """Whether the shape's user may have this GPU. An untested or unproven one serves its owner and the owner's teams;
    an unproven one also tasks that name the owner or a team of the owner's (`--on`).
    """
    if not gpu.untested and gpu.index not in node.gpus_unproven:
        return True
    if shape.user == node.owner or shape.team in node.owner_teams:
        return True
    needs = shape.requirements
    is_named = needs.on is not None and names_owners(needs.on)
    return not gpu.untested and is_named and accepts_owner(needs, node)


def is_of_tier(gpu: Gpu, shape: Shape) -> bool:
    """Whether sandboxes of the shape's tier can have this GPU: guests those passed through to them, others the rest."""
    return gpu.guest == (shape.requirements.tier is Tier.VM)


def usable(
    node: Node,
    gpu: Gpu,
    request: GpuRequest,
    cap: int | None = None,
    shape: Shape | None = None,
) -> bool:
    """`cap`: price an hour of the whole request. `shape`: for whom; None: for any user."""
    if shape is not None and not (is_lent_to(node, gpu, shape) and is_of_tier(gpu, shape)):
        return False
    if gpu.closed or gpu.index in node.gpus_withheld or not gpuspec.matches(request, gpu):
        return False
    if cap is not None and gpu_price(node, gpu, request, shape) > cap:
        return False
    if not is_slice(request):
        return True
    if gpu.sharing is Sharing.EXCLUSIVE:
        return False
    memory, share = _asked(gpu, request)
    if gpu.sharing is Sharing.MIG:
        return gpu_slices.smallest(gpu, memory, share) is not None
    return memory <= gpu.memory_bytes


def gpu_price(node: Node, gpu: Gpu, request: GpuRequest, shape: Shape | None = None) -> int:
    """Micro-credits an hour for the whole request on GPUs like this. `shape`: who pays; None: anyone but the owner."""
    price = gpu_hour(node, gpu)
    if not price or _is_free(node, shape):
        return 0
    return _rounded_up(price * request.count * slice_of(gpu, request).share_milli, 1000)


def cpu_price(node: Node, cpu_milli: int, shape: Shape | None = None) -> int:
    price = node_hour(node)
    if not price or _is_free(node, shape):
        return 0
    return _rounded_up(price * cpu_milli, max(1, node.offer.cpu_milli))


def possible_prices(node: Node, shape: Shape) -> set[int]:
    needs = shape.requirements
    if not needs.gpu:
        return {cpu_price(node, needs.cpu_milli, shape)}
    return {
        gpu_price(node, gpu, request, shape)
        for request in needs.gpu
        for gpu in node.offer.gpus
        if usable(node, gpu, request)
    }


def price_of(node: Node, found: Fit | Allocation, shape: Shape) -> int:
    """Micro-credits an hour: the allocation's part of the GPUs, or of the CPU if it has none."""
    if not is_priced(node.offer) or _is_free(node, shape):
        return 0
    if not found.slices:
        return cpu_price(node, found.cpu_milli, shape)
    prices = {gpu.index: gpu_hour(node, gpu) for gpu in node.offer.gpus}
    parts = sum(prices.get(part.gpu_index, 0) * part.share_milli for part in found.slices)
    return _rounded_up(parts, 1000)


def _is_free(node: Node, shape: Shape | None) -> bool:
    return shape is not None and is_free_for(node, shape.user, shape.team)


def _rounded_up(amount: int, parts: int) -> int:
    return -(-amount // parts)


def fit(node: Node, room: Room, shape: Shape) -> Fit | None:
    """The node must not be `unfit`."""
    needs = shape.requirements
    disk = needs.disk_bytes or 0
    if room.free_cpu < needs.cpu_milli or room.free_memory < least_memory(node, needs):
        return None
    if room.free_disk < disk:
        return None
    if not needs.gpu:
        return with_share(node, room, needs, ())
    for request in needs.gpu:
        slices = (
            a_slice(node, room, request, shape)
            if is_slice(request)
            else whole(node, room, request, shape)
        )
        if slices is not None:
            return with_share(node, room, needs, slices)
    return None


def with_share(node: Node, room: Room, needs: Requirements, slices: tuple[Slice, ...]) -> Fit:
    """Complete a place on a node with room by the CPUs and memory that go with these GPUs."""
    milli = sum([part.share_milli for part in slices])
    cpu, memory = granted(node, needs, milli, room.free_cpu, room.free_memory)
    return Fit(cpu, memory, slices, needs.disk_bytes or 0)


def is_slice(request: GpuRequest) -> bool:
    return request.vram_bytes is not None or request.share_milli < 1000


def slice_of(gpu: Gpu, request: GpuRequest) -> Slice:
    """A hardware slice has its profile's size."""
    memory, share = _asked(gpu, request)
    if gpu.sharing is Sharing.MIG and is_slice(request):
        profile = gpu_slices.smallest(gpu, memory, share)
        if profile is not None:
            return gpu_slices.slice_by(gpu, profile)
    return Slice(gpu.index, memory, share)


def _asked(gpu: Gpu, request: GpuRequest) -> tuple[int, int]:
    memory = request.vram_bytes
    if memory is None:
        return gpu.memory_bytes * request.share_milli // 1000, request.share_milli
    if request.share_milli == 1000:
        return memory, max(1, 1000 * memory // max(1, gpu.memory_bytes))
    return memory, request.share_milli


def may_join(gpu: GpuRoom, user: UserId) -> bool:
    """Different users share hardware slices only."""
    if not gpu.holders:
        return True
    return gpu.user == (ANYBODY if gpu.gpu.sharing is Sharing.MIG else user)


def placed(gpu: GpuRoom, part: Slice) -> Slice | None:
    """None if a hardware slice does not fit. Software slices have no start."""
    profile = gpu_slices.named(gpu.gpu, part.profile)
    if profile is None:
        return part
    start = gpu_slices.start_for(gpu.gpu, profile, gpu.cut)
    return None if start is None else replace(part, start=start)


def a_slice(node: Node, room: Room, request: GpuRequest, shape: Shape) -> tuple[Slice, ...] | None:
    best: tuple[tuple[int, ...], Slice] | None = None
    cap = shape.requirements.max_price_microcredits
    for gpu in room.gpus.values():
        if not may_join(gpu, shape.user) or not usable(node, gpu.gpu, request, cap, shape):
            continue
        part = slice_of(gpu.gpu, request)
        memory_left = gpu.free_memory - part.memory_bytes
        share_left = gpu.free_share - part.share_milli
        if memory_left < 0 or share_left < 0:
            continue
        score = (0 if gpu.holders else 1, memory_left, share_left)
        if best is None or score < best[0]:
            there = placed(gpu, part)
            if there is not None:
                best = score, there
    return None if best is None else (best[1],)


def whole(node: Node, room: Room, request: GpuRequest, shape: Shape) -> tuple[Slice, ...] | None:
    cap, gpus = shape.requirements.max_price_microcredits, room.gpus.values()
    free = [g for g in gpus if not g.holders and usable(node, g.gpu, request, cap, shape)]
    if len(free) < request.count:
        return None
    free.sort(key=lambda g: (g.gpu.memory_bytes, g.gpu.model, gpu_hour(node, g.gpu), g.gpu.index))
    chosen = _close(node, free, _alike(free, request.count))
    return tuple([Slice(g.gpu.index, g.gpu.memory_bytes, 1000) for g in chosen])


def _close(node: Node, free: list[GpuRoom], chosen: list[GpuRoom]) -> list[GpuRoom]:
    """Of the free GPUs of the same model and memory, those closest to each other (`gpu_topology`)."""
    known = gpu_topology.distances_of(node.offer.gpus) if len(chosen) < len(free) else None
    first, last = chosen[0].gpu, chosen[-1].gpu
    if known is None or (first.model, first.memory_bytes) != (last.model, last.memory_bytes):
        return chosen
    alike = {
        g.gpu.index: g
        for g in free
        if (g.gpu.model, g.gpu.memory_bytes) == (first.model, first.memory_bytes)
    }
    return [alike[index] for index in gpu_topology.nearest(tuple(alike), len(chosen), known)]


def _alike(free: list[GpuRoom], count: int) -> list[GpuRoom]:
    for first in range(len(free) - count + 1):
        run = free[first : first + count]
        if run[0].gpu.model == run[-1].gpu.model:
            return run
    return free[:count]
