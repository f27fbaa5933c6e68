"""Routes of nodes and resources, and their old names."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gpool.core.errors import Invalid
from gpool.core.ids import GpuId, NodeId, decode
from gpool.core.model import Availability
from gpool.core.permissions import Action
from gpool.server.actions.nodes import gpus, nodes
from gpool.server.api.openapi import GPU, NODE, Responses, body, ok
from gpool.server.api.requests import (
    body_of,
    caller,
    caller_if_any,
    once_of,
    parsed,
    server_of,
    user_of,
)
from gpool.server.api.responses import answer, tagged
from gpool.server.identity.authorization import gate
from gpool.server.store.identity_values import Caller
from gpool.server.store.values import NodeCredentials
from gpool.wire.documents import (
    GpuDocument,
    GpuPage,
    GpuPatch,
    InviteDocument,
    InviteRequest,
    NodeChallenge,
    NodeDocument,
    NodeJoined,
    NodePage,
    NodePatch,
    NodeRequest,
    TelemetryDocument,
)

router = APIRouter(tags=["nodes"])
_JOINED: Responses = {201: {"model": NodeJoined, "description": "Joined"}}


@router.get("/v1/nodes", responses=ok(NodePage), response_class=Response)
async def list_nodes(request: Request) -> Response:
    who = await user_of(request, Action.NODES_LIST)
    server = server_of(request)
    pool = await nodes.pool(server)
    return tagged(
        request,
        NodePage(items=[nodes.node_document(server, who, pool, row) for row in pool.rows]),
    )


@router.post(
    "/v1/nodes",
    status_code=201,
    openapi_extra=body(NodeRequest),
    responses=_JOINED,
    response_class=Response,
)
async def join(request: Request) -> Response:
    """A node joins, with its owner's key or with the `token` of an invite."""
    who = await caller_if_any(request)
    content = await body_of(request)
    wanted = parsed(NodeRequest, content)
    server = server_of(request)
    if isinstance(who, NodeCredentials):
        return answer(await nodes.register(server, who, wanted))
    return answer(await nodes.join(server, who, wanted, once_of(request, content)), 201)


@router.post("/v1/nodes/challenges", responses=ok(NodeChallenge), response_class=Response)
async def challenge(request: Request) -> Response:
    """What a node about to join signs, to show that it holds the key it brings."""
    return answer(nodes.challenge(server_of(request)))


@router.post(
    "/v1/nodes/invites",
    status_code=201,
    openapi_extra=body(InviteRequest, required=False),
    responses={201: {"model": InviteDocument, "description": "Made"}},
    response_class=Response,
)
async def invite(request: Request) -> Response:
    """A token and link with which one node may join in your name."""
    who = await user_of(request, Action.NODE_INVITE)
    content = await body_of(request)
    wanted = parsed(InviteRequest, content)
    made = await nodes.invite(
        server_of(request), who, wanted.expires_in_s, once_of(request, content)
    )
    return answer(made, 201)


@router.get("/v1/nodes/{id}", responses=ok(NodeDocument), response_class=Response)
async def get_node(request: Request, id: NODE) -> Response:
    who = await user_of(request, Action.NODE_READ)
    return tagged(request, await nodes.node(server_of(request), who, NodeId(decode("node", id))))


@router.patch(
    "/v1/nodes/{id}",
    openapi_extra=body(NodePatch),
    responses=ok(NodeDocument),
    response_class=Response,
)
async def change_node(request: Request, id: NODE) -> Response:
    """Pause, drain or resume a node of yours."""
    who = await user_of(request, Action.NODE_CHANGE)
    content = await body_of(request)
    wanted = Availability(parsed(NodePatch, content).availability)
    node = NodeId(decode("node", id))
    changed = await nodes.set_availability(
        server_of(request), who, node, wanted, once_of(request, content)
    )
    return answer(changed)


@router.delete("/v1/nodes/{id}", status_code=204, response_class=Response)
async def remove_node(request: Request, id: NODE) -> Response:
    """Remove a node of yours that holds no lease."""
    who = await user_of(request, Action.NODE_REMOVE)
    await nodes.remove(server_of(request), who, NodeId(decode("node", id)), once_of(request))
    return Response(status_code=204)


# ---- resources


