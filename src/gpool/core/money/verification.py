"""Recomputation of stored books: one finding for each wrong row, with the id of the transfer, account or block. Pure.

Each function takes rows as they are stored and returns the findings in them; `server/actions/money/verification.py` reads the
rows page by page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpool.core.errors import Invalid
from gpool.core.money.blocks import (
    GENESIS,
    BookedTransfer,
    LedgerBlock,
    block_hash,
    leaf_of,
    merkle_root,
)
from gpool.core.money.ledger import LedgerAccount, LedgerEntry, PendingTransfer
from gpool.core.money.transfers import (
    FEE,
    RESOLUTIONS,
    TREASURY,
    Expire,
    Forfeit,
    Grant,
    LedgerAccountId,
    Payout,
    Post,
    Posting,
    Refund,
    Reserve,
    TransferKind,
    TransferRequest,
    Vest,
    Void,
    digest_of_request,
    floor_of,
    month_of,
)


@dataclass(frozen=True, slots=True)
class LedgerFinding:
    """`thing`: `transfer ID`, `account NUMBER`, `entry ACCOUNT/SEQUENCE`, `block NUMBER`, …"""

    thing: str
    why: str


def block_findings(block: LedgerBlock, before: LedgerBlock | None) -> Iterator[LedgerFinding]:
    """Check the chain: number, hash of the block before, own hash."""
    thing = f"block {block.number}"
    number, previous = (1, GENESIS) if before is None else (before.number + 1, before.hash)
    if block.number != number:
        yield LedgerFinding(thing, f"block {number} is missing before it")
    if block.previous != previous:
        yield LedgerFinding(thing, "it does not name the hash of the block before it")
    own = block_hash(block.number, block.previous, block.root, block.transfers, block.sealed_at)
    if block.hash != own:
        yield LedgerFinding(thing, "its hash is not the hash of its content")


def content_findings(
    block: LedgerBlock, booked: Sequence[BookedTransfer]
) -> Iterator[LedgerFinding]:
    """Check the Merkle root over the block's transfers, in the order of their leaves."""
    if len(booked) != block.transfers:
        why = f"it was sealed with {block.transfers} transfers and has {len(booked)}"
        yield LedgerFinding(f"block {block.number}", why)
    elif merkle_root([leaf_of(each) for each in booked]) != block.root:
        why = "one of its transfers differs from the one that was sealed (Merkle root)"
        yield LedgerFinding(f"block {block.number}", why)


def transfer_findings(
    booked: BookedTransfer, pending: PendingTransfer | None
) -> Iterator[LedgerFinding]:
    """Check sum and content. `pending`: the pending transfer that it makes or resolves, else None."""
    thing = f"transfer {booked.transfer.id}"
    total = sum(entry.amount for entry in booked.entries)
    if total or not booked.entries:
        yield LedgerFinding(thing, f"its entries sum to {total} in {len(booked.entries)} rows")
        return
    try:
        request = _request(booked, pending)
    except Invalid as wrong:
        yield LedgerFinding(thing, f"its entries are not those of any request: {wrong.detail}")
        return
    if request is None:
        yield LedgerFinding(thing, f"its entries are not those of a {booked.transfer.kind}")
    elif digest_of_request(request) != booked.transfer.digest:
        yield LedgerFinding(thing, "its content differs from the request that was recorded")


def _request(booked: BookedTransfer, pending: PendingTransfer | None) -> TransferRequest | None:
    """The request whose effect these entries are; None: no request of this kind has it."""
    transfer, refers = booked.transfer, booked.transfer.refers_to
    amounts = {LedgerAccountId(entry.account): entry.amount for entry in booked.entries}
    if transfer.kind in (TransferKind.GRANT, TransferKind.REFUND):
        return _issued(booked, amounts)
    if transfer.kind in (TransferKind.VEST, TransferKind.PAYOUT):
        return _passed_on(booked, amounts)
    if transfer.kind is TransferKind.FORFEIT:
        return _forfeited(booked, amounts)
    if pending is None or amounts.get(pending.account) not in (pending.amount, -pending.amount):
        return None
    if transfer.kind is TransferKind.RESERVE:
        if amounts != {pending.payer: -pending.amount, pending.account: pending.amount}:
            return None
        return Reserve(
            transfer.id, pending.payer, pending.account, pending.amount, pending.expires_at
        )
    if refers is None:
        return None
    paid = {
        account: amount
        for account, amount in amounts.items()
        if account not in (pending.account, pending.payer)
    }
    if transfer.kind is TransferKind.POST:
        return Post(transfer.id, refers, tuple(Posting(*each) for each in sorted(paid.items())))
    if paid:
        return None
    return (Void if transfer.kind is TransferKind.VOID else Expire)(transfer.id, refers)


def _issued(booked: BookedTransfer, amounts: dict[LedgerAccountId, int]) -> TransferRequest | None:
    transfer = booked.transfer
    issued = -amounts.pop(TREASURY, 0)
    if len(amounts) != 1 or amounts.popitem()[1] != issued:
        return None
    if transfer.kind is TransferKind.REFUND:
        return (
            None if transfer.refers_to is None else Refund(transfer.id, transfer.refers_to, issued)
        )
    [to] = [LedgerAccountId(each.account) for each in booked.entries if each.account != TREASURY]
    return Grant(transfer.id, to, issued)


