"""Deposits by chain transfers: where to send them, what was found; operators see open ones and end a halt."""

from __future__ import annotations

from typing import cast

from gpool.core.errors import NotFound
from gpool.core.permissions import Action
from gpool.server.actions.accounts.accounts import checksummed
from gpool.server.actions.audit import audited, entry
from gpool.server.deposits.settings import DepositTerms
from gpool.server.identity.authorization import own, permit
from gpool.server.server import Once, Server
from gpool.server.store.generated_rows import DepositsRecord
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations import deposits as operations
from gpool.server.store.operations.deposits import DepositSource
from gpool.server.store.operations.identity import accounts
from gpool.wire.documents import instant_to_datetime
from gpool.wire.ledger import (
    DepositDocument,
    DepositsDocument,
    DepositStatus,
    PoolDepositsDocument,
)


async def own_deposits(server: Server, who: Caller, limit: int) -> DepositsDocument:
    permit(who, Action.DEPOSITS_READ, own(who))
    terms = _terms(server)
    cursor = await server.store.read(operations.cursor(_source(terms)))
    wallets = await server.store.read(accounts.wallets_of(who.user.id))
    rows = await server.store.read(operations.deposits_of(who.user.id, limit))
    return DepositsDocument(
        chain_id=terms.chain_id,
        token=checksummed(terms.token),
        address=checksummed(terms.address),
        confirmations=terms.confirmations,
        scanned_block=_scanned(None if cursor is None else cursor.block, terms),
        halted=cursor is not None and cursor.halted_at is not None,
        wallets=[checksummed(wallet.address) for wallet in wallets],
        items=[_document(row) for row in rows],
    )


async def open_deposits(server: Server, limit: int) -> PoolDepositsDocument:
    """The route has checked DEPOSITS_LIST_ALL, or DEPOSITS_RESUME."""
    terms = _terms(server)
    cursor = await server.store.read(operations.cursor(_source(terms)))
    rows = await server.store.read(operations.open_deposits(limit))
    halted_at = None if cursor is None else cursor.halted_at
    return PoolDepositsDocument(
        chain_id=terms.chain_id,
        token=checksummed(terms.token),
        address=checksummed(terms.address),
        confirmations=terms.confirmations,
        scanned_block=_scanned(None if cursor is None else cursor.block, terms),
        halted_at=None if halted_at is None else instant_to_datetime(halted_at),
        why="" if cursor is None else cursor.why,
        items=[_document(row) for row in rows],
    )


async def resume(
    server: Server, who: Caller, from_block: int, once: Once | None
) -> PoolDepositsDocument:
    """The route has checked DEPOSITS_RESUME."""
    terms = _terms(server)
    note = entry(server.now, who, "deposit.resume", terms.address, from_block=str(from_block))
    change = operations.resume(_source(terms), from_block, server.now)
    await server.write_once(who.user, once, audited(change, [note]), lambda _: b"")
    return await open_deposits(server, 100)


def _terms(server: Server) -> DepositTerms:
    found = server.settings.deposit_terms(server.settings.chain_id)
    if found is None:
        raise NotFound("this pool takes no deposits: its operator grants credits")
    return found


def _source(terms: DepositTerms) -> DepositSource:
    return DepositSource(terms.chain_id, terms.token, terms.address)


def _scanned(block: int | None, terms: DepositTerms) -> int | None:
    return None if block is None or block < terms.from_block else block


def _document(row: DepositsRecord) -> DepositDocument:
    return DepositDocument(
        transfer=operations.transfer_id(row),
        transaction=row.tx,
        log_index=row.log_index,
        block=row.block,
        sender=checksummed(row.sender) if row.sender else "",
        amount=row.amount,
        status=cast("DepositStatus", row.status),
        changed_at=instant_to_datetime(row.changed_at),
    )
