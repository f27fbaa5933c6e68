"""What is told of a GPU beside its place in the pool: details, readings, what ails it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from gpool.core.ids import NodeId
from gpool.core.model import GpuDetails, Node
from gpool.server.nodes.telemetry import Point
from gpool.server.store.identity_values import GpuRow
from gpool.wire.documents import GpuDetailsDocument, ReadingDocument, instant_to_datetime


def sick(here: Node, gpus: Mapping[tuple[NodeId, int], GpuRow]) -> list[str]:
    """What the owner should know of the node's GPUs."""
    told = []
    for device in here.offer.gpus:
        stored = gpus.get((here.id, device.index))
        name = f"gpu{device.index} ({device.model})"
        if stored is not None and stored.quarantined is not None:
            cure = f"when it is well: gpool node resume gpu{device.index}"
            told.append(f"{name} is in quarantine: {stored.quarantined}; {cure}")
        elif device.ails:
            told.append(f"{name} is {device.health.value}: {device.ails}")
    return told


def gpu_details(told: GpuDetails) -> GpuDetailsDocument:
    return GpuDetailsDocument(
        source=told.source,
        driver=told.driver,
        capability=told.capability,
        bus=told.bus,
        pcie=told.pcie,
        power_limit_watts=told.power_limit_mw / 1000 or None,
        clock_mhz=told.clock_mhz or None,
        links=dict(told.links),
        mig=told.mig,
        mig_profiles=list(told.mig_profiles),
        mig_instances=list(told.mig_instances),
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
