"""The verbs deposit and admin ledger deposits against a real server and a real EVM, with the loops running."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpool.wallet import signing
from gpool.wallet.signing import WalletKey
from tests.cli.test_account_verbs import Terminal
from tests.cli.test_policy_verbs import Operator
from tests.server.server_desk import Live, serving
from tests.tools.chain import LocalChain, local_chain
from tests.tools.processes import PATIENCE_S, eventually

KEY = WalletKey(hashlib.sha256(b"depositor").digest())
POOL = signing.from_bytes(b"\x70" * 20)


@pytest.fixture
def chain(require: Callable[[str], None]) -> Iterator[LocalChain]:
    require("anvil")
    with local_chain() as found:
        yield found


@pytest.fixture
def live(chain: LocalChain, tmp_path: Path) -> Iterator[Live]:
    """The chain has three deposits with two blocks after them: of a wallet, of another one, and a recent one."""
    token, by = chain.deploy("TestToken"), chain.accounts[0]
    for account in (KEY.address, by):
        token.send(by, "mint(address,uint256)", account, 10**9)
    chain.rpc("anvil_setBalance", KEY.address, hex(10**18))
    chain.rpc("anvil_impersonateAccount", KEY.address)
    first = token.send(KEY.address, "transfer(address,uint256)", POOL, 2_500_000)
    token.send(by, "transfer(address,uint256)", POOL, 70)
    token.send(KEY.address, "transfer(address,uint256)", POOL, 1)
    chain.rpc("evm_mine")
    with serving(
        tmp_path / "data",
        chain_id=31337,
        deposit_rpc_url=chain.url,
        deposit_token=signing.from_bytes(bytes.fromhex(token.address[2:])),
        deposit_address=POOL,
        deposit_confirmations=2,
        deposit_from_block=int(first["blockNumber"], 16),
    ) as live:
        yield live


def test_deposits_are_shown_to_their_account_and_open_ones_to_operators(
    live: Live, tmp_path: Path
) -> None:
    file = tmp_path / "wallet.key"
    with open(file, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as opened:
        opened.write(KEY.secret.hex())
    ada, admin = Terminal(live, tmp_path / "ada"), Operator(live, tmp_path / "operator")
    ada("login", "--wallet-key", str(file))
    eventually(
        "the deposit is credited",
        lambda: [one["status"] for one in ada.json("deposit")["items"]] == ["credited"],
        within_s=PATIENCE_S,
        every_s=0.2,
    )
    assert "balance  2.50 credits" in ada("balance").output
    shown = ada("deposit").output
    for words in (
        f"address        {POOL}",
        "chain          31337",
        "confirmations  2",
        f"wallets        {KEY.address}",
        "2.50",
    ):
        assert words in shown
    found = admin.json("admin", "ledger", "deposits")
    assert [(one["amount"], one["status"]) for one in found["items"]] == [("70", "unmatched")]
    first = found["scanned_block"] - 1
    assert "unmatched" in admin("admin", "ledger", "deposits")
    admin("admin", "ledger", "deposits", "--resume", str(first))
    ada("admin", "ledger", "deposits", code=3)
    assert ada.json("balance")["balance_microcredits"] == 2_500_000
