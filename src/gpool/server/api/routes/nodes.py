"""Routes of nodes and their resources: GPUs, and lent CPUs (kind `cpu`, under the node's id)."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from gpool.core.errors import Invalid
from gpool.core.ids import GpuId, NodeId, UserId, decode
from gpool.core.model import Availability
from gpool.core.permissions import Action
from gpool.server.actions import joining, lending, listing, node_tasks
from gpool.server.api.callers import caller, caller_if_any, check, server_of, user_of
from gpool.server.api.endpoints import NO_CONTENT, EndpointRouter, SuccessReply, created
from gpool.server.api.messages import (
    GPU,
    NODE,
    Cursor,
    LargeLimit,
    Limit,
    answer,
    document_of,
    no_content,
    once_of,
    tagged,
)
from gpool.server.identity.throttle import RouteClass
from gpool.server.overload.admission import LoadClass
from gpool.server.server import Once
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations.node_pages import NodeFilter
from gpool.server.store.values import NodeCredentials
from gpool.wire.nodes import (
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
    NodeTasksDocument,
    TelemetryDocument,
)

routes = EndpointRouter("nodes")

JOIN_ACTIONS = (Action.NODE_JOIN, Action.NODE_JOIN_BY_INVITE, Action.NODE_OFFER)
JOINED = (
    created(NodeJoined, "The node has joined"),
    SuccessReply(NodeJoined, 200, "A known node replaced its offer"),
)
Search = Annotated[
    str | None,
    Query(
        max_length=100,
        description="Text in the node's name or in a GPU's model; case is ignored",
    ),
]
Force = Annotated[
    bool, Query(description="Remove the node although it holds leases; its tasks are queued again")
]
Owner = Annotated[str | None, Query(description="User id: nodes of this owner")]


@routes.get("/v1/nodes", Action.NODES_LIST, returns=NodePage)
async def list_nodes(
    request: Request,
    limit: LargeLimit = 1000,
    cursor: Cursor = None,
    owner: Owner = None,
    availability: Literal["available", "paused", "draining"] | None = None,
    search: Search = None,
) -> Response:
    """List the nodes of the pool, the longest joined first."""
    who = await user_of(request)
    wanted = NodeFilter(
        owner=UserId(decode("user", owner)) if owner else None,
        availability=Availability(availability) if availability else None,
        search=search or "",
    )
    after = NodeId(decode("node", cursor)) if cursor else None
    return tagged(request, await listing.nodes(server_of(request), who, wanted, after, limit))


@routes.post("/v1/nodes", *JOIN_ACTIONS, rate=RouteClass.SIGN_IN, body=NodeRequest, returns=JOINED)
async def join_node(request: Request) -> Response:
    """Join a node to the pool, with its owner's key or with the `token` of an invite."""
    who = await caller_if_any(request)
    wanted, once = await document_of(request, NodeRequest)
    server = server_of(request)
    if isinstance(who, NodeCredentials):
        check(request, who, Action.NODE_OFFER)
        return answer(await joining.register(server, who, wanted))
    check(request, who, Action.NODE_JOIN_BY_INVITE if wanted.token else Action.NODE_JOIN)
    return answer(await joining.join(server, who, wanted, once), 201)


@routes.post(
    "/v1/nodes/challenges", Action.NODE_PROVE, rate=RouteClass.SIGN_IN, returns=NodeChallenge
)
async def create_node_challenge(request: Request) -> Response:
    """Get a nonce that a joining node signs to prove possession of its key."""
    return answer(joining.challenge(server_of(request)))


@routes.post(
    "/v1/nodes/invites",
    Action.NODE_INVITE,
    body=InviteRequest,
    is_body_required=False,
    returns=created(InviteDocument),
)
async def create_node_invite(request: Request) -> Response:
    """Create a token and link with which one node may join under your account."""
    who = await user_of(request)
    wanted, once = await document_of(request, InviteRequest)
    return answer(await joining.invite(server_of(request), who, wanted.expires_in_s, once), 201)


@routes.get("/v1/nodes/{id}", Action.NODE_READ, returns=NodeDocument)
async def get_node(request: Request, id: NODE) -> Response:
    """Read one node with its GPUs."""
    who = await user_of(request)
    return tagged(request, await listing.node(server_of(request), who, NodeId(decode("node", id))))


