"""Answers of a chain's node about deposits: heads, hashes of blocks and `Transfer` logs. The node is not trusted.

`range_after` and `deposit_of` are pure; `DepositChain` asks the node through `server.outbound`.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

from gpool.core.errors import Unreachable
from gpool.server.deposits.settings import DepositTerms
from gpool.server.outbound import Outbound
from gpool.server.store.operations.deposits import ChainDeposit
from gpool.wallet.crypto import keccak256
from gpool.wallet.transactions import selector

TRANSFER: Final = "0x" + keccak256(b"Transfer(address,address,uint256)").hex()
DECIMALS: Final = 6
MAX_LOG_BYTES = 16 * 1024 * 1024
"""Answer with the logs of one block: one log has less than a kilobyte."""
_NUMBER = re.compile(r"0x[0-9a-f]{1,15}")
_WORD = re.compile(r"0x[0-9a-f]{64}")
_ADDRESS_WORD = re.compile(r"0x0{24}([0-9a-f]{40})")


class BlockRange(NamedTuple):
    first: int
    last: int


def range_after(scanned: int, head: int, confirmations: int, most: int) -> BlockRange | None:
    """Next blocks to read, at most `most`, each with `confirmations` blocks after it; None if there are none."""
    last = min(head - confirmations, scanned + most)
    return BlockRange(scanned + 1, last) if last > scanned else None


def deposit_of(log: Any, terms: DepositTerms, within: BlockRange) -> ChainDeposit | None:
    """Deposit that a log describes; None for one that moves nothing. `Unreachable` if it was not asked for."""
    fields = log if isinstance(log, dict) else {}
    topics = fields.get("topics")
    if not isinstance(topics, list) or len(topics) != 3:
        raise _nonsense("a log without three topics")
    signature, sender, receiver = (_matching(_WORD, topic, "topic") for topic in topics)
    token = str(fields.get("address")).lower()
    block = _number(fields.get("blockNumber"))
    if (signature, token) != (TRANSFER, terms.token) or not within.first <= block <= within.last:
        raise _nonsense("a log that was not asked for")
    if fields.get("removed") or _address(receiver) != terms.address:
        raise _nonsense("a log that was removed, or to another address")
    amount = int(_matching(_WORD, fields.get("data"), "amount"), 16)
    found = ChainDeposit(
        _matching(_WORD, fields.get("transactionHash"), "transaction"),
        _number(fields.get("logIndex")),
        block,
        _matching(_WORD, fields.get("blockHash"), "hash of a block"),
        _address(sender),
        amount,
    )
    return None if amount == 0 or found.sender == terms.address else found


class DepositChain:
    """The configured node. Every call raises `Unreachable` if it has no usable answer."""

    def __init__(self, outbound: Outbound, terms: DepositTerms) -> None:
        self._outbound, self._terms = outbound, terms

    async def check(self) -> None:
        """`Unreachable` unless it is the configured chain, and the token has six decimals."""
        chain_id = _number(await self._call("eth_chainId"))
        if chain_id != self._terms.chain_id:
            raise Unreachable(
                f"the node is of chain {chain_id}, and GPOOL_SERVER_CHAIN_ID is {self._terms.chain_id}"
            )
        data = "0x" + selector("decimals()").hex()
        answer = await self._call("eth_call", {"to": self._terms.token, "data": data}, "latest")
        if not (isinstance(answer, str) and _WORD.fullmatch(answer)):
            raise Unreachable(f"there is no token at {self._terms.token}")
        if int(answer, 16) != DECIMALS:
            raise Unreachable(f"the token has {int(answer, 16)} decimals; deposits need {DECIMALS}")

    async def head(self) -> int:
        return _number(await self._call("eth_blockNumber"))

    async def block_hash(self, number: int) -> str:
        block = await self._call("eth_getBlockByNumber", hex(number), False)
        if not isinstance(block, dict) or _number(block.get("number")) != number:
            raise _nonsense(f"no block {number}")
        return _matching(_WORD, block.get("hash"), "hash of a block")

    async def deposits(self, within: BlockRange) -> list[ChainDeposit]:
        """Deposits of these blocks, in the chain's order."""
        receiver = "0x" + self._terms.address[2:].rjust(64, "0")
        wanted = {
            "fromBlock": hex(within.first),
            "toBlock": hex(within.last),
            "address": self._terms.token,
            "topics": [TRANSFER, None, receiver],
        }
        logs = await self._call("eth_getLogs", wanted)
        if not isinstance(logs, list):
            raise _nonsense("no list of logs")
        found = (deposit_of(log, self._terms, within) for log in logs)
        return sorted(
            (each for each in found if each is not None), key=lambda one: (one.block, one.log_index)
        )

    async def _call(self, method: str, *params: Any) -> Any:
        asked = {"jsonrpc": "2.0", "id": 1, "method": method, "params": list(params)}
        answer = await self._outbound.post_json(self._terms.rpc_url, asked, MAX_LOG_BYTES)
        document = answer.json()
        if not isinstance(document, dict) or "result" not in document:
            error = document.get("error") if isinstance(document, dict) else None
            reason = error.get("message") if isinstance(error, dict) else f"HTTP {answer.status}"
            raise Unreachable(f"the node refused {method}: {str(reason)[:200]}")
        return document["result"]


def _number(value: Any) -> int:
    return int(_matching(_NUMBER, value, "number"), 16)


def _address(word: str) -> str:
    return "0x" + _matching(_ADDRESS_WORD, word, "address")[26:]


def _matching(form: re.Pattern[str], value: Any, what: str) -> str:
    text = value.lower() if isinstance(value, str) else ""
    if not form.fullmatch(text):
        raise _nonsense(f"{str(value)[:80]!r} as {what}")
    return text


def _nonsense(what: str) -> Unreachable:
    return Unreachable(f"the node answered with {what}")
