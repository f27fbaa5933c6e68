"""Loop of the leader that credits chain transfers. It waits longer after each failure; nothing waits for it."""

from __future__ import annotations

from gpool.core.errors import Unreachable
from gpool.core.model import Instant
from gpool.observability.logs import get_logger
from gpool.server.deposits.chain import BlockRange, DepositChain, range_after
from gpool.server.deposits.settings import DepositTerms
from gpool.server.server import Server
from gpool.server.store.generated_rows import DepositCursorsRecord
from gpool.server.store.operations import deposits as operations
from gpool.server.store.operations.deposits import (
    ChainDeposit,
    DepositSource,
    ScannedBlocks,
)
from gpool.server.wakeups import Wake

EVERY_S = 10.0
LONGEST_S = 300.0
"""Longest pause after failures in a row."""
MOST_BLOCKS = 1000
"""Blocks of one call; halved when the node refuses, down to one, and then raised slowly."""
MOST_CALLS = 20
"""Ranges of one run."""
ROWS = 500
"""Deposits of one write, or all of one block."""

log = get_logger(__name__)


class CreditDeposits:
    name = "deposits"

    def __init__(self, server: Server, terms: DepositTerms) -> None:
        self.wake = Wake()
        self.every_s = EVERY_S
        self._server, self._terms = server, terms
        self._source = DepositSource(terms.chain_id, terms.token, terms.address)
        self._chain = DepositChain(server.identity.outbound, terms)
        self._most_blocks = MOST_BLOCKS

    async def run_once(self, now: Instant) -> None:
        server = self._server
        await server.write(operations.open_cursor(self._source, self._terms.from_block - 1, now))
        while await server.store.read(operations.has_bound(self._source)):
            ids = list(server.ids.take(ROWS))
            if not await server.write(operations.credit_bound(self._source, ids, now)):
                break
        try:
            await self._scan(now)
        except Unreachable as error:
            self.every_s = min(2 * self.every_s, LONGEST_S)
            log.warning("deposits not read", why=error.detail, again_in_s=self.every_s)
        else:
            self.every_s = EVERY_S

    async def _scan(self, now: Instant) -> None:
        await self._chain.check()
        head = await self._chain.head()
        for _ in range(MOST_CALLS):
            cursor = await self._server.store.read(operations.cursor(self._source))
            assert cursor is not None, "it was opened above"
            if cursor.halted_at is not None or not await self._is_unchanged(cursor, head, now):
                log.error(
                    "deposits are not credited: the chain has changed below the confirmations; "
                    "see gpool admin ledger deposits",
                    block=cursor.block,
                )
                return
            within = range_after(cursor.block, head, self._terms.confirmations, self._most_blocks)
            if within is None:
                return
            await self._read(cursor, within, now)

    async def _is_unchanged(self, cursor: DepositCursorsRecord, head: int, now: Instant) -> bool:
        """Compare the last scanned block with the chain; a difference is stored, and stops crediting."""
        if not cursor.block_hash:
            return True
        if head < cursor.block:
            raise Unreachable(f"the node is at block {head}, and {cursor.block} was read before")
        found = await self._chain.block_hash(cursor.block)
        if found == cursor.block_hash:
            return True
        why = f"block {cursor.block} was {cursor.block_hash} and is {found}"
        await self._server.write(operations.halt(self._source, cursor.block, why, now))
        return False

    async def _read(self, cursor: DepositCursorsRecord, within: BlockRange, now: Instant) -> None:
        try:
            found = await self._chain.deposits(within)
        except Unreachable:
            if within.first == within.last:
                raise
            # too many blocks or logs for this node: the next call of this run asks for fewer
            self._most_blocks = (within.last - within.first + 1) // 2
            return
        self._most_blocks = min(self._most_blocks + self._most_blocks // 8 + 1, MOST_BLOCKS)
        last, rows = first_blocks(found, within, ROWS)
        block_hash = await self._chain.block_hash(last)
        if any(each.block == last and each.block_hash != block_hash for each in rows):
            raise Unreachable(f"the chain changed at block {last} while it was read")
        ids = list(self._server.ids.take(len(rows)))
        scanned = ScannedBlocks(self._source, cursor.block, last, block_hash, rows, ids)
        await self._server.write(operations.record_scanned(scanned, now))


def first_blocks(
    found: list[ChainDeposit], within: BlockRange, most: int
) -> tuple[int, list[ChainDeposit]]:
    """Whole blocks from the first one with at most `most` deposits, or those of one block; the last block, deposits."""
    if len(found) <= most:
        return within.last, found
    last = found[most].block - 1
    if last < found[0].block:
        last = found[0].block
    return last, [each for each in found if each.block <= last]
