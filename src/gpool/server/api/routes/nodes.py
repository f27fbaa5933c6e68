"""Routes of nodes: joining, invites, listing, availability, removal."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from gpool.core.ids import NodeId, UserId, decode
from gpool.core.model import Availability
from gpool.core.permissions import Action
from gpool.server.actions.nodes import joining, lending, listing
from gpool.server.api.callers import caller_if_any, check, server_of, user_of
from gpool.server.api.endpoints import NO_CONTENT, EndpointRouter, SuccessReply, created
from gpool.server.api.messages import (
    NODE,
    Cursor,
    LargeLimit,
    answer,
    document_of,
    no_content,
    once_of,
    tagged,
)
from gpool.server.identity.throttle import RouteClass
from gpool.server.store.operations.nodes.nodes import NodeFilter
from gpool.server.store.values import NodeCredentials
from gpool.wire.documents import (
    InviteDocument,
    InviteRequest,
    NodeChallenge,
    NodeDocument,
    NodeJoined,
    NodePage,
    NodePatch,
    NodeRequest,
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


@routes.patch("/v1/nodes/{id}", Action.NODE_CHANGE, body=NodePatch, returns=NodeDocument)
async def change_node(request: Request, id: NODE) -> Response:
    """Pause, drain or resume a node of yours."""
    who = await user_of(request)
    wanted, once = await document_of(request, NodePatch)
    node, availability = NodeId(decode("node", id)), Availability(wanted.availability)
    return answer(await lending.set_availability(server_of(request), who, node, availability, once))


@routes.delete("/v1/nodes/{id}", Action.NODE_REMOVE, returns=NO_CONTENT)
async def remove_node(request: Request, id: NODE) -> Response:
    """Remove a node of yours. 409 while it holds leases."""
    who = await user_of(request)
    await lending.remove(server_of(request), who, NodeId(decode("node", id)), once_of(request))
    return no_content()
