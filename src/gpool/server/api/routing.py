"""All REST routes, and their installation into the application with middleware and error handlers."""

from __future__ import annotations

from fastapi import FastAPI

from gpool.server.api import channel, openapi, problems
from gpool.server.api.endpoints import Endpoint
from gpool.server.api.fast_paths import FastPaths
from gpool.server.api.rate_limits import RateLimiter
from gpool.server.api.routes import (
    accounts,
    aliases,
    artifacts,
    nodes,
    operators,
    resources,
    server,
    tasks,
    teams,
    users,
)
from gpool.server.identity.sign_in_guard import Guard

ROUTERS = (
    tasks.routes,
    nodes.routes,
    resources.routes,
    artifacts.routes,
    accounts.routes,
    teams.routes,
    users.routes,
    operators.routes,
    server.routes,
    aliases.routes,
    channel.routes,
)


def endpoints() -> tuple[Endpoint, ...]:
    return tuple(each for router in ROUTERS for each in router.endpoints)


def install(app: FastAPI, guard: Guard, version: str) -> None:
    problems.install(app)
    for each in ROUTERS:
        app.include_router(each.router)
    openapi.describe(app, version, endpoints())
    app.add_middleware(FastPaths)
    app.add_middleware(RateLimiter, guard=guard, endpoints=endpoints())  # runs before FastPaths
