"""Health, metrics, and the old names of the task routes."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gpool.core.permissions import POOL, Action
from gpool.server.api.openapi import ok
from gpool.server.api.requests import Wait, server_of, user_of
from gpool.server.api.responses import answer
from gpool.server.api.routes.tasks import SUBMITTING, submit_tasks, task_answer
from gpool.server.identity.authorization import permit
from gpool.server.server import VERSION
from gpool.wire.documents import HealthDocument, TaskDocument

router = APIRouter(tags=["server"])


@router.get("/healthz", responses=ok(HealthDocument), response_class=Response)
async def health() -> Response:
    """The process answers."""
    permit(None, Action.HEALTH_READ, POOL)
    return answer(HealthDocument(status="ok", version=VERSION))


@router.get(
    "/readyz",
    responses=ok(HealthDocument) | {503: {"model": HealthDocument, "description": "Not yet"}},
    response_class=Response,
)
async def ready(request: Request) -> Response:
    """200 once it can take tasks."""
    permit(None, Action.HEALTH_READ, POOL)
    if not getattr(request.app.state, "ready", False):
        return answer(HealthDocument(status="starting", version=VERSION), 503)
    return answer(HealthDocument(status="ok", version=VERSION))


@router.get(
    "/metrics",
    responses={
        200: {
            "content": {"text/plain": {"schema": {"type": "string"}}},
            "description": "Prometheus",
        }
    },
    response_class=Response,
)
async def metrics(request: Request) -> Response:
    await user_of(request, Action.METRICS_READ)
    return Response(server_of(request).metrics.page(), media_type="text/plain; version=0.0.4")


@router.post("/submit_task", **SUBMITTING)
async def submit_task(request: Request, wait: Wait = 0) -> Response:
    """Alias of `POST /v1/tasks`."""
    return await submit_tasks(request, wait)


@router.get("/task_status", responses=ok(TaskDocument), response_class=Response)
async def task_status(request: Request, id: str = "", wait: Wait = 0) -> Response:
    """Alias of `GET /v1/tasks/{id}`."""
    return await task_answer(request, id, wait)


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> Response:
    permit(None, Action.SCHEMA_READ, POOL)
    return JSONResponse(request.app.openapi())
