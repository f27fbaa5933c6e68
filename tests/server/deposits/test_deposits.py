"""Deposits from a real EVM to the ledger: confirmations, repeated scans, later bound wallets, reorganizations, restarts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gpool.server.deposits.loop import EVERY_S, LONGEST_S, CreditDeposits
from gpool.server.outbound import Outbound
from gpool.server.store.operations.identity import accounts
from gpool.wallet import signing
from tests.server.identity_routes.people_desk import Somebody, registered
from tests.server.server_desk import Desk, StoppedClock, open_desk
from tests.tools.chain import LocalChain
from tests.tools.processes import free_port

pytestmark = pytest.mark.anyio

CHAIN_ID, CONFIRMATIONS = 31337, 3
POOL = signing.from_bytes(b"\x70" * 20)


class DepositDesk:
    """A server and the token that it takes; every sender has tokens."""

    def __init__(self, chain: LocalChain, data: Path) -> None:
        self.chain, self.data = chain, data
        self.token = chain.deploy("TestToken")
        self.senders = chain.accounts[1:3]
        for sender in self.senders:
            self.token.send(chain.accounts[0], "mint(address,uint256)", sender, 10**18)
        self.settings: dict[str, Any] = {
            "chain_id": CHAIN_ID,
            "deposit_rpc_url": chain.url,
            "deposit_token": signing.from_bytes(bytes.fromhex(self.token.address[2:])),
            "deposit_address": POOL,
            "deposit_confirmations": CONFIRMATIONS,
            "deposit_from_block": chain.number("eth_blockNumber") + 1,
        }
        self.clock = StoppedClock()
        self.desk: Desk
        self.loop: CreditDeposits

    async def open(self, **settings: Any) -> None:
        self.desk = await open_desk(self.data, self.clock, **{**self.settings, **settings})
        used = self.desk.server.settings
        terms = used.deposit_terms(used.chain_id)
        assert terms is not None
        self.loop = CreditDeposits(self.desk.server, terms)

    async def close(self) -> None:
        await self.desk.http.aclose()
        await self.desk.bare.aclose()
        await self.desk.server.identity.close()
        await self.desk.server.store.close()

    async def scan(self) -> None:
        await self.loop.run_once(self.desk.server.now)

    async def person(self, name: str, wallet: str = "") -> Somebody:
        found = await registered(self.desk, name)
        if wallet:
            await self.bind(found, wallet)
        return found

    async def bind(self, who: Somebody, wallet: str) -> None:
        now = self.desk.server.now
        await self.desk.server.write(accounts.link_wallet(who.user, wallet.lower(), now))

    def deposit(self, amount: int, sender: int = 0) -> str:
        """Send tokens in a block of their own; return the transaction."""
        by = self.senders[sender]
        receipt = self.token.send(by, "transfer(address,uint256)", POOL, amount)
        assert receipt["status"] == "0x1"
        return str(receipt["transactionHash"])

    def mine(self, blocks: int = CONFIRMATIONS) -> None:
        self.chain.rpc("anvil_mine", hex(blocks))

    def branch(self, snapshot: str, blocks: int) -> None:
        """Replace all blocks since the snapshot by others."""
        assert self.chain.rpc("evm_revert", snapshot)
        self.chain.rpc("anvil_setBalance", POOL, hex(self.clock.instant + blocks))
        self.chain.pass_time(100)
        self.mine(blocks - 1)

    async def pool(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.desk.get("/v1/admin/deposits")).json()
        return found

    async def is_sound(self) -> bool:
        return bool((await self.desk.get("/v1/admin/ledger/check")).json()["sound"])


@pytest.fixture
async def desk(chain: LocalChain, data: Path) -> AsyncIterator[DepositDesk]:
    made = DepositDesk(chain, data)
    await made.open()
    yield made
    await made.close()


async def balance(who: Somebody) -> int:
    return int((await who.ask("GET", "/v1/ledger")).json()["balance_microcredits"])


async def states(who: Somebody) -> list[tuple[str, str]]:
    items = (await who.ask("GET", "/v1/deposits")).json()["items"]
    return [(one["amount"], one["status"]) for one in items]


async def test_a_deposit_is_credited_after_its_confirmations_and_not_before(
    desk: DepositDesk,
) -> None:
    ada = await desk.person("ada", desk.senders[0])
    sent = desk.deposit(2_500_000)
    desk.mine(CONFIRMATIONS - 1)
    await desk.scan()
    assert (await balance(ada), await states(ada)) == (0, [])
    desk.mine(1)
    await desk.scan()
    assert (await balance(ada), await states(ada)) == (2_500_000, [("2500000", "credited")])
    entry = (await ada.ask("GET", "/v1/ledger")).json()["entries"][0]
    shown = (await ada.ask("GET", "/v1/deposits")).json()
    assert entry["transfer"] == shown["items"][0]["transfer"] == f"deposit:{CHAIN_ID}:{sent}:0"
    assert (shown["address"], shown["confirmations"], shown["halted"]) == (POOL, 3, False)
    assert [wallet.lower() for wallet in shown["wallets"]] == [desk.senders[0].lower()]
    assert await desk.is_sound()


async def test_blocks_that_are_scanned_twice_move_credits_once(desk: DepositDesk) -> None:
    ada = await desk.person("ada", desk.senders[0])
    desk.deposit(1)
    desk.deposit(20)
    desk.mine()
    await desk.scan()
    await desk.scan()
    resumed = {"from_block": desk.settings["deposit_from_block"]}
    answer = await desk.desk.post("/v1/admin/deposits/resume", resumed)
    assert answer.status_code == 200, answer.text
    await desk.scan()
    assert (await balance(ada), await states(ada)) == (21, [("20", "credited"), ("1", "credited")])
    ahead = {"from_block": desk.chain.number("eth_blockNumber") + 10}
    skipped = await desk.desk.post("/v1/admin/deposits/resume", ahead)
    assert (skipped.status_code, "not scanned" in skipped.json()["detail"]) == (409, True)
    assert await desk.is_sound()


async def test_an_unknown_senders_deposit_waits_until_the_wallet_is_bound(
    desk: DepositDesk,
) -> None:
    desk.deposit(70, sender=1)
    desk.mine()
    await desk.scan()
    shown = await desk.pool()
    assert [(one["amount"], one["status"]) for one in shown["items"]] == [("70", "unmatched")]
    assert shown["items"][0]["sender"].lower() == desk.senders[1].lower()
    ada, bob = await desk.person("ada", desk.senders[0]), await desk.person("bob")
    await desk.scan()
    assert await balance(ada) == await balance(bob) == 0
    await desk.bind(bob, desk.senders[1])
    assert await states(bob) == [("70", "unmatched")]
    await desk.scan()
    await desk.scan()
    assert (await balance(bob), await states(bob)) == (70, [("70", "credited")])
    assert (await desk.pool())["items"] == []
    assert await balance(ada) == 0


async def test_other_transfers_are_no_deposits(desk: DepositDesk) -> None:
    ada = await desk.person("ada", desk.senders[0])
    other = desk.chain.deploy("TestToken")
    other.send(desk.chain.accounts[0], "mint(address,uint256)", desk.senders[0], 100)
    other.send(desk.senders[0], "transfer(address,uint256)", POOL, 100)
    desk.token.send(desk.senders[0], "transfer(address,uint256)", desk.senders[1], 100)
    desk.deposit(0)
    desk.mine()
    await desk.scan()
    assert (await balance(ada), await states(ada)) == (0, [])
    assert (await desk.pool())["items"] == []


async def test_more_than_the_ledger_moves_at_once_is_held(desk: DepositDesk) -> None:
    ada = await desk.person("ada", desk.senders[0])
    desk.deposit(10**15 + 1)
    desk.deposit(5)
    desk.mine()
    await desk.scan()
    await desk.scan()
    assert (await balance(ada), await states(ada)) == (
        5,
        [("5", "credited"), (f"{10**15 + 1}", "held")],
    )


async def test_a_deposit_that_a_reorganization_removes_in_time_is_not_credited(
    desk: DepositDesk,
) -> None:
    ada = await desk.person("ada", desk.senders[0])
    desk.mine()
    await desk.scan()
    before = desk.chain.rpc("evm_snapshot")
    desk.deposit(40)
    desk.mine(CONFIRMATIONS - 1)
    await desk.scan()
    desk.branch(before, CONFIRMATIONS)
    desk.deposit(2)
    desk.mine()
    await desk.scan()
    assert (await balance(ada), await states(ada)) == (2, [("2", "credited")])
    assert (await desk.pool())["halted_at"] is None


async def test_a_deeper_reorganization_stops_crediting_until_an_operator_resumes(
    desk: DepositDesk,
) -> None:
    ada = await desk.person("ada", desk.senders[0])
    before = desk.chain.rpc("evm_snapshot")
    desk.deposit(40, sender=1)
    sent = desk.deposit(3)
    desk.mine()
    await desk.scan()
    assert await balance(ada) == 3
    scanned = (await desk.pool())["scanned_block"]
    signed = desk.chain.rpc("eth_getRawTransactionByHash", sent)
    desk.branch(before, 4)
    desk.deposit(1, sender=1)
    dear = {"from": desk.senders[1], "gas": hex(10**6), "gasPrice": hex(10**12)}
    other = desk.token.call("transfer(address,uint256)", POOL, 500)
    desk.chain.rpc("eth_sendTransaction", dear | other)
    desk.chain.rpc(
        "eth_sendRawTransaction", signed
    )  # mined again, now as the second log of a block
    desk.mine(2 * CONFIRMATIONS)
    await desk.scan()
    await desk.bind(ada, desk.senders[1])
    await desk.scan()
    halted = await desk.pool()
    assert (await balance(ada), halted["scanned_block"]) == (3, scanned)
    assert f"block {scanned} was 0x" in halted["why"]
    assert (await ada.ask("GET", "/v1/deposits")).json()["halted"] is True

    resumed = {"from_block": desk.settings["deposit_from_block"]}
    answer = await desk.desk.post("/v1/admin/deposits/resume", resumed)
    assert answer.json()["halted_at"] is None
    newest = (await desk.desk.get("/v1/audit?limit=1")).json()["items"][0]
    assert newest["action"] == "deposit.resume"
    await desk.scan()
    items = (await ada.ask("GET", "/v1/deposits")).json()["items"]
    again = {(one["log_index"], one["status"]) for one in items if one["transaction"] == sent}
    assert again == {(0, "credited"), (1, "held")}
    assert await balance(ada) == 3 + 1 + 500
    assert await desk.is_sound()


async def test_a_restarted_server_continues_where_it_was(desk: DepositDesk) -> None:
    ada = await desk.person("ada", desk.senders[0])
    desk.deposit(1)
    desk.mine()
    await desk.scan()
    await desk.close()
    desk.deposit(20)
    desk.mine()
    await desk.open()
    again = Somebody(desk.desk, ada.id, ada.name, ada.tokens)
    assert await balance(again) == 1
    await desk.scan()
    assert await balance(again) == 21


async def test_a_chain_that_is_away_delays_deposits_and_nothing_else(desk: DepositDesk) -> None:
    ada = await desk.person("ada")
    desk.deposit(7)
    desk.mine()
    await desk.scan()
    await desk.close()
    await desk.open(deposit_rpc_url=f"http://127.0.0.1:{free_port()}")
    again = Somebody(desk.desk, ada.id, ada.name, ada.tokens)
    await desk.bind(again, desk.senders[0])
    await desk.scan()
    assert (await balance(again), desk.loop.every_s) == (7, 2 * EVERY_S)
    for _ in range(6):
        await desk.scan()
    assert desk.loop.every_s == LONGEST_S


async def test_a_node_that_refuses_long_ranges_is_asked_for_shorter_ones(
    desk: DepositDesk,
) -> None:
    ada = await desk.person("ada", desk.senders[0])
    for amount in (1, 20):
        desk.deposit(amount)
        desk.mine(30)
    asked: list[int] = []

    async def limited(request: Request) -> Response:
        """The real chain, for at most ten blocks a call."""
        call = await request.json()
        if call["method"] == "eth_getLogs":
            first, last = (int(call["params"][0][name], 16) for name in ("fromBlock", "toBlock"))
            asked.append(last - first + 1)
            if asked[-1] > 10:
                error = {"code": -32600, "message": "up to a 10 block range"}
                return JSONResponse({"jsonrpc": "2.0", "id": call["id"], "error": error})
        return JSONResponse(desk.chain.http.post(desk.chain.url, json=call).json())

    app = Starlette(routes=[Route("/", limited, methods=["POST"])])
    outbound = Outbound(httpx2.ASGITransport(app=app))
    services = replace(desk.desk.server.identity, outbound=outbound)
    terms = desk.desk.server.settings.deposit_terms(CHAIN_ID)
    assert terms is not None
    loop = CreditDeposits(replace(desk.desk.server, sign_ins=services), terms)
    await loop.run_once(desk.desk.server.now)
    await outbound.close()
    assert asked[0] > 50
    assert (await balance(ada), loop.every_s) == (21, EVERY_S)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"chain_id": 1}, "the node is of chain 31337, and GPOOL_SERVER_CHAIN_ID is 1"),
        ({"deposit_token": signing.from_bytes(b"\1" * 19 + b"\x99")}, "there is no token at"),
    ],
)
async def test_another_chain_or_token_is_refused(
    desk: DepositDesk, settings: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    desk.deposit(7)
    desk.mine()
    await desk.close()
    await desk.open(**settings)
    await desk.scan()
    assert desk.loop.every_s == 2 * EVERY_S
    assert why in str([vars(record) for record in caplog.records])
    assert (await desk.pool())["items"] == []


async def test_a_pool_without_the_settings_takes_no_deposits(data: Path) -> None:
    plain = await open_desk(data, StoppedClock())
    async with plain.http:
        refused = await plain.get("/v1/deposits")
    assert (refused.status_code, "takes no deposits" in refused.json()["detail"]) == (404, True)
    await plain.server.store.close()
