"""Every route of the real application says which action it is; a new one without a row fails here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi.routing import APIRoute, APIWebSocketRoute
from starlette.routing import BaseRoute

from gpool.core.permissions import RULES
from gpool.server.identity.routes import ROUTES, WEBSOCKET
from tests.server.server_desk import Desk


def doors(routes: list[BaseRoute]) -> Iterator[tuple[str, str]]:
    for route in routes:
        if isinstance(route, APIRoute):
            yield from ((method, route.path) for method in route.methods)
        elif isinstance(route, APIWebSocketRoute):
            yield WEBSOCKET, route.path
        elif inner := getattr(getattr(route, "original_router", route), "routes", None):
            yield from doors(inner)
        else:
            raise AssertionError(f"a route of an unknown kind: {route!r}")


@pytest.mark.anyio
async def test_every_route_has_a_row(desk: Desk) -> None:
    found = set(doors(desk.app.routes))
    assert len(found) > 30
    assert found - set(ROUTES) == set()


@pytest.mark.anyio
async def test_every_row_has_a_route_or_is_of_accounts_teams_and_operators_to_come(
    desk: Desk,
) -> None:
    without = {path for _, path in set(ROUTES) - set(doors(desk.app.routes))}
    rooms = ("users", "auth", "me", "sessions", "keys", "wallets", "teams", "audit", "admin")
    coming = ("/.well-known/", *(f"/v1/{room}" for room in rooms))
    assert [path for path in without if not path.startswith(coming)] == []


def test_every_row_names_actions_that_have_rules() -> None:
    assert all(row.actions and set(row.actions) <= set(RULES) for row in ROUTES.values())


def test_reading_routes_only_read_and_the_others_only_change() -> None:
    for (method, path), row in ROUTES.items():
        reads = method in ("GET", "HEAD")
        assert all(RULES[action].changes is not reads for action in row.actions), path
