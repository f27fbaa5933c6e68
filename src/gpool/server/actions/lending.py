"""Lending by owners: availability, withdrawal, removal; quarantine and telemetry of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpool.core.errors import Conflict, NotFound
from gpool.core.ids import GpuId, NodeId, TaskId, UserId, encode
from gpool.core.model import Availability, Health, Instant
from gpool.core.permissions import Action, ObjectKind, Thing, missing
from gpool.server.actions.audit import audited, entry, note_read
from gpool.server.actions.listing import gpu, no_gpu, no_node, node, reading_document
from gpool.server.actions.tasks.query import named, preempt_tasks
from gpool.server.identity.authorization import node_thing, permit, task_thing
from gpool.server.nodes import reconciliation
from gpool.server.scheduling.delivery import lines_on
from gpool.server.server import Once, Server
from gpool.server.store.identity_values import Caller, GpuRow
from gpool.server.store.operations import gpus, nodes
from gpool.server.store.operations.leases import leases
from gpool.server.store.operations.tasks import tasks as task_operations
from gpool.server.store.protocol import Operation, operation
from gpool.server.store.values import RECLAIMING, NodeRow, Recording
from gpool.wire.frames import Hold, StopReason
from gpool.wire.nodes import GpuDocument, NodeDocument, TelemetryDocument


async def set_availability(
    server: Server, who: Caller, id_: NodeId, availability: Availability, once: Once | None
) -> NodeDocument:
    answered = await server.write_once(
        who.user,
        once,
        audited(
            _set_availability(id_, who, availability, server.now),
            [
                entry(
                    server.now,
                    who,
                    "node.change",
                    encode("node", id_),
                    availability=availability.value,
                )
            ],
        ),
        lambda _: b"",
    )
    if answered.value is not None:
        server.picture.node_changed(answered.value.node)
    return await node(server, who, id_)


async def set_gpu_available(
    server: Server, who: Caller, id_: GpuId, available: bool, once: Once | None
) -> GpuDocument:
    answered = await server.write_once(
        who.user,
        once,
        audited(
            _set_gpu_available(id_, who, available),
            [entry(server.now, who, "gpu.change", encode("gpu", id_), available=str(available))],
        ),
        lambda _: b"",
    )
    if answered.value is not None:
        server.picture.node_changed(answered.value.node)
    return await gpu(server, who, id_)


async def unflag(server: Server, who: Caller, id_: GpuId, once: Once | None) -> GpuDocument:
    unflagging = audited(
        _unflag(id_, who, server.now), [entry(server.now, who, "gpu.unflag", encode("gpu", id_))]
    )
    answered = await server.write_once(who.user, once, unflagging, lambda _: b"")
    for row in answered.value or ():
        server.picture.node_changed(row.node)
    return await gpu(server, who, id_)


@dataclass(frozen=True, slots=True)
class _Withdrawn:
    """Leases that ended with the nodes, and nodes of others whose GPU flags lapsed."""

    recording: Recording
    unflagged: tuple[NodeRow, ...]


async def remove(
    server: Server, who: Caller, id_: NodeId, once: Once | None, *, force: bool = False
) -> None:
    """`Conflict` while it holds leases, unless `force`: then they end at once as lost."""
    facts = {"force": "true"} if force else {}
    removal = entry(server.now, who, "node.remove", encode("node", id_), **facts)
    removing = audited(_remove(id_, who, force, server.now, _claimants(server)), [removal])
    answered = await server.write_once(who.user, once, removing, lambda _: b"")
    if answered.value is not None:
        _apply_removal(server, id_, answered.value)


async def remove_of_deleted_account(server: Server, id_: NodeId) -> None:
    """End the node's leases, whose tasks are queued again, and delete it."""
    withdrawn = await server.write(_delete_node(id_, server.now, _claimants(server), force=True))
    if withdrawn is not None:
        _apply_removal(server, id_, withdrawn)


