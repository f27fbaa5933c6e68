"""Actions on one GPU: quarantine, reclaiming from running tasks, telemetry."""

from __future__ import annotations

from collections.abc import Sequence

from gpool.core.errors import Conflict
from gpool.core.ids import GpuId, NodeId, TaskId, encode
from gpool.core.model import Health
from gpool.core.permissions import Action
from gpool.server.actions.nodes.documents import reading_document
from gpool.server.actions.nodes.lending import gpu_thing
from gpool.server.actions.nodes.listing import gpu, no_gpu
from gpool.server.actions.operators.audit import audited, entry
from gpool.server.actions.tasks.query import named
from gpool.server.actions.tasks.stopping import preempt_tasks
from gpool.server.identity.authorization import permit, task_thing
from gpool.server.scheduling.delivery import lines_on
from gpool.server.server import Once, Server
from gpool.server.store.identity_values import Caller
from gpool.server.store.operation import operation
from gpool.server.store.operations.nodes import gpu_bindings
from gpool.server.store.operations.nodes import nodes as operations
from gpool.server.store.operations.tasks import tasks as task_operations
from gpool.server.store.protocol import Operation
from gpool.server.store.values import NodeRow
from gpool.wire.documents import GpuDocument, TelemetryDocument
from gpool.wire.frames import Hold, StopReason


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
    return await gpu(server, id_)


async def reclaim(server: Server, id_: GpuId) -> None:
    """The caller has checked the permission."""
    row = await server.store.read(gpu_bindings.gpu(id_))
    tasks = [] if row is None else tasks_on(server, row.node, row.position)
    if row is None or not tasks:
        return
    # Sent to the node first, with the reason RECLAIMED; the stored preemption order survives a restart.
    channel = server.nodes.connection(row.node)
    if channel is not None:
        held = {hold for hold in await server.store.read(_holds(tasks)) if hold is not None}
        channel.stop(tuple(sorted(held, key=lambda hold: hold.task)), StopReason.RECLAIMED)
    await preempt_tasks(server, tasks)


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
    row = await server.store.read(gpu_bindings.gpu(id_))
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
    return TelemetryDocument(
        id=encode("task", id_),
        every_s=server.settings.beat_s,
        readings=[reading_document(point) for point in server.telemetry.task(id_)],
    )


@operation
def _quarantine(id_: GpuId, who: Caller, why: str | None) -> Operation[NodeRow]:
    found = yield from gpu_bindings.gpu(id_)
    permit(who, Action.GPU_CHANGE, gpu_thing(found), f"GPU {encode('gpu', id_)}")
    assert found is not None
    row = yield from operations.node(found.node)
    assert row is not None
    if why is None:
        for device in row.node.offer.gpus:
            if device.index == found.position and device.health is Health.QUARANTINED:
                raise Conflict(
                    f"the agent reports the GPU unhealthy: {device.ails}; repair it first"
                )
    yield from gpu_bindings.quarantine(id_, why)
    row = yield from operations.node(found.node)
    assert row is not None
    return row
