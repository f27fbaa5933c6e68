"""Routes about the server itself (health, metrics, alerts, GPU models, token keys, OpenAPI), and aliases at the short paths of the first
specification.
"""

from __future__ import annotations

import math

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gpool.core.model import SECOND, Instant
from gpool.core.permissions import Action
from gpool.server.actions import policy, receipt_keys
from gpool.server.alerts.monitor import PoolMonitor
from gpool.server.alerts.rules import RULES, RUNBOOK, AlertRule
from gpool.server.api.callers import is_draining, server_of, user_of
from gpool.server.api.endpoints import EndpointRouter, SuccessReply
from gpool.server.api.messages import Cursor, LargeLimit, Wait, answer, document_of, once_of, tagged
from gpool.server.api.routes import nodes, tasks
from gpool.server.identity.throttle import RouteClass
from gpool.server.overload.admission import LoadClass
from gpool.server.server import VERSION
from gpool.wallet.receipt_keys import KeyHistory
from gpool.wire.admin import (
    AlertDocument,
    AlertPage,
    GpuModelPage,
    ReadOnlyDocument,
    ReadOnlyRequest,
)
from gpool.wire.documents import HealthDocument, TaskDocument, TaskRequest, instant_to_datetime
from gpool.wire.identity import JwksDocument, ReceiptKeysDocument
from gpool.wire.nodes import GpuPage, NodeRequest

routes = EndpointRouter("server")


@routes.get("/healthz", Action.HEALTH_READ, load=LoadClass.VITAL, returns=HealthDocument)
async def get_health(request: Request) -> Response:  # noqa: ARG001 - the signature of handlers
    """Answer 200 while the process runs."""
    return answer(HealthDocument(status="ok", version=VERSION))


@routes.get(
    "/readyz",
    Action.HEALTH_READ,
    load=LoadClass.VITAL,
    returns=(
        SuccessReply(HealthDocument),
        SuccessReply(
            HealthDocument, 503, "The server starts or stops, or its database does not answer"
        ),
    ),
)
async def get_readiness(request: Request) -> Response:
    """Answer 200 while the server accepts tasks: it has started, and its database answers within 2 s."""
    if is_draining(request):
        return answer(HealthDocument(status="stopping", version=VERSION), 503)
    if not getattr(request.app.state, "ready", False):
        return answer(HealthDocument(status="starting", version=VERSION), 503)
    problem = await request.app.state.readiness.problem()
    if problem:
        down = HealthDocument(status="unavailable", version=VERSION, detail=problem)
        return answer(down, 503)
    return answer(HealthDocument(status="ok", version=VERSION))


@routes.get(
    "/metrics",
    Action.METRICS_READ,
    load=LoadClass.VITAL,
    returns=SuccessReply(description="Prometheus text format", media_types=("text/plain",)),
)
async def get_metrics(request: Request) -> Response:
    """Read the metrics of the server and its GPUs."""
    await user_of(request)
    page = await server_of(request).metrics.rendered()
    return Response(page, media_type="text/plain; version=0.0.4")


@routes.get("/v1/admin/alerts", Action.METRICS_READ, load=LoadClass.VITAL, returns=AlertPage)
async def list_alerts(request: Request) -> Response:
    """Read the state of the alert rules, as this server evaluates them over its own metrics every 15 s."""
    await user_of(request)
    server = server_of(request)
    monitor = server.monitor
    at = monitor.evaluated_at
    return answer(
        AlertPage(
            items=[each for rule in RULES for each in _alerts(rule, monitor, server.now)],
            evaluated_at=None if at is None else instant_to_datetime(at),
        )
    )


@routes.get("/v1/admin/gpu-models", Action.POLICY_READ, returns=GpuModelPage)
async def list_gpu_models(request: Request) -> Response:
    """List the reference table of GPU verification, and models of lent GPUs that it lacks."""
    await user_of(request)
    return answer(policy.gpu_models(server_of(request)))


