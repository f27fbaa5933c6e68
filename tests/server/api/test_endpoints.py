"""Declared endpoints: every route of the real application is one, and its OpenAPI description is complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.routing import APIRoute, APIWebSocketRoute
from starlette.routing import BaseRoute

from gpool.core.permissions import RULES, Action
from gpool.server.api.endpoints import WEBSOCKET, Endpoint
from gpool.server.api.routing import endpoints
from gpool.server.identity.throttle import RouteClass
from tests.server.server_desk import Desk

PROBLEM = "application/problem+json"


def registered(routes: list[BaseRoute]) -> Iterator[tuple[str, str]]:
    for route in routes:
        if isinstance(route, APIRoute):
            yield from ((method, route.path) for method in route.methods)
        elif isinstance(route, APIWebSocketRoute):
            yield WEBSOCKET, route.path
        elif inner := getattr(getattr(route, "original_router", route), "routes", None):
            yield from registered(inner)
        else:
            raise AssertionError(f"a route of an unknown kind: {route!r}")


@pytest.mark.anyio
async def test_every_route_of_the_application_is_a_declared_endpoint(desk: Desk) -> None:
    found = set(registered(desk.app.routes))
    assert len(found) > 30
    assert found == {(each.method, each.path) for each in endpoints()}


def test_every_endpoint_declares_actions_that_have_rules() -> None:
    assert all(each.actions and set(each.actions) <= set(RULES) for each in endpoints())


def test_reading_endpoints_only_read_and_the_others_only_change() -> None:
    """A POST that declares the rate of reads is a query with a body, such as a quote."""
    for each in endpoints():
        reads = each.method in ("GET", "HEAD") or each.rate is RouteClass.READ
        assert all(RULES[action].changes is not reads for action in each.actions), each.path


def test_operation_ids_are_the_unique_names_of_the_handlers() -> None:
    names = Counter(each.name for each in endpoints())
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.anyio
async def test_every_operation_declares_its_id_problems_and_security(desk: Desk) -> None:
    document = desk.app.openapi()
    declared = {(each.method.lower(), each.path): each for each in endpoints()}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            endpoint = declared[method, path]
            assert operation["operationId"] == endpoint.name
            assert operation["summary"]
            assert operation["description"], f"{endpoint.name} has no docstring"
            assert operation["security"] == endpoint.security
            problems = [
                status
                for status in operation["responses"]
                if _is_problem(document, operation, status)
            ]
            assert {"429", "default"} <= set(problems), (method, path)
            assert endpoint.is_open or {"401", "403"} <= set(problems), (method, path)


def _is_problem(document: dict[str, Any], operation: dict[str, Any], status: str) -> bool:
    response = operation["responses"][status]
    if "$ref" in response:
        response = document["components"]["responses"][response["$ref"].rpartition("/")[2]]
    return PROBLEM in response.get("content", {})


@pytest.mark.anyio
async def test_schema_names_are_short_and_unique(desk: Desk) -> None:
    """FastAPI qualifies the names of two models of one name with their modules."""
    names = desk.app.openapi()["components"]["schemas"]
    assert [name for name in names if "__" in name] == []


def test_security_names_the_scope_of_a_key_or_needs_a_session() -> None:
    def security(*actions: Action) -> list[dict[str, list[str]]]:
        return Endpoint("GET", "/x", "x", actions, RouteClass.READ).security

    assert security(Action.TASK_READ) == [{"key": ["tasks:read"]}, {"session": []}]
    assert security(Action.KEY_MAKE) == [{"session": []}]
    assert security(Action.HEALTH_READ) == [{}]
    assert security(Action.NODE_JOIN, Action.NODE_JOIN_BY_INVITE, Action.NODE_OFFER) == [
        {"key": ["nodes:write"]},
        {"session": []},
        {},
    ]
