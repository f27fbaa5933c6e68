"""A charge in the ledger of a server: what a lease's end will write."""

from __future__ import annotations

from gpool.core.ids import decode, encode
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
from gpool.server.store.protocol import Operation, Statement, operation
from gpool.server.store.rows import values
from gpool.wallet import payouts
from tests.wallet import sample_receipts

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


@operation
def _earn(user: int, node: int, file: bytes, at: Instant) -> Operation[None]:
    month = 2001 * 12
    [account] = yield from values(
        int,
        "SELECT account_id FROM ledger_holders WHERE kind = 'user' AND id = :id AND purpose = 'user'",
        {"id": user},
    )
    yield Statement(
        "INSERT INTO receipts (id, task_id, epoch, node_id, payer_id, owner_id, month, issued_at, body) "
        "VALUES (77, 1, 1, :node, :account, 0, :month, :at, :body)",
        {
            "node": node,
            "account": account,
            "month": month,
            "at": at,
            "body": sample_receipts.SamplePool().receipt().to_bytes(),
        },
    )
    yield Statement(
        "INSERT INTO payouts (number, month, closed_at, accounts, total_due, root, receipts_root, body) "
        "VALUES (1, :month, :at, 1, '5', NULL, '', :body)",
        {"month": month - 1, "at": at, "body": file},
    )
    yield Statement(
        "INSERT INTO usage_totals (kind, id, month, node_id, model, attempts, task_us, gpu_us) "
        "VALUES ('user', 1, :month, :node, 'H100', 1, 5000000, 5000000)",
        {"month": month, "node": node},
    )


async def earned(server: Server, user: str, node: str) -> str:
    """A receipt that the user paid, use of a node in January 2001, and a closed period before it; return the receipt's id."""
    period = payouts.Period(server.identity.receipts.pool, 1, bytes(32))
    file = payouts.close(period, {"ac-1": 5}).to_bytes()
    numbers = decode("user", user), decode("node", node)
    await server.write(_earn(*numbers, file, server.now))
    return encode("receipt", 77)