def _passed_on(
    booked: BookedTransfer, amounts: dict[LedgerAccountId, int]
) -> TransferRequest | None:
    transfer = booked.transfer
    if len(amounts) != 2 or transfer.refers_to is not None:
        return None
    (source, _), (target, amount) = sorted(amounts.items(), key=lambda each: each[1])
    made = Vest if transfer.kind is TransferKind.VEST else Payout
    return made(transfer.id, source, target, amount)


def _forfeited(
    booked: BookedTransfer, amounts: dict[LedgerAccountId, int]
) -> TransferRequest | None:
    """From the vesting account and perhaps the fee, to the payer and perhaps the treasury."""
    transfer = booked.transfer
    fee = -min(0, amounts.pop(FEE, 0))
    amounts.pop(TREASURY, 0)
    sources = [account for account, amount in amounts.items() if amount < 0]
    if transfer.refers_to is None or len(sources) != 1 or len(amounts) > 2:
        return None
    [vesting] = sources
    return Forfeit(transfer.id, transfer.refers_to, vesting, -amounts[vesting], fee)


@dataclass(slots=True)
class AccountReplay:
    """Entries of one account, replayed from the first one up to its stored state."""

    account: LedgerAccount
    balance: int = 0
    sequence: int = 0

    def findings(self, entries: Sequence[LedgerEntry]) -> Iterator[LedgerFinding]:
        """Check the next entries: numbers without gaps, balances, floor."""
        for entry in entries:
            thing = f"entry {entry.account}/{entry.sequence} of transfer {entry.transfer}"
            if entry.sequence != self.sequence + 1:
                yield LedgerFinding(thing, f"entry {self.sequence + 1} before it is missing")
            if entry.balance != self.balance + entry.amount:
                why = f"the balance after it is {entry.balance}, not {self.balance + entry.amount}"
                yield LedgerFinding(thing, why)
            if entry.balance < floor_of(self.account.kind) and entry.amount < 0:
                why = f"the balance {entry.balance} is below the floor of the account"
                yield LedgerFinding(thing, why)
            self.balance, self.sequence = entry.balance, entry.sequence

    def end_findings(self) -> Iterator[LedgerFinding]:
        """Check the stored state after the last entry."""
        stored = self.account
        thing = f"account {stored.id}"
        if stored.sequence != self.sequence:
            why = f"its last entry is {self.sequence}, and it was written as {stored.sequence}"
            yield LedgerFinding(thing, why)
        if stored.balance != self.balance:
            why = f"its balance is {stored.balance}; its entries sum to {self.balance}"
            yield LedgerFinding(thing, why)


@dataclass(frozen=True, slots=True)
class PendingRecord:
    """A stored pending transfer with the transfers that made and resolved it."""

    pending: PendingTransfer
    made: BookedTransfer | None
    resolved: tuple[BookedTransfer, ...]


def pending_findings(record: PendingRecord) -> Iterator[LedgerFinding]:
    """Check that it was reserved once and resolved at most once, and what returned."""
    pending = record.pending
    thing = f"pending transfer {pending.id}"
    if record.made is None or record.made.transfer.kind is not TransferKind.RESERVE:
        yield LedgerFinding(thing, "no transfer reserved it")
    elif pending.month != month_of(record.made.transfer.at):
        yield LedgerFinding(thing, "it counts in another month than it was reserved in")
    if len(record.resolved) > 1:
        ids = ", ".join(each.transfer.id for each in record.resolved)
        yield LedgerFinding(thing, f"it was resolved more than once: by {ids}")
    by = record.resolved[0].transfer.id if record.resolved else None
    if pending.resolved_by != by:
        yield LedgerFinding(thing, f"it names {pending.resolved_by} as its resolution, not {by}")
    returned = sum(
        entry.amount
        for each in record.resolved
        for entry in each.entries
        if entry.account == pending.payer
    )
    if pending.returned != returned:
        yield LedgerFinding(thing, f"{returned} returned to its payer, not {pending.returned}")


def reference_findings(
    booked: BookedTransfer, pending: PendingTransfer | None
) -> Iterator[LedgerFinding]:
    """Check that a reservation or resolution has its row among the pending transfers."""
    kind = booked.transfer.kind
    if pending is None and (kind is TransferKind.RESERVE or kind in RESOLUTIONS):
        yield LedgerFinding(
            f"transfer {booked.transfer.id}", "the pending transfer that it is about is missing"
        )


@dataclass(frozen=True, slots=True)
class SpendingRecord:
    account: LedgerAccountId
    month: int
    stored: int
    computed: int  # set aside in the month, less what returned


def spending_findings(record: SpendingRecord) -> Iterator[LedgerFinding]:
    if record.stored != record.computed:
        thing = f"spending of account {record.account} in month {record.month}"
        yield LedgerFinding(thing, f"{record.stored} is recorded; {record.computed} was spent")