def _apply_removal(server: Server, id_: NodeId, withdrawn: _Withdrawn) -> None:
    server.gate.forget()
    server.picture.absorb(withdrawn.recording)
    server.picture.node_removed(id_)
    for row in withdrawn.unflagged:
        server.picture.node_changed(row.node)


async def suspend(server: Server, owner: UserId, why: str = nodes.MAY_NOT_LEND) -> None:
    """Disconnect the nodes of an account that may not lend any more, and end their leases at once. `why` is sent to them.

    The caller has committed the change; from then on none of them can connect.
    """
    server.gate.forget()
    owned = [row.node.id for row in await server.store.read(nodes.nodes(owner))]
    for id_ in owned:
        server.nodes.disconnect(id_, why)
    for id_ in owned:
        withdrawn = await server.write(_withdraw(id_, server.now, _claimants(server)))
        server.picture.absorb(withdrawn.recording)
        server.nodes.forget(id_)
        for row in withdrawn.unflagged:
            server.picture.node_changed(row.node)


@operation
def _withdraw(id_: NodeId, at: Instant, claimants: gpus.Claimants) -> Operation[_Withdrawn]:
    recording = yield from leases.expire(id_, at)
    uuids = yield from gpus.lapse((yield from gpus.uuids_of(id_)), at, claimants)
    return _Withdrawn(recording, (yield from reconciliation.rows_with(uuids)))


@operation
def _set_availability(
    id_: NodeId, who: Caller, availability: Availability, at: Instant
) -> Operation[NodeRow]:
    found = yield from nodes.node(id_)
    permit(who, Action.NODE_CHANGE, node_thing(found), _named(id_))
    row = yield from nodes.set_availability(id_, None, availability, at)
    if row is None:
        raise no_node(id_)
    return row


@operation
def _set_gpu_available(id_: GpuId, who: Caller, available: bool) -> Operation[NodeRow]:
    found = yield from gpus.gpu(id_)
    permit(who, Action.GPU_CHANGE, gpu_thing(found), f"GPU {encode('gpu', id_)}")
    row = yield from nodes.set_gpu_available(id_, None, available)
    if row is None:
        raise NotFound(f"no GPU {encode('gpu', id_)} of yours")
    return row


def gpu_thing(row: GpuRow | None) -> Thing:
    if row is None or row.gone:
        return missing(ObjectKind.GPU)
    return Thing(ObjectKind.GPU, owner=row.owner, holder=row.node)


@operation
def _unflag(id_: GpuId, who: Caller, at: Instant) -> Operation[tuple[NodeRow, ...]]:
    found = yield from gpus.gpu(id_)
    permit(who, Action.GPU_UNFLAG, gpu_thing(found), f"GPU {encode('gpu', id_)}")
    settled = yield from gpus.unflag(id_, at)
    if settled is None:
        raise no_gpu(id_)
    return (yield from reconciliation.rows_with((settled.uuid,)))


@operation
def _remove(
    id_: NodeId, who: Caller, force: bool, at: Instant, claimants: gpus.Claimants
) -> Operation[_Withdrawn]:
    found = yield from nodes.node(id_)
    permit(who, Action.NODE_REMOVE, node_thing(found), _named(id_))
    withdrawn = yield from _delete_node(id_, at, claimants, force=force)
    if withdrawn is None:
        raise no_node(id_)
    return withdrawn


@operation
def _delete_node(
    id_: NodeId, at: Instant, claimants: gpus.Claimants, *, force: bool
) -> Operation[_Withdrawn | None]:
    recording = (yield from leases.expire(id_, at)) if force else Recording()
    uuids = yield from gpus.uuids_of(id_)
    if not (yield from nodes.remove_node(id_, None)):
        return None
    freed = yield from gpus.lapse(uuids, at, claimants)
    return _Withdrawn(recording, (yield from reconciliation.rows_with(freed)))


