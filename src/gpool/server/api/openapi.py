"""OpenAPI document at /openapi.json: FastAPI's description plus request bodies, problem responses (RFC 9457) and
security requirements of the declared endpoints. Contains no per-route knowledge.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gpool.core.errors import BY_CODE
from gpool.server.api.endpoints import JSON, OCTETS, Endpoint
from gpool.server.api.problems import MEDIA_TYPE
from gpool.wire.documents import Problem

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
