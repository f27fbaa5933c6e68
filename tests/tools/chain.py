"""Local EVM: an anvil process with unlocked accounts, and calls of contracts on it."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
from eth_abi.abi import decode, encode

from gpool.wallet.transactions import selector
from tests.tools.components import CONTRACTS, anvil
from tests.tools.processes import eventually, free_port

GAS = 5_000_000
BATCH = 200
OPTIONS = ("--quiet", "--no-mining", "--disable-block-gas-limit")


@dataclass
class LocalChain:
    """`accounts` are unlocked: the node signs for them. Blocks are mined when asked for."""

    url: str
    http: httpx2.Client = field(repr=False)
    accounts: list[str] = field(default_factory=list)

    def rpc(self, method: str, *params: Any) -> Any:
        return self.batch([(method, params)])[0]["result"]

    def number(self, method: str, *params: Any) -> int:
        return int(self.rpc(method, *params), 16)

    def batch(self, calls: Sequence[tuple[str, Sequence[Any]]]) -> list[dict[str, Any]]:
        """Answers in order, of which some may be errors."""
        found: list[dict[str, Any]] = []
        for start in range(0, len(calls), BATCH):
            part = [
                {"jsonrpc": "2.0", "id": number, "method": method, "params": list(params)}
                for number, (method, params) in enumerate(calls[start : start + BATCH])
            ]
            answers = self.http.post(self.url, json=part).json()
            found += sorted(answers, key=lambda each: int(each["id"]))
        return found

    def deploy(self, name: str, kinds: Sequence[str] = (), values: Sequence[Any] = ()) -> Deployed:
        """Deploy the committed bytecode of a contract."""
        artifact = json.loads((CONTRACTS / f"{name}.json").read_text())
        data = artifact["bytecode"] + encode(kinds, values).hex()
        receipt = self.send({"from": self.accounts[0], "data": data})
        assert receipt["status"] == "0x1"
        return Deployed(self, receipt["contractAddress"])

    def send(self, transaction: dict[str, Any]) -> dict[str, Any]:
        """Receipt of a mined transaction, which may have failed."""
        return self.send_all([transaction])[0]

    def send_all(self, transactions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Receipts of transactions of one account, of which a few hundred are mined in one block."""
        found: list[dict[str, Any]] = []
        nonce = self.number("eth_getTransactionCount", transactions[0]["from"], "latest")
        for start in range(0, len(transactions), BATCH):
            part = [
                {"gas": hex(GAS), "nonce": hex(nonce + start + number)} | each
                for number, each in enumerate(transactions[start : start + BATCH])
            ]
            sent = self.batch([("eth_sendTransaction", (each,)) for each in part])
            self.rpc("evm_mine")
            hashes = [each["result"] for each in sent]
            mined = self.batch([("eth_getTransactionReceipt", (each,)) for each in hashes])
            found += [each["result"] for each in mined]
        return found

    def pass_time(self, seconds: int) -> None:
        self.rpc("evm_increaseTime", seconds)
        self.rpc("evm_mine")


@dataclass(frozen=True)
class Deployed:
    chain: LocalChain
    address: str

    def call(self, signature: str, *values: Any) -> dict[str, Any]:
        """Transaction that calls a function, written as `mint(address,uint256)`."""
        kinds = [kind for kind in signature.partition("(")[2][:-1].split(",") if kind]
        data = selector(signature) + encode(kinds, values)
        return {"to": self.address, "data": "0x" + data.hex()}

    def send(self, by: str, signature: str, *values: Any) -> dict[str, Any]:
        return self.chain.send({"from": by} | self.call(signature, *values))

    def read(self, kinds: Sequence[str], signature: str, *values: Any) -> tuple[Any, ...]:
        answer = self.chain.rpc("eth_call", self.call(signature, *values), "latest")
        return tuple(decode(kinds, bytes.fromhex(answer[2:])))

    def number(self, signature: str, *values: Any) -> int:
        return int(self.read(["uint256"], signature, *values)[0])

    def refusal(self, by: str, signature: str, *values: Any) -> str | None:
        """Selector (hex) with which a call reverts; None if it succeeds."""
        call = {"from": by} | self.call(signature, *values)
        answer = self.chain.batch([("eth_call", (call, "latest"))])[0]
        return str(answer["error"]["data"])[2:10] if "error" in answer else None


@contextmanager
def local_chain() -> Iterator[LocalChain]:
    program = anvil()
    assert program is not None
    port = free_port()
    command = [str(program), "--port", str(port), *OPTIONS]
    with subprocess.Popen(command) as process, httpx2.Client(timeout=60, trust_env=False) as http:
        try:
            chain = LocalChain(f"http://127.0.0.1:{port}", http)
            eventually("anvil listens", lambda: is_listening(port), within_s=30)
            chain.accounts = chain.rpc("eth_accounts")
            yield chain
        finally:
            process.kill()


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