def _alerts(rule: AlertRule, monitor: PoolMonitor, now: Instant) -> list[AlertDocument]:
    quiet = AlertDocument(
        name=rule.name,
        state="quiet" if rule.is_own and monitor.evaluated_at is not None else "unknown",
        severity=rule.severity.value,
        summary=rule.summary,
        runbook=f"{RUNBOOK}#{rule.runbook}",
        condition=rule.condition.promql(),
    )
    found = [alert for alert in monitor.alerts.active if alert.rule is rule]
    newest = monitor.alerts.evaluated_s
    return [
        quiet.model_copy(
            update={
                "state": "firing" if alert.is_firing else "pending",
                "labels": dict(alert.labels),
                "value": alert.value if math.isfinite(alert.value) else None,
                "since": instant_to_datetime(
                    Instant(round(now - (newest - alert.since_s) * SECOND))
                ),
            }
        )
        for alert in found
    ] or [quiet]


@routes.get("/v1/admin/read-only", Action.POLICY_READ, returns=ReadOnlyDocument)
async def get_read_only(request: Request) -> Response:
    """Read the pool's read-only mode."""
    await user_of(request)
    return answer(ReadOnlyDocument(reason=server_of(request).read_only.reason))


@routes.put(
    "/v1/admin/read-only", Action.READ_ONLY_SET, body=ReadOnlyRequest, returns=ReadOnlyDocument
)
async def set_read_only(request: Request) -> Response:
    """Begin the pool's read-only mode with a reason, or end it without one."""
    user = await user_of(request)
    wanted, once = await document_of(request, ReadOnlyRequest)
    found = await policy.set_read_only(server_of(request), user, wanted.reason, once)
    return answer(ReadOnlyDocument(reason=found))


@routes.get("/.well-known/jwks.json", Action.PUBLIC_KEYS_READ, returns=JwksDocument)
async def get_jwks(request: Request) -> Response:
    """Read the public keys with which access tokens are verified."""
    server = server_of(request)
    document = JwksDocument.model_validate({"keys": server.identity.signing.jwks(server.now)})
    return tagged(request, document)


@routes.get(
    "/v1/receipt-keys",
    Action.PUBLIC_KEYS_READ,
    returns=ReceiptKeysDocument,
    problems=(404,),
)
async def get_receipt_keys(request: Request) -> Response:
    """Read the history of the keys with which receipts are verified."""
    return tagged(request, _receipt_keys(await receipt_keys.history(server_of(request))))


@routes.post(
    "/v1/admin/receipt-keys/rotate",
    Action.KEYS_ROTATE,
    returns=ReceiptKeysDocument,
    problems=(409,),
)
async def rotate_receipt_key(request: Request) -> Response:
    """Replace the key that signs receipts, or create the first one. Receipts of older keys stay valid."""
    user = await user_of(request)
    found = await receipt_keys.rotate(server_of(request), user, once_of(request))
    return answer(_receipt_keys(found))


def _receipt_keys(history: KeyHistory) -> ReceiptKeysDocument:
    return ReceiptKeysDocument.model_validate_json(history.to_bytes())


@routes.get("/openapi.json", Action.SCHEMA_READ, returns=SuccessReply(), include_in_schema=False)
async def get_openapi(request: Request) -> Response:
    """Read the OpenAPI document."""
    return JSONResponse(request.app.openapi())


alias_routes = EndpointRouter("aliases")


@alias_routes.post(
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


@alias_routes.get("/task_status", Action.TASK_READ, returns=TaskDocument, problems=(400,))
async def task_status(request: Request, id: str = "", wait: Wait = 0) -> Response:
    """Alias of `GET /v1/tasks/{id}`."""
    return await tasks.get_task(request, id=id, wait=wait)


@alias_routes.get("/resources", Action.GPUS_LIST, returns=GpuPage)
async def get_resources(
    request: Request, limit: LargeLimit = 1000, cursor: Cursor = None
) -> Response:
    """Alias of `GET /v1/resources`."""
    return await nodes.list_resources(request, limit=limit, cursor=cursor)


@alias_routes.post(
    "/register_gpu",
    *nodes.JOIN_ACTIONS,
    rate=RouteClass.SIGN_IN,
    body=NodeRequest,
    returns=nodes.JOINED,
)
async def register_gpu(request: Request) -> Response:
    """Alias of `POST /v1/resources`."""
    return await nodes.join_node(request)
