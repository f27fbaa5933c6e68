"""How routes are described: bodies that are parsed by hand, problems for every error, one security scheme."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Path
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gpool.wire import identity
from gpool.wire.admin import RotateRequest
from gpool.wire.documents import (
    GpuPatch,
    InviteRequest,
    NodePatch,
    NodeRequest,
    Problem,
    TaskRequest,
)

TASK = Annotated[str, Path(description="A task's id, t-…")]
BATCH = Annotated[str, Path(description="A batch's id, b-…")]
NODE = Annotated[str, Path(description="A node's id, n-…")]
GPU = Annotated[str, Path(description="A GPU's id, g-…, or a node's for its processors")]
SHA256 = Annotated[str, Path(description="SHA-256 in lower-case hexadecimal")]

Responses = dict[int | str, dict[str, Any]]
_REFERENCE = "#/components/schemas/{model}"
_BODIES: tuple[type[BaseModel], ...] = (
    TaskRequest,
    NodeRequest,
    NodePatch,
    GpuPatch,
    InviteRequest,
    RotateRequest,
    identity.UserRequest,
    identity.PasswordSignIn,
    identity.WalletSignIn,
    identity.RefreshRequest,
    identity.SignOutRequest,
    identity.OidcFinish,
    identity.PasswordChange,
    identity.WalletLink,
    identity.WalletUnlink,
    identity.WalletPatch,
    identity.KeyRequest,
    identity.TeamRequest,
    identity.TeamPatch,
    identity.MemberRequest,
    identity.MemberPatch,
    identity.TeamInviteRequest,
    identity.TeamJoin,
    identity.UserPatch,
    identity.UserInviteRequest,
)
OPEN = frozenset(
    {
        "/healthz",
        "/readyz",
        "/.well-known/jwks.json",
        "/v1/auth/password",
        "/v1/auth/wallet/nonce",
        "/v1/auth/wallet",
        "/v1/auth/oidc/start",
        "/v1/auth/oidc/finish",
        "/v1/auth/refresh",
    }
)
"""Paths that nobody has to be signed in for."""


def body(model: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """The description of a JSON body that a route reads itself."""
    schema = {"$ref": _REFERENCE.format(model=model.__name__)}
    return {
        "requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}
    }


def ok(model: Any, description: str = "As asked") -> Responses:
    return {200: {"model": model, "description": description}}


def describe(app: FastAPI, version: str) -> None:
    """Makes `/openapi.json` say what the routes do."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _described(app, version)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _described(app: FastAPI, version: str) -> dict[str, Any]:
    schema = get_openapi(
        title="gpool",
        version=version,
        description="Pool GPUs: lend idle ones, run code on everyone's.",
        routes=app.routes,
    )
    models = [(model, "validation") for model in (*_BODIES, Problem)]
    _, definitions = models_json_schema(models, ref_template=_REFERENCE)  # type: ignore[arg-type]
    components = schema.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    schemas.update(definitions["$defs"])
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    schema["security"] = [{"key": []}]
    wrong = {
        "description": "What was wrong and what to do",
        "content": {
            "application/problem+json": {"schema": {"$ref": _REFERENCE.format(model="Problem")}}
        },
    }
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = wrong
            if path in OPEN or (path, operation.get("operationId", "")[:8]) == (
                "/v1/users",
                "register",
            ):
                operation["security"] = []
    return schema
