"""Refusals of the channel: only the server's own ones end an agent, and a wish to be asked later is honoured."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from random import Random

import pytest
from websockets.asyncio.server import Request, Response, ServerConnection, serve
from websockets.datastructures import Headers

from gpool.agent.addresses import ServerAddresses
from gpool.agent.channel import AgentChannel, AgentCredentials, NodeIdentity
from gpool.core.errors import Forbidden, NotSignedIn
from gpool.core.model import Instant
from gpool.transfer.node_proofs import NodeKey
from gpool.transfer.requests import Address

pytestmark = pytest.mark.anyio
LATER_S = 1


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def refusal(status: HTTPStatus, body: bytes, **headers: str) -> Response:
    return Response(status.value, status.phrase, Headers(headers), body)


def problem(status: HTTPStatus, code: str) -> Response:
    return refusal(status, json.dumps({"code": code, "detail": "no"}).encode())


PROXY = refusal(HTTPStatus.FORBIDDEN, b"<html>403 Forbidden</html>")
LATER = refusal(HTTPStatus.SERVICE_UNAVAILABLE, b"", **{"Retry-After": str(LATER_S)})


@pytest.mark.parametrize(
    ("last", "raised"),
    [
        (problem(HTTPStatus.UNAUTHORIZED, "not_signed_in"), NotSignedIn),
        (problem(HTTPStatus.FORBIDDEN, "forbidden"), Forbidden),
    ],
)
async def test_a_proxy_s_403_is_retried_and_the_server_s_own_refusal_is_final(
    last: Response, raised: type[Exception]
) -> None:
    answers, asked_at = [PROXY, LATER, last], []

    def answer(_: ServerConnection, __: Request) -> Response:
        asked_at.append(asyncio.get_running_loop().time())
        return answers[len(asked_at) - 1]

    async def nothing(_: ServerConnection) -> None:
        return

    async with serve(nothing, "127.0.0.1", 0, process_request=answer) as server:
        [socket] = server.sockets
        address = Address(f"http://127.0.0.1:{socket.getsockname()[1]}")
        credentials = AgentCredentials(
            NodeKey(b"k" * 32), NodeIdentity("n-1", "pool"), lambda: Instant(0)
        )
        addresses = ServerAddresses([address], Random(1))
        channel = AgentChannel(addresses, credentials, lambda _: None)
        with pytest.raises(raised):
            await channel.run()
    assert len(asked_at) == len(answers)
    assert asked_at[2] - asked_at[1] >= LATER_S