@router.get("/v1/resources", responses=ok(GpuPage), response_class=Response)
@router.get("/resources", responses=ok(GpuPage), response_class=Response)
async def list_resources(request: Request) -> Response:
    """Every GPU, and what nodes lend of their processors (kind `cpu`)."""
    await user_of(request, Action.GPUS_LIST)
    server = server_of(request)
    pool = await nodes.pool(server)
    items = []
    for row in pool.rows:
        items += [document for _, document in nodes.gpu_documents(server, pool, row)]
        if row.node.offer.cpu_milli:
            items.append(nodes.cpu_document(server, row))
    return tagged(request, GpuPage(items=items))


@router.post(
    "/v1/resources",
    status_code=201,
    openapi_extra=body(NodeRequest),
    responses=_JOINED,
    response_class=Response,
)
@router.post(
    "/register_gpu",
    status_code=201,
    openapi_extra=body(NodeRequest),
    responses=_JOINED,
    response_class=Response,
)
async def register(request: Request) -> Response:
    """Register a machine's GPUs: what an agent's hello does. Its owner's key updates what was registered without an agent."""
    return await join(request)


@router.get("/v1/resources/{gpu}", responses=ok(GpuDocument), response_class=Response)
async def get_resource(request: Request, gpu: GPU) -> Response:
    is_node = gpu.startswith("n-")
    await user_of(request, Action.NODE_READ if is_node else Action.GPU_READ)
    server = server_of(request)
    if is_node:
        return tagged(request, await nodes.processors(server, NodeId(decode("node", gpu))))
    return tagged(request, await nodes.gpu(server, GpuId(decode("gpu", gpu))))


@router.get(
    "/v1/resources/{gpu}/telemetry", responses=ok(TelemetryDocument), response_class=Response
)
async def get_telemetry(request: Request, gpu: GPU) -> Response:
    """What the GPU did in the last quarter of an hour."""
    await user_of(request, Action.GPU_READ)
    return tagged(request, await gpus.telemetry(server_of(request), GpuId(decode("gpu", gpu))))


@router.patch(
    "/v1/resources/{gpu}",
    openapi_extra=body(GpuPatch),
    responses=ok(GpuDocument),
    response_class=Response,
)
async def change_resource(request: Request, gpu: GPU) -> Response:
    """Lend a GPU of yours, or keep it. Operators settle with `flagged: null` whose a GPU is."""
    who = await caller(request)  # once: a node's proof is good for one look
    content = await body_of(request)
    wanted = parsed(GpuPatch, content)
    settles, judges = (name in wanted.model_fields_set for name in ("flagged", "quarantined"))
    gate(who, Action.GPU_UNFLAG if settles else _lending(gpu))
    assert isinstance(who, Caller), "the gate lets no node pass"
    if settles:
        device, once = GpuId(decode("gpu", gpu)), once_of(request, content)
        return answer(await nodes.unflag(server_of(request), who, device, once))
    if judges:
        device, once = GpuId(decode("gpu", gpu)), once_of(request, content)
        if wanted.available is not None:
            raise Invalid("say 'available' and 'quarantined' one at a time")
        changed = await gpus.quarantine(server_of(request), who, device, wanted.quarantined, once)
        return answer(changed)
    if wanted.available is None:
        raise Invalid("say 'available' or 'quarantined' (owners), or 'flagged': null (operators)")
    lent = await _lend(request, who, gpu, wanted.available, content)
    if wanted.reclaim and not wanted.available and not gpu.startswith("n-"):
        await gpus.reclaim(server_of(request), GpuId(decode("gpu", gpu)))
    return lent


@router.delete("/v1/resources/{gpu}", responses=ok(GpuDocument), response_class=Response)
async def withdraw_resource(request: Request, gpu: GPU) -> Response:
    """Take a GPU of yours out of the pool; what runs on it goes on to its end."""
    return await _lend(request, await user_of(request, _lending(gpu)), gpu, False, b"")


def _lending(id_: str) -> Action:
    return Action.NODE_CHANGE if id_.startswith("n-") else Action.GPU_CHANGE


async def _lend(
    request: Request, who: Caller, id_: str, available: bool, content: bytes
) -> Response:
    server, once = server_of(request), once_of(request, content)
    if id_.startswith("n-"):
        node = NodeId(decode("node", id_))
        wanted = Availability.AVAILABLE if available else Availability.PAUSED
        await nodes.set_availability(server, who, node, wanted, once)
        return answer(await nodes.processors(server, node))
    gpu = GpuId(decode("gpu", id_))
    return answer(await nodes.set_gpu_available(server, who, gpu, available, once))
