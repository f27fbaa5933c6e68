"""Aliases of task and resource routes, at the short paths of the first specification."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from gpool.core.permissions import Action
from gpool.server.api.endpoints import EndpointRouter
from gpool.server.api.messages import Cursor, LargeLimit, Wait
from gpool.server.api.routes import nodes, resources, tasks
from gpool.server.identity.throttle import RouteClass
from gpool.wire.documents import GpuPage, NodeRequest, TaskDocument, TaskRequest

routes = EndpointRouter("aliases")


@routes.post(
    "/submit_task",
    Action.TASK_SUBMIT,
    Action.BATCH_EXTEND,
    rate=RouteClass.SUBMIT,
    body=TaskRequest,
    returns=tasks.SUBMITTED,
    problems=(422,),
)
async def submit_task(request: Request, wait: Wait = 0) -> Response:
    """Alias of `POST /v1/tasks`."""
    return await tasks.submit_tasks(request, wait=wait)


@routes.get("/task_status", Action.TASK_READ, returns=TaskDocument, problems=(400,))
async def task_status(request: Request, id: str = "", wait: Wait = 0) -> Response:
    """Alias of `GET /v1/tasks/{id}`."""
    return await tasks.get_task(request, id=id, wait=wait)


@routes.get("/resources", Action.GPUS_LIST, returns=GpuPage)
async def get_resources(
    request: Request, limit: LargeLimit = 1000, cursor: Cursor = None
) -> Response:
    """Alias of `GET /v1/resources`."""
    return await resources.list_resources(request, limit=limit, cursor=cursor)


@routes.post(
    "/register_gpu",
    *nodes.JOIN_ACTIONS,
    rate=RouteClass.SIGN_IN,
    body=NodeRequest,
    returns=nodes.JOINED,
)
async def register_gpu(request: Request) -> Response:
    """Alias of `POST /v1/resources`."""
    return await nodes.join_node(request)
