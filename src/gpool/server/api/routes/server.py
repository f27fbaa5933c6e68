"""Routes about the server itself: health, readiness, metrics, token keys, the OpenAPI document."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gpool.core.permissions import Action
from gpool.server.api.callers import server_of, user_of
from gpool.server.api.endpoints import EndpointRouter, SuccessReply
from gpool.server.api.messages import answer, tagged
from gpool.server.server import VERSION
from gpool.wire.documents import HealthDocument
from gpool.wire.identity import JwksDocument

routes = EndpointRouter("server")


@routes.get("/healthz", Action.HEALTH_READ, returns=HealthDocument)
async def get_health(request: Request) -> Response:  # noqa: ARG001 - the signature of handlers
    """Answer 200 while the process runs."""
    return answer(HealthDocument(status="ok", version=VERSION))


@routes.get(
    "/readyz",
    Action.HEALTH_READ,
    returns=(
        SuccessReply(HealthDocument),
        SuccessReply(HealthDocument, 503, "The server is starting"),
    ),
)
async def get_readiness(request: Request) -> Response:
    """Answer 200 once the server accepts tasks."""
    if not getattr(request.app.state, "ready", False):
        return answer(HealthDocument(status="starting", version=VERSION), 503)
    return answer(HealthDocument(status="ok", version=VERSION))


@routes.get(
    "/metrics",
    Action.METRICS_READ,
    returns=SuccessReply(description="Prometheus text format", media_types=("text/plain",)),
)
async def get_metrics(request: Request) -> Response:
    """Read the metrics of the server and its GPUs."""
    await user_of(request)
    return Response(server_of(request).metrics.page(), media_type="text/plain; version=0.0.4")


@routes.get("/.well-known/jwks.json", Action.PUBLIC_KEYS_READ, returns=JwksDocument)
async def get_jwks(request: Request) -> Response:
    """Read the public keys with which access tokens are verified."""
    server = server_of(request)
    document = JwksDocument.model_validate({"keys": server.identity.signing.jwks(server.now)})
    return tagged(request, document)


@routes.get("/openapi.json", Action.SCHEMA_READ, returns=SuccessReply(), include_in_schema=False)
async def get_openapi(request: Request) -> Response:
    """Read the OpenAPI document."""
    return JSONResponse(request.app.openapi())
