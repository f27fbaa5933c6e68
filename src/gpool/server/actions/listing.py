"""Reading of nodes and resources, by page or one, and their REST documents. One file because pages and single objects are the same documents."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal

from gpool.core.errors import Invalid, NotFound
from gpool.core.ids import GpuId, NodeId, decode, encode
from gpool.core.model import Availability, Gpu, GpuDetails, Health, Node, Permission, Tier
from gpool.core.money.prices import gpu_hour
from gpool.core.scheduler.place.fit import cpu_price
from gpool.core.scheduler.state.waiting import NodeState
from gpool.core.specs import fields
from gpool.core.specs.gpu_topology import PciePath
from gpool.server.nodes import reconciliation
from gpool.server.nodes.telemetry import Point
from gpool.server.server import Server
from gpool.server.store.identity_values import Caller, GpuRow
from gpool.server.store.operations import gpus as gpu_bindings
from gpool.server.store.operations import node_pages
from gpool.server.store.operations.node_pages import NodeFilter, NodeRows
from gpool.server.store.protocol import Operation, operation
from gpool.server.store.values import NodeRow
from gpool.wire.documents import instant_to_datetime
from gpool.wire.nodes import (
    GpuDetailsDocument,
    GpuDocument,
    GpuPage,
    MeasuredDocument,
    NodeDocument,
    NodePage,
    ReadingDocument,
)

DOCUMENTS_AT_ONCE = 100
"""Documents of a page that are built before others get the loop."""
MOST_SHOWN = 100
"""Environments listed in a node's document."""

GpuRows = Mapping[tuple[NodeId, int], GpuRow]
"""Stored GPUs by node and index."""

_Status = Literal["free", "shared", "busy", "paused", "quarantined", "offline"]


def node_document(server: Server, who: Caller, gpus: GpuRows, row: NodeRow) -> NodeDocument:
    """The node as `who` sees it; allowed users and problems only for its owner and operators."""
    here = row.node
    inside = _is_inside(who, here)
    entry = _entry(server, here.id)
    return NodeDocument(
        id=encode("node", here.id),
        name=here.name,
        owner=encode("user", here.owner),
        status="online" if server.nodes.is_connected(here.id) else "offline",
        availability=here.availability.value,
        created_at=instant_to_datetime(row.created_at),
        last_beat_at=instant_to_datetime(row.last_beat_at) if row.last_beat_at else None,
        cpu_milli=here.offer.cpu_milli,
        cpu_free_milli=max(0, entry.room.free_cpu) if entry else here.offer.cpu_milli,
        memory_bytes=here.offer.memory_bytes,
        pythons=sorted(here.offer.pythons),
        tiers=_tiers(here.offer.tiers),
        gpus=[document for _, document in gpu_documents(server, who, gpus, row)],
        running=len(entry.lines) if entry else 0,
        networks=sorted(network.value for network in here.offer.networks),
        audience=list(here.offer.audience) if inside or not here.offer.audience else None,
        closed=here.offer.closed or None,
        environments=sorted(here.offer.environments)[:MOST_SHOWN],
        builds=sorted(here.offer.builds),
        problems=[*row.problems, *_backoff(server, here.id), *gpu_problems(here, gpus)]
        if inside
        else [],
        labels=_labels(server, here),
        price_microcredits=here.offer.price_microcredits,
        min_charge_microcredits=here.offer.min_charge_microcredits,
        free_for=list(here.offer.free_for) if inside or not here.offer.free_for else None,
        notice_s=here.offer.notice_s,
        site=reconciliation.site_name(here.offer.site),
        cordoned=server.picture.policy.rules.cordons.get(here.id),
    )


def _is_inside(who: Caller, here: Node) -> bool:
    return who.user.id == here.owner or Permission.OPERATOR in who.user.permissions


def _backoff(server: Server, node: NodeId) -> tuple[str, ...]:
    why = server.nodes.backoff.reason(node)
    return (f"it {why}: nothing new is given to it for a while",) if why else ()