def _claimants(server: Server) -> gpus.Claimants:
    nodes_here = server.picture.state.nodes.items()
    connected = frozenset(id_ for id_, each in nodes_here if each.node and each.node.connected)
    return gpus.Claimants(connected, server.offer_terms.proof)


def _named(id_: NodeId) -> str:
    return f"node {encode('node', id_)}"


async def quarantine(
    server: Server, who: Caller, id_: GpuId, why: str | None, once: Once | None
) -> GpuDocument:
    """Quarantine a GPU, or with None end its quarantine; `Conflict` while its agent reports it unhealthy."""
    action = "gpu.quarantine" if why else "gpu.clear"
    audit_entries = [
        entry(server.now, who, action, encode("gpu", id_), **({"why": why} if why else {}))
    ]
    setting = audited(_quarantine(id_, who, why), audit_entries)
    answered = await server.write_once(who.user, once, setting, lambda _: b"")
    if answered.value is not None:
        server.picture.node_changed(answered.value.node)
    if why:
        await reclaim(server, id_)
    return await gpu(server, who, id_)


async def reclaim(server: Server, id_: GpuId) -> None:
    """The caller has checked the permission."""
    row = await server.store.read(gpus.gpu(id_))
    tasks = [] if row is None else tasks_on(server, row.node, row.position)
    if row is None or not tasks:
        return
    # Sent to the node first, with the reason RECLAIMED; the stored preemption order survives a restart.
    channel = server.nodes.connection(row.node)
    if channel is not None:
        held = {hold for hold in await server.store.read(_holds(tasks)) if hold is not None}
        channel.stop(tuple(sorted(held, key=lambda hold: hold.task)), StopReason.RECLAIMED)
    await preempt_tasks(server, tasks, RECLAIMING)


@operation
def _holds(tasks: Sequence[TaskId]) -> Operation[list[Hold | None]]:
    found: list[Hold | None] = []
    for id_ in tasks:
        view = yield from task_operations.task(id_, None)
        row = None if view is None else view.row
        found.append(Hold(row.id, row.epoch) if row is not None and row.holding else None)
    return found


def tasks_on(server: Server, node: NodeId, index: int) -> list[TaskId]:
    return [
        task
        for task, line in lines_on(server.picture.state, node)
        if any(part.gpu_index == index for part in line.allocation.slices)
    ]


async def telemetry(server: Server, id_: GpuId) -> TelemetryDocument:
    row = await server.store.read(gpus.gpu(id_))
    if row is None or row.gone:
        raise no_gpu(id_)
    return TelemetryDocument(
        id=encode("gpu", id_),
        every_s=server.settings.beat_s,
        readings=[
            reading_document(point) for point in server.telemetry.gpu(row.node, row.position)
        ],
    )


async def task_telemetry(server: Server, who: Caller, id_: TaskId) -> TelemetryDocument:
    found = await server.store.read(task_operations.task(id_, None))
    permit(who, Action.TASK_READ, task_thing(found), named(id_))
    await note_read(server, who, Action.TASK_READ, task_thing(found), encode("task", id_))
    return TelemetryDocument(
        id=encode("task", id_),
        every_s=server.settings.beat_s,
        readings=[reading_document(point) for point in server.telemetry.task(id_)],
    )


@operation
def _quarantine(id_: GpuId, who: Caller, why: str | None) -> Operation[NodeRow]:
    found = yield from gpus.gpu(id_)
    permit(who, Action.GPU_CHANGE, gpu_thing(found), f"GPU {encode('gpu', id_)}")
    assert found is not None
    row = yield from nodes.node(found.node)
    assert row is not None
    if why is None:
        for device in row.node.offer.gpus:
            if device.index == found.position and device.health is Health.QUARANTINED:
                raise Conflict(
                    f"the agent reports the GPU unhealthy: {device.ails}; repair it first"
                )
    yield from gpus.quarantine(id_, why)
    row = yield from nodes.node(found.node)
    assert row is not None
    return row
