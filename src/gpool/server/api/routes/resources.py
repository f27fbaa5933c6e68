"""Routes of resources: GPUs, and the CPUs that nodes lend (kind `cpu`, under the node's id)."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from gpool.core.errors import Invalid
from gpool.core.ids import GpuId, NodeId, UserId, decode
from gpool.core.model import Availability
from gpool.core.permissions import Action
from gpool.server.actions.nodes import gpus, lending, listing
from gpool.server.api.callers import caller, check, server_of, user_of
from gpool.server.api.endpoints import EndpointRouter
from gpool.server.api.messages import (
    GPU,
    Cursor,
    LargeLimit,
    answer,
    document_of,
    once_of,
    tagged,
)
from gpool.server.api.routes.nodes import JOIN_ACTIONS, JOINED, Owner, Search, join_node
from gpool.server.identity.throttle import RouteClass
from gpool.server.server import Once
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations.nodes.nodes import NodeFilter
from gpool.wire.documents import GpuDocument, GpuPage, GpuPatch, NodeRequest, TelemetryDocument

routes = EndpointRouter("resources")


@routes.get("/v1/resources", Action.GPUS_LIST, returns=GpuPage)
async def list_resources(
    request: Request,
    limit: LargeLimit = 1000,
    cursor: Cursor = None,
    owner: Owner = None,
    node: Annotated[str | None, Query(description="Node id: resources of this node")] = None,
    kind: Literal["gpu", "cpu"] | None = None,
    search: Search = None,
) -> Response:
    """List GPUs and lent CPUs, node by node; a page may be short and still have a `next`."""
    await user_of(request)
    wanted = NodeFilter(
        owner=UserId(decode("user", owner)) if owner else None,
        node=NodeId(decode("node", node)) if node else None,
        search=search or "",
    )
    after = listing.ResourceCursor.parse(cursor) if cursor else None
    page = await listing.resources(server_of(request), wanted, kind, after, limit)
    return tagged(request, page)


@routes.post(
    "/v1/resources", *JOIN_ACTIONS, rate=RouteClass.SIGN_IN, body=NodeRequest, returns=JOINED
)
async def register_resource(request: Request) -> Response:
    """Register a machine's GPUs; with its owner's key, update a machine registered without an agent."""
    return await join_node(request)


@routes.get("/v1/resources/{gpu}", Action.GPU_READ, Action.NODE_READ, returns=GpuDocument)
async def get_resource(request: Request, gpu: GPU) -> Response:
    """Read one GPU, or the CPUs of one node."""
    await user_of(request, Action.NODE_READ if _is_node(gpu) else Action.GPU_READ)
    server = server_of(request)
    if _is_node(gpu):
        return tagged(request, await listing.processors(server, NodeId(decode("node", gpu))))
    return tagged(request, await listing.gpu(server, GpuId(decode("gpu", gpu))))


@routes.get("/v1/resources/{gpu}/telemetry", Action.GPU_READ, returns=TelemetryDocument)
async def get_resource_telemetry(request: Request, gpu: GPU) -> Response:
    """Read the usage of one GPU over the last 15 minutes."""
    await user_of(request)
    return tagged(request, await gpus.telemetry(server_of(request), GpuId(decode("gpu", gpu))))


@routes.patch(
    "/v1/resources/{gpu}",
    Action.GPU_CHANGE,
    Action.NODE_CHANGE,
    Action.GPU_UNFLAG,
    body=GpuPatch,
    returns=GpuDocument,
)
async def change_resource(request: Request, gpu: GPU) -> Response:
    """Lend or withdraw a GPU of yours, or quarantine it. Operators clear an ownership flag with `flagged: null`."""
    who = await caller(request)  # only once: a node's proof is valid for one verification
    wanted, once = await document_of(request, GpuPatch)
    unflags, quarantines = (name in wanted.model_fields_set for name in ("flagged", "quarantined"))
    check(request, who, Action.GPU_UNFLAG if unflags else _lending(gpu))
    assert isinstance(who, Caller), "no node may do this"
    server = server_of(request)
    if unflags:
        return answer(await lending.unflag(server, who, GpuId(decode("gpu", gpu)), once))
    if quarantines:
        if wanted.available is not None:
            raise Invalid("send 'available' and 'quarantined' in separate requests")
        device = GpuId(decode("gpu", gpu))
        return answer(await gpus.quarantine(server, who, device, wanted.quarantined, once))
    if wanted.available is None:
        raise Invalid(
            "nothing to change; send 'available' or 'quarantined' (owners), or 'flagged': null (operators)"
        )
    lent = await _lend(request, who, gpu, wanted.available, once)
    if wanted.reclaim and not wanted.available and not _is_node(gpu):
        await gpus.reclaim(server, GpuId(decode("gpu", gpu)))
    return lent


@routes.delete("/v1/resources/{gpu}", Action.GPU_CHANGE, Action.NODE_CHANGE, returns=GpuDocument)
async def withdraw_resource(request: Request, gpu: GPU) -> Response:
    """Withdraw a GPU of yours from the pool; running tasks finish."""
    who = await user_of(request, _lending(gpu))
    return await _lend(request, who, gpu, False, once_of(request))


def _is_node(id_: str) -> bool:
    return id_.startswith("n-")


def _lending(id_: str) -> Action:
    return Action.NODE_CHANGE if _is_node(id_) else Action.GPU_CHANGE


async def _lend(
    request: Request, who: Caller, id_: str, available: bool, once: Once | None
) -> Response:
    server = server_of(request)
    if _is_node(id_):
        node = NodeId(decode("node", id_))
        wanted = Availability.AVAILABLE if available else Availability.PAUSED
        await lending.set_availability(server, who, node, wanted, once)
        return answer(await listing.processors(server, node))
    gpu = GpuId(decode("gpu", id_))
    return answer(await lending.set_gpu_available(server, who, gpu, available, once))
