"""Lending by owners: availability, withdrawal, removal; ownership flags by operators."""

from __future__ import annotations

from gpool.core.errors import NotFound
from gpool.core.ids import GpuId, NodeId, encode
from gpool.core.model import Availability, Instant
from gpool.core.permissions import Action, ObjectKind, Thing, missing
from gpool.server.actions.nodes.listing import gpu, no_gpu, no_node, node
from gpool.server.actions.operators.audit import audited, entry
from gpool.server.identity.authorization import node_thing, permit
from gpool.server.nodes import offers
from gpool.server.server import Once, Server
from gpool.server.store.identity_values import Caller, GpuRow
from gpool.server.store.operation import operation
from gpool.server.store.operations.nodes import gpu_bindings
from gpool.server.store.operations.nodes import nodes as operations
from gpool.server.store.protocol import Operation
from gpool.server.store.values import NodeRow
from gpool.wire.documents import GpuDocument, NodeDocument


async def set_availability(
    server: Server, who: Caller, id_: NodeId, availability: Availability, once: Once | None
) -> NodeDocument:
    answered = await server.write_once(
        who.user, once, _set_availability(id_, who, availability, server.now), lambda _: b""
    )
    if answered.value is not None:
        server.picture.node_changed(answered.value.node)
    return await node(server, who, id_)


async def set_gpu_available(
    server: Server, who: Caller, id_: GpuId, available: bool, once: Once | None
) -> GpuDocument:
    answered = await server.write_once(
        who.user, once, _set_gpu_available(id_, who, available), lambda _: b""
    )
    if answered.value is not None:
        server.picture.node_changed(answered.value.node)
    return await gpu(server, id_)


async def unflag(server: Server, who: Caller, id_: GpuId, once: Once | None) -> GpuDocument:
    answered = await server.write_once(who.user, once, _unflag(id_, who, server.now), lambda _: b"")
    for row in answered.value or ():
        server.picture.node_changed(row.node)
    return await gpu(server, id_)


async def remove(server: Server, who: Caller, id_: NodeId, once: Once | None) -> None:
    removal = entry(server.now, who, "node.remove", encode("node", id_))
    removing = audited(_remove(id_, who), [removal])
    answered = await server.write_once(who.user, once, removing, lambda _: b"")
    if answered.value:
        server.gate.forget()
        server.picture.node_removed(id_)


@operation
def _set_availability(
    id_: NodeId, who: Caller, availability: Availability, at: Instant
) -> Operation[NodeRow]:
    found = yield from operations.node(id_)
    permit(who, Action.NODE_CHANGE, node_thing(found), _named(id_))
    row = yield from operations.set_availability(id_, None, availability, at)
    if row is None:
        raise no_node(id_)
    return row


@operation
def _set_gpu_available(id_: GpuId, who: Caller, available: bool) -> Operation[NodeRow]:
    found = yield from gpu_bindings.gpu(id_)
    permit(who, Action.GPU_CHANGE, gpu_thing(found), f"GPU {encode('gpu', id_)}")
    row = yield from operations.set_gpu_available(id_, None, available)
    if row is None:
        raise NotFound(f"no GPU {encode('gpu', id_)} of yours")
    return row


def gpu_thing(row: GpuRow | None) -> Thing:
    if row is None or row.gone:
        return missing(ObjectKind.GPU)
    return Thing(ObjectKind.GPU, owner=row.owner, holder=row.node)


@operation
def _unflag(id_: GpuId, who: Caller, at: Instant) -> Operation[tuple[NodeRow, ...]]:
    found = yield from gpu_bindings.gpu(id_)
    permit(who, Action.GPU_UNFLAG, gpu_thing(found), f"GPU {encode('gpu', id_)}")
    settled = yield from gpu_bindings.unflag(id_, at)
    if settled is None:
        raise no_gpu(id_)
    return (yield from offers.rows_with((settled.uuid,)))


@operation
def _remove(id_: NodeId, who: Caller) -> Operation[bool]:
    found = yield from operations.node(id_)
    permit(who, Action.NODE_REMOVE, node_thing(found), _named(id_))
    if not (yield from operations.remove_node(id_, None)):
        raise no_node(id_)
    return True


def _named(id_: NodeId) -> str:
    return f"node {encode('node', id_)}"
