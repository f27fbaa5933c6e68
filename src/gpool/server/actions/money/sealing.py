"""The loop `ledger`: expires pending transfers, seals transfers into blocks, measures the uncleared funds."""

from __future__ import annotations

from gpool.core.model import Instant
from gpool.server.server import Server
from gpool.server.store.operations.money import accounts, blocks, transfers
from gpool.server.wakeups import Wake

EVERY_S = 10.0
ROWS = 1000
"""Transfers that one write expires, or one block holds at most."""


class SealLedger:
    """Runs in the leader. An idle ledger costs three indexed reads in each interval."""

    name = "ledger"

    def __init__(self, server: Server) -> None:
        self.wake = Wake()
        self.every_s = EVERY_S
        self._server = server

    async def run_once(self, now: Instant) -> None:
        server = self._server
        if await server.store.read(transfers.has_expired(now)):
            while await server.write(transfers.expire_pending(now, ROWS)) >= ROWS:
                pass
        if await server.store.read(blocks.has_unsealed()):
            while await server.write(blocks.seal(now, ROWS)) >= ROWS:
                pass
        found = await server.store.read(accounts.uncleared())
        server.monitor.uncleared.set(found.amount, found.oldest_at)
