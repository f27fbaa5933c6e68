"""Recomputation of the whole ledger from its first entry: chain, Merkle roots, sums, balances, floors, pending transfers.

Reads page by page, each page in one snapshot, so that a serving pool can be verified; changes nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from gpool.core.money import verification as checks
from gpool.core.money.blocks import LedgerBlock
from gpool.core.money.ledger import LedgerAccount
from gpool.core.money.transfers import AccountKind, LedgerAccountId
from gpool.core.money.verification import AccountReplay, LedgerFinding
from gpool.server.store.generated_rows import LedgerAccountsRecord
from gpool.server.store.operations.money import blocks
from gpool.server.store.operations.money.blocks import BookedPage
from gpool.server.store.protocol import Operation

T = TypeVar("T")
PAGE = 500
MOST_FINDINGS = 20
_KINDS = frozenset(kind.value for kind in AccountKind)


class LedgerReader(Protocol):
    """Store, or snapshot of one."""

    async def read(self, operation: Operation[T]) -> T: ...


@dataclass(frozen=True, slots=True)
class BlockAnchor:
    """Hash of a block that somebody kept outside the server."""

    number: int
    hash: str


@dataclass(frozen=True, slots=True)
class LedgerReport:
    """`findings`: at most `MOST_FINDINGS`. `head`: the last sealed block."""

    transfers: int
    entries: int
    unsealed: int
    head: LedgerBlock | None
    findings: tuple[LedgerFinding, ...]

    @property
    def is_sound(self) -> bool:
        return not self.findings


async def verify(
    store: LedgerReader, anchors: Sequence[BlockAnchor] = (), most: int = MOST_FINDINGS
) -> LedgerReport:
    return await _LedgerVerification(store, most).run(anchors)


class _LedgerVerification:
    def __init__(self, store: LedgerReader, most: int) -> None:
        self._store, self._most = store, most
        self._findings: list[LedgerFinding] = []
        self._transfers = self._entries = self._unsealed = 0

    async def run(self, anchors: Sequence[BlockAnchor]) -> LedgerReport:
        head = await self._blocks({each.number: each.hash for each in anchors})
        async for page in self._pages(lambda last: blocks.unsealed(last, PAGE)):
            self._check_page(page)
            self._unsealed += len(page.transfers)
        self._add(await self._store.read(blocks.orphans()))
        await self._accounts()
        await self._pending()
        await self._spending()
        return LedgerReport(
            self._transfers, self._entries, self._unsealed, head, tuple(self._findings)
        )

    def _add(self, found: Iterable[LedgerFinding]) -> None:
        for each in found:
            if len(self._findings) < self._most:
                self._findings.append(each)

    async def _blocks(self, anchors: dict[int, str]) -> LedgerBlock | None:
        before: LedgerBlock | None = None
        while True:
            found = await self._store.read(blocks.block(before.number + 1 if before else 1))
            if found is None:
                break
            block, page = found
            self._check_page(page)
            if not page.unknown:
                self._add(checks.content_findings(block, page.transfers))
            self._add(checks.block_findings(block, before))
            if anchors.pop(block.number, block.hash) != block.hash:
                self._add([LedgerFinding(f"block {block.number}", "it differs from its anchor")])
            before = block
        self._add(
            LedgerFinding(f"block {number}", "an anchor names it, and it is missing")
            for number in sorted(anchors)
        )
        return before

    def _check_page(self, page: BookedPage) -> None:
        self._add(page.unknown)
        for booked in page.transfers:
            pending = page.pending_of(booked.transfer)
            self._add(checks.reference_findings(booked, pending))
            self._add(checks.transfer_findings(booked, pending))
            self._entries += len(booked.entries)
        self._transfers += len(page.transfers)

    async def _pages(
        self, read: Callable[[str], Operation[BookedPage]]
    ) -> AsyncIterator[BookedPage]:
        last = ""
        while (page := await self._store.read(read(last))).last:
            yield page
            last = page.last

    async def _accounts(self) -> None:
        last = 0
        while page := await self._store.read(blocks.accounts(last, PAGE)):
            for row in page:
                await self._account(row)
            last = page[-1].id

    async def _account(self, row: LedgerAccountsRecord) -> None:
        if row.kind not in _KINDS:
            why = f"{row.kind!r} is no kind of account"
            self._add([LedgerFinding(f"account {row.id}", why)])
            return
        id_ = LedgerAccountId(row.id)
        replay = AccountReplay(LedgerAccount(id_, AccountKind(row.kind), row.balance, row.sequence))
        read = 0
        while page := await self._store.read(blocks.account_entries(id_, read, PAGE)):
            # later entries were written since the account was read
            self._add(replay.findings([each for each in page if each.sequence <= row.sequence]))
            read = page[-1].sequence
            if read > row.sequence:
                break
        self._add(replay.end_findings())

    async def _pending(self) -> None:
        last = ""
        while page := await self._store.read(blocks.pending_records(last, PAGE)):
            for record in page:
                self._add(checks.pending_findings(record))
            last = page[-1].pending.id

    async def _spending(self) -> None:
        last = (0, 0)
        while page := await self._store.read(blocks.spending_records(last, PAGE)):
            for record in page:
                self._add(checks.spending_findings(record))
            last = (page[-1].account, page[-1].month)