def gpu_documents(
    server: Server, who: Caller, gpus: GpuRows, row: NodeRow
) -> Iterator[tuple[int, GpuDocument]]:
    """Documents of a node's GPUs by index, one at a time: a node may have a thousand.

    The hardware uuid and the PCI address are shown to the owner and operators only: they identify one card.
    """
    here = row.node
    inside = _is_inside(who, here)
    entry = _entry(server, here.id)
    for device in sorted(here.offer.gpus, key=attrgetter("index")):
        stored = gpus.get((here.id, device.index))
        if stored is None:
            continue
        room = entry.room.gpus.get(device.index) if entry else None
        free_share = max(0, room.free_share) if room else 1000
        free_memory = max(0, room.free_memory) if room else device.memory_bytes
        allowed = device.index not in here.gpus_withheld
        is_unproven = device.index in here.gpus_unproven
        yield (
            device.index,
            GpuDocument(
                id=encode("gpu", stored.id),
                kind="gpu",
                node=encode("node", here.id),
                node_name=here.name,
                index=device.index,
                model=device.model,
                vendor=device.vendor,
                uuid=device.uuid if inside else "",
                memory_bytes=device.memory_bytes,
                memory_free_bytes=free_memory,
                share_free=free_share / 1000,
                simulated=device.simulated,
                status=_gpu_status(server, here, device, stored, free_share, free_memory),
                available=allowed and here.availability is Availability.AVAILABLE,
                tiers=_tiers(
                    {tier for tier in here.offer.tiers if device.guest == (tier is Tier.VM)}
                ),
                flagged=stored.flagged or (None if is_unproven else stored.unproven),
                unproven=stored.unproven if is_unproven else None,
                verified=stored.verified,
                untested=device.untested,
                measured=measured_document(stored.measured),
                closed=device.closed or None,
                health=device.health.value,
                ails=device.ails or None,
                quarantined=stored.quarantined,
                details=None if device.details is None else gpu_details(device.details, inside),
                reading=reading(server.telemetry.now_of(here.id, device.index, server.now)),
                price_microcredits=gpu_hour(here, device),
                labels=_labels(server, here),
            ),
        )


def measured_document(text: str | None) -> MeasuredDocument | None:
    return None if text is None else MeasuredDocument.model_validate_json(text)


def cpu_document(server: Server, row: NodeRow) -> GpuDocument:
    here = row.node
    entry = _entry(server, here.id)
    whole = here.offer.cpu_milli
    free = max(0, entry.room.free_cpu) if entry else whole
    share = round(1000 * free / whole) if whole else 0
    return GpuDocument(
        id=encode("node", here.id),
        kind="cpu",
        node=encode("node", here.id),
        node_name=here.name,
        index=0,
        model=f"{whole / 1000:g} CPUs",
        vendor="cpu",
        uuid="",
        memory_bytes=here.offer.memory_bytes,
        memory_free_bytes=max(0, entry.room.free_memory) if entry else here.offer.memory_bytes,
        share_free=share / 1000,
        simulated=False,
        status=_status(server, here, True, share, 1),
        available=here.availability is Availability.AVAILABLE,
        tiers=_tiers(here.offer.tiers),
        price_microcredits=cpu_price(here, whole),
        labels=_labels(server, here),
    )


def _status(server: Server, here: Node, allowed: bool, share: int, memory: int) -> _Status:
    if not server.nodes.is_connected(here.id):
        return "offline"
    if not allowed or here.availability is not Availability.AVAILABLE or here.offer.closed:
        return "paused"
    if share <= 0 or memory <= 0:
        return "busy"
    return "free" if share >= 1000 else "shared"


def _gpu_status(
    server: Server, here: Node, device: Gpu, stored: GpuRow, share: int, memory: int
) -> _Status:
    allowed = device.index not in here.gpus_withheld
    found = _status(server, here, allowed and not device.closed, share, memory)
    sick = stored.quarantined is not None or device.health is Health.QUARANTINED
    return "quarantined" if sick and found != "offline" else found


def _labels(server: Server, here: Node) -> list[str]:
    certified = server.picture.policy.rules.certified.get(here.id, frozenset())
    return sorted(fields.with_certified(here.offer.labels, certified))


def _tiers(tiers: Collection[Tier]) -> list[str]:
    return [tier.value for tier in sorted(tiers, key=lambda tier: tier.strength)]


