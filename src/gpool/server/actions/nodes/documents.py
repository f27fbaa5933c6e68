"""REST documents of nodes, GPUs and readings, built from stored rows and the scheduling state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from gpool.core.ids import NodeId, encode
from gpool.core.model import Availability, Gpu, GpuDetails, Health, Node, Permission, Tier
from gpool.core.scheduler.place.fit import cpu_price
from gpool.core.scheduler.state.held import NodeState
from gpool.server.nodes import offers
from gpool.server.nodes.telemetry import Point
from gpool.server.server import Server
from gpool.server.store.identity_values import Caller, GpuRow
from gpool.server.store.values import NodeRow
from gpool.wire.documents import (
    GpuDetailsDocument,
    GpuDocument,
    MeasuredDocument,
    NodeDocument,
    ReadingDocument,
    instant_to_datetime,
)

MOST_SHOWN = 100
"""Environments listed in a node's document."""

GpuRows = Mapping[tuple[NodeId, int], GpuRow]
"""Stored GPUs by node and index."""

_Status = Literal["free", "shared", "busy", "paused", "quarantined", "offline"]


def node_document(server: Server, who: Caller, gpus: GpuRows, row: NodeRow) -> NodeDocument:
    """The node as `who` sees it; allowed users and problems only for its owner and operators."""
    here = row.node
    inside = who.user.id == here.owner or Permission.OPERATOR in who.user.permissions
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
        gpus=[document for _, document in gpu_documents(server, gpus, row)],
        running=len(entry.lines) if entry else 0,
        networks=sorted(network.value for network in here.offer.networks),
        audience=list(here.offer.audience) if inside or not here.offer.audience else None,
        closed=here.offer.closed or None,
        environments=sorted(here.offer.environments)[:MOST_SHOWN],
        builds=sorted(here.offer.builds),
        problems=[*row.problems, *_backoff(server, here.id), *gpu_problems(here, gpus)]
        if inside
        else [],
        labels=sorted(here.offer.labels),
        price_microcredits=here.offer.price_microcredits,
        site=offers.site_name(here.offer.site),
        cordoned=server.picture.policy.rules.cordons.get(here.id),
    )


def _backoff(server: Server, node: NodeId) -> tuple[str, ...]:
    why = server.nodes.backoff.reason(node)
    return (f"it {why}: nothing new is given to it for a while",) if why else ()


def gpu_documents(server: Server, gpus: GpuRows, row: NodeRow) -> list[tuple[int, GpuDocument]]:
    here = row.node
    entry = _entry(server, here.id)
    found = []
    for device in here.offer.gpus:
        stored = gpus.get((here.id, device.index))
        if stored is None:
            continue
        room = entry.room.gpus.get(device.index) if entry else None
        free_share = max(0, room.free_share) if room else 1000
        free_memory = max(0, room.free_memory) if room else device.memory_bytes
        allowed = device.index not in here.gpus_withheld
        found.append(
            (
                device.index,
                GpuDocument(
                    id=encode("gpu", stored.id),
                    kind="gpu",
                    node=encode("node", here.id),
                    node_name=here.name,
                    index=device.index,
                    model=device.model,
                    vendor=device.vendor,
                    uuid=device.uuid,
                    memory_bytes=device.memory_bytes,
                    memory_free_bytes=free_memory,
                    share_free=free_share / 1000,
                    simulated=device.simulated,
                    status=_gpu_status(server, here, device, stored, free_share, free_memory),
                    available=allowed and here.availability is Availability.AVAILABLE,
                    tiers=_tiers(here.offer.tiers),
                    flagged=stored.flagged or stored.unproven,
                    measured=measured_document(stored.measured),
                    closed=device.closed or None,
                    health=device.health.value,
                    ails=device.ails or None,
                    quarantined=stored.quarantined,
                    details=None if device.details is None else gpu_details(device.details),
                    reading=reading(server.telemetry.now_of(here.id, device.index, server.now)),
                    price_microcredits=here.offer.price_microcredits,
                    labels=sorted(here.offer.labels),
                ),
            )
        )
    return found


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
        labels=sorted(here.offer.labels),
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


def _tiers(tiers: frozenset[Tier]) -> list[str]:
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
        elif device.ails:
            found.append(f"{name} is {device.health.value}: {device.ails}")
    return found


def gpu_details(details: GpuDetails) -> GpuDetailsDocument:
    return GpuDetailsDocument(
        source=details.source,
        driver=details.driver,
        capability=details.capability,
        bus=details.bus,
        pcie=details.pcie,
        power_limit_watts=details.power_limit_mw / 1000 or None,
        clock_mhz=details.clock_mhz or None,
        links=dict(details.links),
        mig=details.mig,
        mig_profiles=list(details.mig_profiles),
        mig_instances=list(details.mig_instances),
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