@routes.get(
    "/v1/nodes/{id}/tasks", Action.NODE_TASKS, load=LoadClass.LISTING, returns=NodeTasksDocument
)
async def get_node_tasks(request: Request, id: NODE, limit: Limit = 20) -> Response:
    """List the tasks on a node of yours: running ones, and the newest ended ones."""
    who, node = await user_of(request), NodeId(decode("node", id))
    return answer(await node_tasks.node_tasks(server_of(request), who, node, limit))


@routes.patch("/v1/nodes/{id}", Action.NODE_CHANGE, body=NodePatch, returns=NodeDocument)
async def change_node(request: Request, id: NODE) -> Response:
    """Pause, drain or resume a node of yours."""
    who = await user_of(request)
    wanted, once = await document_of(request, NodePatch)
    node, availability = NodeId(decode("node", id)), Availability(wanted.availability)
    return answer(await lending.set_availability(server_of(request), who, node, availability, once))


@routes.delete("/v1/nodes/{id}", Action.NODE_REMOVE, returns=NO_CONTENT)
async def remove_node(request: Request, id: NODE, force: Force = False) -> Response:
    """Remove a node of yours. 409 while it holds leases, unless `force`: then they end at once as lost."""
    who = await user_of(request)
    node, once = NodeId(decode("node", id)), once_of(request)
    await lending.remove(server_of(request), who, node, once, force=force)
    return no_content()


resource_routes = EndpointRouter("resources")


@resource_routes.get("/v1/resources", Action.GPUS_LIST, returns=GpuPage)
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
    who = await user_of(request)
    wanted = NodeFilter(
        owner=UserId(decode("user", owner)) if owner else None,
        node=NodeId(decode("node", node)) if node else None,
        search=search or "",
    )
    after = listing.ResourceCursor.parse(cursor) if cursor else None
    page = await listing.resources(server_of(request), who, wanted, kind, after, limit)
    return tagged(request, page)


@resource_routes.post(
    "/v1/resources", *JOIN_ACTIONS, rate=RouteClass.SIGN_IN, body=NodeRequest, returns=JOINED
)
async def register_resource(request: Request) -> Response:
    """Register a machine's GPUs; with its owner's key, update a machine registered without an agent."""
    return await join_node(request)


@resource_routes.get("/v1/resources/{gpu}", Action.GPU_READ, Action.NODE_READ, returns=GpuDocument)
async def get_resource(request: Request, gpu: GPU) -> Response:
    """Read one GPU, or the CPUs of one node."""
    who = await user_of(request, Action.NODE_READ if _is_node(gpu) else Action.GPU_READ)
    server = server_of(request)
    if _is_node(gpu):
        return tagged(request, await listing.processors(server, who, NodeId(decode("node", gpu))))
    return tagged(request, await listing.gpu(server, who, GpuId(decode("gpu", gpu))))


@resource_routes.get(
    "/v1/resources/{gpu}/telemetry",
    Action.GPU_READ,
    load=LoadClass.LISTING,
    returns=TelemetryDocument,
)
async def get_resource_telemetry(request: Request, gpu: GPU) -> Response:
    """Read the usage of one GPU over the last 15 minutes."""
    await user_of(request)
    return tagged(request, await lending.telemetry(server_of(request), GpuId(decode("gpu", gpu))))


@resource_routes.patch(
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
        return answer(await lending.quarantine(server, who, device, wanted.quarantined, once))
    if wanted.available is None:
        raise Invalid(
            "nothing to change; send 'available' or 'quarantined' (owners), or 'flagged': null (operators)"
        )
    lent = await _lend(request, who, gpu, wanted.available, once)
    if wanted.reclaim and not wanted.available and not _is_node(gpu):
        await lending.reclaim(server, GpuId(decode("gpu", gpu)))
    return lent


@resource_routes.delete(
    "/v1/resources/{gpu}", Action.GPU_CHANGE, Action.NODE_CHANGE, returns=GpuDocument
)
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
        return answer(await listing.processors(server, who, node))
    gpu = GpuId(decode("gpu", id_))
    return answer(await lending.set_gpu_available(server, who, gpu, available, once))