def _entry(server: Server, id_: NodeId) -> NodeState | None:
    return server.picture.state.nodes.get(id_)


# ---- health, details, readings


def gpu_problems(here: Node, gpus: GpuRows) -> list[str]:
    found = []
    for device in here.offer.gpus:
        stored = gpus.get((here.id, device.index))
        name = f"gpu{device.index} ({device.model})"
        if stored is not None and stored.quarantined is not None:
            cure = f"when it is well: gpool node resume gpu{device.index}"
            found.append(f"{name} is in quarantine: {stored.quarantined}; {cure}")
        elif stored is not None and not stored.flagged and device.index in here.gpus_unproven:
            found.append(f"{name} serves you, your teams and --on tasks only: {stored.unproven}")
        elif stored is not None and (stored.flagged or stored.unproven):
            found.append(f"{name} gets no tasks: {stored.flagged or stored.unproven}")
        elif device.ails:
            found.append(f"{name} is {device.health.value}: {device.ails}")
    return found


_PATHS = frozenset(PciePath)


def gpu_details(details: GpuDetails, inside: bool) -> GpuDetailsDocument:
    """`inside`: for the owner or an operator, who also see the PCI address."""
    return GpuDetailsDocument(
        source=details.source,
        driver=details.driver,
        capability=details.capability,
        bus=details.bus if inside else "",
        pcie=details.pcie,
        power_limit_watts=details.power_limit_mw / 1000 or None,
        clock_mhz=details.clock_mhz or None,
        links=dict(details.links),
        mig=details.mig,
        mig_profiles=list(details.mig_profiles),
        mig_instances=list(details.mig_instances),
        numa=details.numa,
        near={peer: PciePath(path).name for peer, path in details.near if path in _PATHS},
    )


def reading(point: Point | None) -> ReadingDocument | None:
    return None if point is None else reading_document(point)


def reading_document(point: Point) -> ReadingDocument:
    power = point.power_mw
    return ReadingDocument(
        at=instant_to_datetime(point.at),
        utilisation_percent=point.utilisation_percent,
        memory_used_bytes=point.memory_bytes,
        power_watts=None if power is None else power / 1000,
        temperature_celsius=point.temperature_c,
    )


CPU_INDEX = 1 << 30
"""Index of a node's CPUs in a cursor: behind every GPU."""


@dataclass(frozen=True, slots=True)
class ResourceCursor:
    """The last resource listed, as `n-….INDEX`; `n-…`: all of that node."""

    node: NodeId
    index: int = CPU_INDEX

    @classmethod
    def parse(cls, text: str) -> ResourceCursor:
        node, dot, index = text.partition(".")
        if dot and not (index.isascii() and index.isdigit() and len(index) < 5):
            raise Invalid(f"'cursor' is {text[:60]!r}; give the `next` of the page before")
        return cls(NodeId(decode("node", node)), int(index) if dot else CPU_INDEX)

    def __str__(self) -> str:
        node = encode("node", self.node)
        return node if self.index == CPU_INDEX else f"{node}.{self.index}"


def seen_by(who: Caller, wanted: NodeFilter) -> NodeFilter:
    """The filter without machines that others registered without an agent's key; operators see all."""
    if Permission.OPERATOR in who.user.permissions:
        return wanted
    return replace(wanted, viewer=who.user.id)


async def nodes(
    server: Server, who: Caller, wanted: NodeFilter, after: NodeId | None, limit: int
) -> NodePage:
    async with server.turns.listings.turn(who.user.id):
        found, gpus = await server.store.read(_page(seen_by(who, wanted), after, limit))
        items = []
        for row in found.rows:
            if matches(row, wanted.search):
                items.append(node_document(server, who, gpus, row))
                await asyncio.sleep(0)  # a node may have a thousand GPUs
    more = found.rows[-1].node.id if found.more else None
    return NodePage(items=items, next=None if more is None else encode("node", more))


async def resources(
    server: Server,
    who: Caller,
    wanted: NodeFilter,
    kind: str | None,
    after: ResourceCursor | None,
    limit: int,
) -> GpuPage:
    async with server.turns.listings.turn(who.user.id):
        return await _resource_page(server, who, seen_by(who, wanted), kind, after, limit)


