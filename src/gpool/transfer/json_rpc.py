"""JSON-RPC of an Ethereum node, for commands that a user runs with an address of their choice. Not for the server."""

from __future__ import annotations

import re
from threading import Event
from types import TracebackType
from typing import Any, NoReturn, Self

import httpx2

from gpool.core.errors import Conflict, Unreachable

TIMEOUT_S = 30.0
POLL_S = 0.5
MINED_S = 180.0
"""How long a transaction may take to be mined before the command gives up waiting for it."""
_HEX = re.compile(r"0x((?:[0-9a-fA-F]{2})*)")


class CallReverted(Conflict):
    """Refusal of a contract. `data`: what it reverted with."""

    def __init__(self, detail: str, data: bytes) -> None:
        super().__init__(detail)
        self.data = data


class EthereumNode:
    def __init__(self, url: str) -> None:
        self._url = url
        self._http = httpx2.Client(timeout=TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._http.close()

    def call(self, method: str, *params: Any) -> Any:
        """Result of one call. `CallReverted` if a contract refused it, `Unreachable` if the node did not answer."""
        request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        try:
            answer = self._http.post(self._url, json=request)
            document = answer.json()
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as exc:
            raise Unreachable(f"the Ethereum node at {self._url} does not answer: {exc}") from exc
        if not isinstance(document, dict) or not ("result" in document or "error" in document):
            raise Unreachable(f"{self._url} does not speak JSON-RPC (HTTP {answer.status_code})")
        if "error" in document:
            _refuse(method, document["error"])
        return document["result"]

    def number(self, method: str, *params: Any) -> int:
        return int(self.call(method, *params), 16)

    def mined(self, transaction: str) -> dict[str, Any]:
        """Wait until a transaction is mined and return its receipt; `Conflict` after three minutes."""
        pause = Event()
        for _ in range(int(MINED_S / POLL_S)):
            receipt = self.call("eth_getTransactionReceipt", transaction)
            if receipt is not None:
                return dict(receipt)
            pause.wait(POLL_S)
        raise Conflict(f"{transaction} was sent, but not mined within {MINED_S:.0f} s")


def _refuse(method: str, error: Any) -> NoReturn:
    fields = error if isinstance(error, dict) else {}
    detail = f"the Ethereum node refused {method}: {str(fields.get('message', error))[:200]}"
    found = _HEX.fullmatch(str(fields.get("data")))
    raise CallReverted(detail, bytes.fromhex(found[1])) if found else Conflict(detail)
