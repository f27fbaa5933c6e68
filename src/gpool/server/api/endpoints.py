"""Declaration of REST routes: one decorator names a route's actions, rate class and documents; the OpenAPI document is
made from it.

Permission table, rate classes, OpenAPI document and test matrix derive from the `Endpoint` values collected here.
Depends on core.permissions and FastAPI; knows no route and no business rule.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from gpool.core.errors import BY_CODE
from gpool.core.permissions import RULES, AccessRelation, Action, ObjectKind
from gpool.server.api.problems import MEDIA_TYPE
from gpool.server.identity.throttle import RouteClass
from gpool.server.overload.admission import LoadClass
from gpool.server.read_only import ReadOnlyMode
from gpool.transfer.node_proofs import PROOF_HEADER
from gpool.wire.documents import Problem

H = TypeVar("H", bound=Callable[..., Awaitable[Any]])
DECLARED = "gpool.endpoint"
"""Key of the request scope under which the matched `Endpoint` is kept."""

WEBSOCKET = "WEBSOCKET"
JSON = "application/json"
OCTETS = "application/octet-stream"
_RATES = {"GET": RouteClass.READ, "HEAD": RouteClass.READ}


@dataclass(frozen=True, slots=True)
class SuccessReply:
    document: Any = None
    status: int = 200
    description: str = "Success"
    media_types: tuple[str, ...] = ()

    @property
    def openapi(self) -> dict[str, Any]:
        response: dict[str, Any] = {"description": self.description}
        if self.document is not None:
            response["model"] = self.document
        if self.media_types:
            response["content"] = {kind: {"schema": _schema(kind)} for kind in self.media_types}
        return response


def _schema(media_type: str) -> dict[str, str]:
    return {"type": "string"} | ({"format": "binary"} if media_type == OCTETS else {})


NO_CONTENT = SuccessReply(status=204, description="Done; no content")


def created(document: type[BaseModel], description: str = "Created") -> SuccessReply:
    return SuccessReply(document, 201, description)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path. With several `actions`, each request asks about exactly one of them."""

    method: str
    path: str
    name: str  # the operation id, unique among all endpoints
    actions: tuple[Action, ...]
    rate: RouteClass
    body: type[BaseModel] | type[bytes] | None = None
    is_body_required: bool = True
    problems: tuple[int, ...] = ()  # statuses beyond those that `problem_statuses` derives
    load: LoadClass = LoadClass.OTHER  # when it is refused in an overload
    is_page: bool = False  # for browsers: HTML, cookies; not in the OpenAPI document

    @property
    def is_open(self) -> bool:
        return all(AccessRelation.ANYONE in RULES[action].may for action in self.actions)

    @property
    def security(self) -> list[dict[str, list[str]]]:
        found: list[dict[str, list[str]]] = []
        for rule in (RULES[action] for action in self.actions):
            if AccessRelation.ANYONE in rule.may:
                found.append({})
            elif rule.may != {AccessRelation.HOLDER}:
                found += [{"key": [rule.scope.value]}] if rule.scope else []
                found.append({"session": []})
        return [each for place, each in enumerate(found) if each not in found[:place]]

    @property
    def problem_statuses(self) -> list[int]:
        changes = any(RULES[action].changes for action in self.actions)
        found = {429, *self.problems}
        if changes or "{" in self.path:
            found.add(400)
        if not self.is_open:
            found |= {401, 403}
        if any(RULES[action].kind is not ObjectKind.SERVER for action in self.actions):
            found.add(404)
        if changes and not self.is_open:
            found.add(409)  # of the object's state, or of a reused Idempotency-Key
        if self.body is not None:
            found |= {400, 413}
        return sorted(found)


class EndpointRouter:
    """Routes of one subject. Its decorators register a handler with FastAPI and return it unchanged in type.

    A handler takes the request first; its scope holds the `Endpoint`, so `callers.user_of(request)` knows the action.
    """

    def __init__(self, tag: str) -> None:
        self.router = APIRouter(tags=[tag])
        self.endpoints: list[Endpoint] = []

    def get(self, path: str, *actions: Action, **declared: Any) -> Callable[[H], H]:
        return self._route("GET", path, actions, **declared)

    def head(self, path: str, *actions: Action, **declared: Any) -> Callable[[H], H]:
        return self._route("HEAD", path, actions, **declared)

    def post(self, path: str, *actions: Action, **declared: Any) -> Callable[[H], H]:
        return self._route("POST", path, actions, **declared)

    def put(self, path: str, *actions: Action, **declared: Any) -> Callable[[H], H]:
        return self._route("PUT", path, actions, **declared)

    def patch(self, path: str, *actions: Action, **declared: Any) -> Callable[[H], H]:
        return self._route("PATCH", path, actions, **declared)

    def delete(self, path: str, *actions: Action, **declared: Any) -> Callable[[H], H]:
        return self._route("DELETE", path, actions, **declared)

    def websocket(self, path: str, *actions: Action, rate: RouteClass) -> Callable[[H], H]:
        def declare(handler: H) -> H:
            vital = Endpoint(WEBSOCKET, path, handler.__name__, actions, rate, load=LoadClass.VITAL)
            self.endpoints.append(vital)
            self.router.add_api_websocket_route(path, handler)
            return handler

        return declare

    def _route(
        self,
        method: str,
        path: str,
        actions: tuple[Action, ...],
        *,
        returns: type[BaseModel] | SuccessReply | Iterable[SuccessReply],
        rate: RouteClass | None = None,
        body: type[BaseModel] | type[bytes] | None = None,
        is_body_required: bool = True,
        problems: tuple[int, ...] = (),
        load: LoadClass | None = None,
        include_in_schema: bool = True,
        is_page: bool = False,
    ) -> Callable[[H], H]:
        if isinstance(returns, type):
            returns = SuccessReply(returns)
        replies = (returns,) if isinstance(returns, SuccessReply) else tuple(returns)

        counted = rate or _RATES.get(method, RouteClass.CHANGE)

        def declare(handler: H) -> H:
            endpoint = Endpoint(
                method,
                path,
                handler.__name__,
                actions,
                counted,
                body,
                is_body_required,
                problems,
                load or _load_class(counted, replies[0].document),
                is_page,
            )

            @wraps(handler)
            async def declared(request: Request, **parameters: Any) -> Any:
                request.scope[DECLARED] = endpoint
                return await self._respond(handler, request, parameters)

            self.endpoints.append(endpoint)
            self.router.add_api_route(
                path,
                declared,
                methods=[method],
                operation_id=endpoint.name,
                status_code=replies[0].status,
                responses={reply.status: reply.openapi for reply in replies},
                response_class=Response,
                include_in_schema=include_in_schema,
            )
            return cast("H", declared)

        return declare

    async def _respond(
        self, handler: Callable[..., Awaitable[Any]], request: Request, parameters: dict[str, Any]
    ) -> Any:
        endpoint: Endpoint = request.scope[DECLARED]
        mode: ReadOnlyMode = request.app.state.server.read_only
        if mode.is_on:
            mode.check(endpoint.actions, by_node=PROOF_HEADER in request.headers)
        return await handler(request, **parameters)


