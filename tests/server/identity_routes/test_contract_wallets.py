"""Contract wallets (EIP-1271): the chain is asked over a real socket, by plain JSON-RPC."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gpool.wallet.signing import MAGIC, personal_hash
from tests.server.identity_routes.people_desk import signed, wallet
from tests.server.identity_routes.socket_server import answering
from tests.server.server_desk import Desk, StoppedClock, open_desk

pytestmark = pytest.mark.anyio

YES = "0x" + MAGIC.ljust(32, b"\0").hex()
Chain = Callable[[dict[str, Any]], Any]


@asynccontextmanager
async def a_desk(data: Path, chain: Chain) -> AsyncIterator[tuple[Desk, list[dict[str, Any]]]]:
    asked: list[dict[str, Any]] = []

    def answer(_: str, body: bytes) -> tuple[int, bytes]:
        request = json.loads(body)
        asked.append(request)
        return 200, json.dumps({"jsonrpc": "2.0", "id": request["id"], **chain(request)}).encode()

    async with answering(answer) as url:
        desk = await open_desk(data, StoppedClock(), chain_url=url)
        try:
            yield desk, asked
        finally:
            await desk.server.identity.close()
            await desk.server.store.close()


async def test_a_contract_that_says_yes_signs_in(data: Path) -> None:
    async with a_desk(data, lambda _: {"result": YES}) as (desk, asked):
        message = await signed(desk, wallet(1))
        message["signature"] = "0x" + "ab" * 200  # the contract's own affair
        answer = await desk.bare.post("/v1/auth/wallet", json=message)
        assert answer.status_code == 200, answer.text
        (request,) = asked
        assert request["method"] == "eth_call"
        call, block = request["params"]
        assert (call["to"], block) == (wallet(1).address, "latest")
        data_sent = bytes.fromhex(call["data"][2:])
        assert data_sent[:4] == MAGIC
        assert data_sent[4:36] == personal_hash(message["message"].encode())


@pytest.mark.parametrize(
    "answered",
    [
        {"result": "0x"},
        {"result": "0x" + "00" * 32},
        {"result": YES + "00"},
        {"result": None},
        {"result": 1},
        {"error": {"code": 3, "message": "execution reverted"}},
    ],
)
async def test_whatever_is_not_a_yes_is_a_no(data: Path, answered: dict[str, Any]) -> None:
    async with a_desk(data, lambda _: answered) as (desk, _):
        message = await signed(desk, wallet(1))
        message["signature"] = "0x1234"
        assert (await desk.bare.post("/v1/auth/wallet", json=message)).status_code == 401


async def test_a_nonce_asks_the_chain_once(data: Path) -> None:
    async with a_desk(data, lambda _: {"result": "0x"}) as (desk, asked):
        message = await signed(desk, wallet(1))
        message["signature"] = "0x1234"
        for _ in range(5):
            assert (await desk.bare.post("/v1/auth/wallet", json=message)).status_code == 401
        assert len(asked) == 1


async def test_an_ordinary_wallet_does_not_ask_the_chain(data: Path) -> None:
    async with a_desk(data, lambda _: {"result": "0x"}) as (desk, asked):
        message = await signed(desk, wallet(1))
        assert (await desk.bare.post("/v1/auth/wallet", json=message)).status_code == 200
        assert asked == []


async def test_a_chain_that_is_away_is_said_to_be(data: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # nobody else's either, and nobody listens
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        desk = await open_desk(data, StoppedClock(), chain_url=url)
        message = await signed(desk, wallet(1))
        message["signature"] = "0x1234"
        assert (await desk.bare.post("/v1/auth/wallet", json=message)).status_code == 503
        await desk.server.identity.close()
        await desk.server.store.close()


async def test_without_a_chain_contracts_cannot_sign_in(desk: Desk) -> None:
    message = await signed(desk, wallet(1))
    message["signature"] = "0x1234"
    assert (await desk.bare.post("/v1/auth/wallet", json=message)).status_code == 400
