"""A charge in the ledger of a server: what a lease's end will write."""

from __future__ import annotations

from gpool.core.ids import decode
from gpool.core.model import SECOND, Instant
from gpool.core.money.transfers import (
    AccountKind,
    Grant,
    LedgerAccountId,
    Post,
    Posting,
    Reserve,
    TransferId,
    TransferOutcome,
)
from gpool.server.server import Server
from gpool.server.store.operations.money import accounts, transfers
from gpool.server.store.operations.money.accounts import NewAccount
from gpool.server.store.operations.money.transfers import RecordedTransfers
from gpool.server.store.protocol import Operation, operation

KINDS = (AccountKind.USER, AccountKind.PENDING, AccountKind.OWNER)


@operation
def _charge(
    wanted: list[NewAccount], name: str, amount: int, at: Instant
) -> Operation[RecordedTransfers]:
    opened = yield from accounts.open_accounts(wanted)
    payer, pending, owner = (opened[each.holder, each.kind] for each in wanted)
    reserve = Reserve(TransferId(f"{name}:r"), payer, pending, 2 * amount, at)
    story = (
        Grant(TransferId(f"{name}:g"), payer, 2 * amount),
        reserve,
        Post(TransferId(name), reserve.id, (Posting(owner, amount),)),
    )
    return (yield from transfers.record_transfers(story, at))


@operation
def _set_aside(
    wanted: list[NewAccount], amount: int, at: Instant, expires_at: Instant
) -> Operation[RecordedTransfers]:
    opened = yield from accounts.open_accounts(wanted)
    payer, pending, _ = (opened[each.holder, each.kind] for each in wanted)
    story = (
        Grant(TransferId("funds"), payer, amount),
        Reserve(TransferId("aside"), payer, pending, amount, expires_at),
    )
    return (yield from transfers.record_transfers(story, at))


async def set_aside(server: Server, user: str, amount: int, *, for_s: int) -> None:
    """Grant a user the amount and set all of it aside."""
    now = server.now
    until = Instant(now + for_s * SECOND)
    done = await server.write(_set_aside(_accounts(server, user), amount, now, until))
    assert set(done.outcomes) == {TransferOutcome.MOVED}


def _accounts(server: Server, user: str) -> list[NewAccount]:
    number = decode("user", user)
    return [
        NewAccount(("user", number), kind, LedgerAccountId(server.ids.next())) for kind in KINDS
    ]


async def charged(server: Server, user: str, amount: int, name: str = "charge") -> str:
    """Grant a user twice the amount, set it aside and charge half of it, to the user's own nodes."""
    wanted = _accounts(server, user)
    done = await server.write(_charge(wanted, name, amount, server.now))
    assert set(done.outcomes) == {TransferOutcome.MOVED}
    return name
