"""Every route × every object × every asker, from the OpenAPI document: each cell answers what the table says."""

from __future__ import annotations

import pytest

from gpool.core.permissions import Action
from gpool.server.api.routing import ROUTERS
from gpool.server.identity.throttle import RouteClass
from tests.server.identity_routes.matrix import TABLE, expected, rowless
from tests.server.identity_routes.matrix_world import a_pool
from tests.server.server_desk import Desk

pytestmark = pytest.mark.anyio


async def test_every_route_has_a_row(desk: Desk) -> None:
    assert rowless(desk.app.openapi()["paths"]) == set(), "say in matrix.TABLE who gets what there"


def test_every_action_has_a_route() -> None:
    routed = {action for router in ROUTERS for each in router.endpoints for action in each.actions}
    assert set(Action) - routed == set()


async def test_every_cell_answers_what_the_table_says(desk: Desk) -> None:
    """Counts of the address are returned: anonymous requests and sign-ins now count whatever the headers say."""
    pool = await a_pool(desk)
    wrong, cells = [], 0
    for (method, path, variant), row in TABLE.items():
        desk.clock.advance(0.5)  # an address may send 500 unknown keys, and 50 more a second
        for thing in row.objects:
            for name, (asker, _) in pool.askers.items():
                found = await pool.ask(name, (method, path), row, thing)
                for rate in RouteClass:  # two thousand requests in one moment
                    desk.server.guard.return_address(rate, "127.0.0.1")
                cells += 1
                if found != expected(asker, row, thing):
                    wrong.append(
                        (method, path, variant, thing, name, expected(asker, row, thing), found)
                    )
    assert not wrong, "\n".join(map(str, wrong))
    assert cells >= 2000


async def test_a_strangers_object_and_a_missing_one_are_answered_alike(desk: Desk) -> None:
    pool = await a_pool(desk)
    headers = pool.askers["stranger"][1]
    compared = 0
    for (method, path, _), row in TABLE.items():
        for thing in row.objects:
            if thing.endswith(":-") or thing == "-" or "user" in row.may:
                continue
            kind = thing.partition(":")[0]
            theirs, nobodys = pool.parts(thing), pool.parts(f"{kind}:-")
            answers = []
            for parts in (theirs, nobodys):
                body = row.body(parts) if callable(row.body) else row.body
                url = (path + row.query).format(**parts)
                sent = {"content": body} if isinstance(body, bytes) else {"json": body}
                answer = await desk.bare.request(method, url, headers=headers, **sent)
                answers.append((answer.status_code, answer.text, sorted(answer.headers)))
            (status, text, names), (other_status, other_text, other_names) = answers
            for mine, other in zip(theirs.values(), nobodys.values(), strict=True):
                if mine:
                    text = text.replace(mine, other).replace(mine.lower(), other.lower())
            assert (status, text, names) == (other_status, other_text, other_names), (method, path)
            # what only operators may do is refused to all others before anything is looked up
            assert status == (403 if "user" in row.sees else 404)
            compared += 1
    assert compared > 30