async def _resource_page(
    server: Server,
    who: Caller,
    wanted: NodeFilter,
    kind: str | None,
    after: ResourceCursor | None,
    limit: int,
) -> GpuPage:
    before = None
    if after is not None:  # a node with resources behind the cursor is read again
        before = after.node if after.index == CPU_INDEX else NodeId(after.node - 1)
    found, gpus = await server.reads.read(
        server.store,
        ("resources", wanted, before, limit),
        _page(wanted, before, limit),
        rows=lambda page: 1 + len(page[0].rows) + len(page[1]),
    )
    items: list[GpuDocument] = []
    last: ResourceCursor | None = None
    for row in found.rows:
        for index, document in _resources(server, who, gpus, row, kind, wanted.search):
            place = ResourceCursor(row.node.id, index)
            if after is not None and (place.node, place.index) <= (after.node, after.index):
                continue
            if len(items) % DOCUMENTS_AT_ONCE == 0:
                await asyncio.sleep(0)
            if len(items) == limit:
                return GpuPage(items=items, next=str(last))
            items.append(document)
            last = place
    more = str(ResourceCursor(found.rows[-1].node.id)) if found.more else None
    return GpuPage(items=items, next=more)


def _resources(
    server: Server, who: Caller, gpus: GpuRows, row: NodeRow, kind: str | None, search: str
) -> Iterator[tuple[int, GpuDocument]]:
    text = search.lower()
    is_named = text in row.node.name.lower()
    if kind != "cpu":
        for index, document in gpu_documents(server, who, gpus, row):
            if is_named or text in document.model.lower():
                yield index, document
    if kind != "gpu" and row.node.offer.cpu_milli:
        document = cpu_document(server, row)
        if is_named or text in document.model.lower():
            yield CPU_INDEX, document


def matches(row: NodeRow, search: str) -> bool:
    text, offer = search.lower(), row.node.offer
    return text in row.node.name.lower() or any(text in gpu.model.lower() for gpu in offer.gpus)


async def node(server: Server, who: Caller, id_: NodeId) -> NodeDocument:
    async with server.turns.listings.turn(who.user.id):
        found, gpus = await server.store.read(_page(seen_by(who, NodeFilter(node=id_)), None, 1))
        for row in found.rows:
            return node_document(server, who, gpus, row)
    raise no_node(id_)


async def gpu(server: Server, who: Caller, id_: GpuId) -> GpuDocument:
    row, stored = await server.store.read(_gpu(id_, seen_by(who, NodeFilter())))
    if row is not None and stored is not None:
        for _, document in gpu_documents(
            server, who, {(stored.node, stored.position): stored}, row
        ):
            return document
    raise no_gpu(id_)


async def processors(server: Server, who: Caller, id_: NodeId) -> GpuDocument:
    wanted = seen_by(who, NodeFilter(node=id_))
    found = await server.store.read(node_pages.node_page(wanted, None, 1))
    for row in found.rows:
        return cpu_document(server, row)
    raise no_node(id_)


def no_node(id_: NodeId) -> NotFound:
    return NotFound(f"no node {encode('node', id_)} of yours")


def no_gpu(id_: GpuId) -> NotFound:
    return NotFound(f"no GPU {encode('gpu', id_)}; `gpool gpus` lists them")


@operation
def _page(
    wanted: NodeFilter, after: NodeId | None, limit: int
) -> Operation[tuple[NodeRows, GpuRows]]:
    found = yield from node_pages.node_page(wanted, after, limit)
    gpus = yield from gpu_bindings.gpus_of_nodes([row.node.id for row in found.rows])
    return found, {(row.node, row.position): row for row in gpus}


@operation
def _gpu(id_: GpuId, wanted: NodeFilter) -> Operation[tuple[NodeRow | None, GpuRow | None]]:
    stored = yield from gpu_bindings.gpu(id_)
    if stored is None or stored.gone:
        return None, None
    found = yield from node_pages.node_page(replace(wanted, node=stored.node), None, 1)
    return (found.rows[0] if found.rows else None), stored
