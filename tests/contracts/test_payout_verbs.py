"""`gpool payout` from a table of amounts to tokens in a wallet, on a real EVM."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gpool.cli.main import cli
from gpool.wallet import signing
from gpool.wallet.signing import WalletKey
from tests.tools.chain import Deployed, LocalChain

DELAY_S = 3600
ROLES = ("publisher", "guardian", "stranger")
ALICE, BOB = (signing.from_bytes(bytes([number]) * 20) for number in (1, 2))


def wallet(role: str) -> WalletKey:
    return WalletKey(hashlib.sha256(role.encode()).digest())


class PoolFiles:
    """Files and contracts of one pool, in one folder; every role has a key file and ether."""

    def __init__(self, chain: LocalChain, folder: Path) -> None:
        self.chain, self.folder = chain, folder
        for role in ROLES:
            file = folder / f"{role}.key"
            with open(file, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as opened:
                opened.write(wallet(role).secret.hex())
            chain.rpc("anvil_setBalance", wallet(role).address, hex(10**18))
        self.token = chain.deploy("TestToken")
        kinds = ("address", "address", "address", "uint64")
        roles = (wallet("publisher").address, wallet("guardian").address)
        found = chain.deploy("Distributor", kinds, (self.token.address, *roles, DELAY_S)).address
        contract = signing.from_bytes(bytes.fromhex(found[2:]))
        self.distributor = Deployed(chain, contract)
        self.token.send(chain.accounts[0], "mint(address,uint256)", contract, 10**9)

    def payout(self, *args: str) -> Result:
        return CliRunner().invoke(cli, ["payout", *args])

    def built(self, period: int, amounts: dict[str, int], *more: str) -> str:
        table = self.folder / f"amounts-{period}.csv"
        rows = "".join(f"{account},{amount}\n" for account, amount in amounts.items())
        table.write_text(f"account,cumulative\n{rows}")
        file = str(self.folder / f"payout-{period}.json")
        at = ("--chain-id", "31337", "--contract", self.distributor.address)
        options = ("--pool", "p-1", "--period", str(period), *at, "-o", file)
        done = self.payout("build", str(table), *options, *more)
        assert done.exit_code == 0, done.output
        return file

    def sent(self, role: str, *args: str) -> Result:
        key = str(self.folder / f"{role}.key")
        return self.payout(*args, "--rpc", self.chain.url, "--wallet-key", key, "--json")

    def balance(self, account: str) -> int:
        return self.token.number("balanceOf(address)", account)


@pytest.fixture
def files(chain: LocalChain, tmp_path: Path) -> Iterator[PoolFiles]:
    made = PoolFiles(chain, tmp_path)
    chain.rpc("evm_setAutomine", True)
    yield made
    chain.rpc("evm_setAutomine", False)


def answer(done: Result) -> dict[str, Any]:
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_claim_goes_from_a_table_of_amounts_to_the_wallet(files: PoolFiles) -> None:
    first = files.built(1, {ALICE: 500, BOB: 70})
    assert answer(files.sent("publisher", "publish", first))["gas"] > 21_000
    early = files.sent("stranger", "activate", first)
    assert (early.exit_code, early.stderr.splitlines()[-1]) == (
        1,
        "gpool: the delay of the waiting root is not over",
    )
    files.chain.pass_time(DELAY_S)
    answer(files.sent("stranger", "activate", first))
    answer(files.sent("stranger", "claim", first, ALICE))
    assert (files.balance(ALICE), files.balance(BOB)) == (500, 0)

    second = files.built(2, {ALICE: 800, BOB: 90}, "--previous", first)
    assert (
        answer(files.payout("verify", second, "--previous", first, "--json"))["total_due"] == "320"
    )
    answer(files.sent("publisher", "publish", second))
    too_new = files.sent("stranger", "claim", second, BOB)
    assert "active root is not that of this payout file" in too_new.stderr
    files.chain.pass_time(DELAY_S)
    answer(files.sent("stranger", "activate", second))
    for account in (ALICE, BOB.lower()):  # as pasted, without capitals
        answer(files.sent("stranger", "claim", second, account))
    assert (files.balance(ALICE), files.balance(BOB)) == (800, 90)


def test_the_guardian_stops_what_a_stranger_cannot(files: PoolFiles) -> None:
    file = files.built(1, {ALICE: 500})
    refused = files.sent("stranger", "publish", file)
    assert (refused.exit_code, "neither the publisher's" in refused.stderr) == (1, True)
    answer(files.sent("publisher", "publish", file))
    assert files.sent("stranger", "stop", file).exit_code == 1
    answer(files.sent("guardian", "stop", file))
    files.chain.pass_time(DELAY_S)
    gone = files.sent("stranger", "activate", file)
    assert "no root is waiting" in gone.stderr


def test_a_printed_call_is_what_any_wallet_can_send(files: PoolFiles) -> None:
    file = files.built(1, {ALICE: 500})
    answer(files.sent("publisher", "publish", file))
    files.chain.pass_time(DELAY_S)
    answer(files.sent("stranger", "activate", file))
    files.chain.rpc("evm_setAutomine", False)
    call = answer(files.payout("claim", file, ALICE, "--json"))
    assert call.pop("chain_id") == 31337
    assert files.chain.send(call | {"from": files.chain.accounts[5]})["status"] == "0x1"
    assert files.balance(ALICE) == 500


def test_a_payout_of_another_chain_is_not_sent(files: PoolFiles) -> None:
    table = files.folder / "amounts.csv"
    table.write_text(f"account,cumulative\n{ALICE},5\n")
    file = str(files.folder / "other.json")
    at = ("--chain-id", "1", "--contract", files.distributor.address)
    assert (
        files.payout(
            "build", str(table), "--pool", "p-1", "--period", "1", *at, "-o", file
        ).exit_code
        == 0
    )
    done = files.sent("publisher", "publish", file)
    assert done.exit_code == 1
    assert "the node is on chain 31337, the payout on chain 1" in done.stderr