def _load_class(rate: RouteClass, document: Any) -> LoadClass:
    if rate is RouteClass.SUBMIT:
        return LoadClass.SUBMISSION
    is_page = rate is RouteClass.READ and "items" in getattr(document, "model_fields", ())
    return LoadClass.LISTING if is_page else LoadClass.OTHER


def action_of(connection: HTTPConnection, action: Action | None = None) -> Action:
    endpoint: Endpoint = connection.scope[DECLARED]
    if action is None:
        assert len(endpoint.actions) == 1, f"{endpoint.name} declares several actions"
        return endpoint.actions[0]
    assert action in endpoint.actions, f"{endpoint.name} does not declare {action}"
    return action


_SCHEMA = "#/components/schemas/{model}"
_TITLES = {error.status: error.title for error in reversed(list(BY_CODE.values()))} | {
    416: "Range not satisfiable"
}
_SECURITY_SCHEMES = {
    "key": {
        "type": "http",
        "scheme": "bearer",
        "description": "API key (gpk_…); each operation names the scope the key needs",
    },
    "session": {
        "type": "http",
        "scheme": "bearer",
        "bearerFormat": "JWT",
        "description": "Access token of a sign-in (`POST /v1/auth/password`, `/wallet`, `/oidc/finish`)",
    },
}


def describe(app: FastAPI, version: str, endpoints: Sequence[Endpoint]) -> None:
    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, version, endpoints)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI, version: str, endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    document = get_openapi(
        title="gpool",
        version=version,
        description="Pool GPUs: lend idle ones, run code on everyone's.",
        routes=app.routes,
    )
    bodies = {each.body for each in endpoints if each.body is not None and each.body is not bytes}
    models = [(model, "validation") for model in (*_sorted(bodies), Problem)]
    _, definitions = models_json_schema(models, ref_template=_SCHEMA)  # type: ignore[arg-type]
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    schemas.update(definitions["$defs"])
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    components["securitySchemes"] = _SECURITY_SCHEMES
    components["responses"] = {}
    document["security"] = [{"key": []}, {"session": []}]
    for endpoint in endpoints:
        operation = document["paths"].get(endpoint.path, {}).get(endpoint.method.lower())
        if operation is not None:  # not in the document: WebSockets, the document itself
            _complete(operation, endpoint, components["responses"])
    return document


def _sorted(models: set[Any]) -> list[type[BaseModel]]:
    return sorted(models, key=lambda model: model.__name__)


def _complete(operation: dict[str, Any], endpoint: Endpoint, problems: dict[str, Any]) -> None:
    operation["security"] = endpoint.security
    if endpoint.body is not None:
        operation["requestBody"] = _body(endpoint)
    responses = operation["responses"]
    responses.pop("422", None)  # FastAPI's own; invalid input is a 400 here
    for status in endpoint.problem_statuses:
        if str(status) not in responses:
            responses[str(status)] = _problem(problems, str(status), _TITLES[status])
    responses["default"] = _problem(problems, "default", "Any other error")


def _problem(problems: dict[str, Any], status: str, title: str) -> dict[str, str]:
    name = f"Problem{status.capitalize()}"
    schema = {"$ref": _SCHEMA.format(model=Problem.__name__)}
    problems[name] = {"description": title, "content": {MEDIA_TYPE: {"schema": schema}}}
    return {"$ref": f"#/components/responses/{name}"}


def _body(endpoint: Endpoint) -> dict[str, Any]:
    if endpoint.body is bytes:
        content: dict[str, Any] = {OCTETS: {"schema": {"type": "string", "format": "binary"}}}
    else:
        assert endpoint.body is not None
        schema = {"$ref": _SCHEMA.format(model=endpoint.body.__name__)}
        content = {JSON: {"schema": schema}}
    return {"required": endpoint.is_body_required, "content": content}
