"""Sixty kinds of forged access token at every route: none is taken for a sign-in."""

from __future__ import annotations

import base64
import json

import pytest

from gpool.server.identity.access_tokens import TokenGrant, TokenType, issue
from gpool.server.identity.throttle import RouteClass
from tests.server.identity.forged_tokens import GRANTS, Bench, forgeries
from tests.server.identity_routes.matrix import TABLE, rowless
from tests.server.identity_routes.matrix_world import a_pool
from tests.server.identity_routes.people_desk import Somebody, bearer, registered
from tests.server.server_desk import Desk

pytestmark = pytest.mark.anyio


class RealBench(Bench):
    """Tokens of a session that is really on: were one of them taken, it would open something."""

    __slots__ = ()
    grant: TokenGrant

    def token(self, type_: TokenType = TokenType.USER) -> str:
        grant = self.grant if type_ is TokenType.USER else GRANTS[type_]
        return issue(self.keys, self.place, grant, "jti-0123456789abcdef", self.now)


async def a_bench(desk: Desk, somebody: Somebody) -> RealBench:
    """A forger's who knows this very server's keys and place."""
    signing = desk.server.identity.signing
    retired = signing.keys.keys[0].private
    await signing.rotate(desk.server.now)
    now = desk.clock.advance(2000)  # until nothing under the first key can be good any more
    await signing.look(now)
    private = signing.keys.signer(now).private
    assert private is not None
    assert retired is not None
    claims = somebody.tokens["access_token"].split(".")[1]
    session = json.loads(base64.urlsafe_b64decode(claims + "=="))["sid"]

    class Ours(RealBench):
        __slots__ = ()
        grant = TokenGrant(TokenType.USER, somebody.id, session=session)

    return Ours(signing.keys, private, retired, signing.place, now)


async def test_no_route_takes_a_forged_token(desk: Desk) -> None:
    """Counts of the address are returned: routes of sign-ins now count it whatever the token is."""
    ada = await registered(desk, "forged")
    pool = await a_pool(desk)
    bench = await a_bench(desk, ada)
    genuine = await desk.bare.get("/v1/me", headers=bearer(bench.token()))
    assert genuine.json()["id"] == ada.id  # the control: what is not bent is taken
    tokens = forgeries(bench)
    assert len(tokens) >= 60
    taken, tried = [], 0
    for (method, path, variant), row in TABLE.items():
        if row.open is not None:
            continue  # nobody has to be signed in there, and nobody is
        parts = pool.parts(row.objects[0])
        url = (path + row.query).format(**parts)
        for name, token in tokens.items():
            answer = await desk.bare.request(method, url, headers=_header(token))
            desk.server.guard.return_address(RouteClass.SIGN_IN, "127.0.0.1")  # all in one moment
            tried += 1
            if answer.status_code != 401:
                taken.append((method, path, variant, name, answer.status_code))
    assert not taken
    assert tried >= 60 * 55
    assert not rowless(desk.app.openapi()["paths"])


def _header(token: str) -> dict[str, str]:
    return bearer(token.encode("ascii", "replace").decode().replace("\n", " ").replace("\r", " "))
