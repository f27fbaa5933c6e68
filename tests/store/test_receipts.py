"""Receipts, vesting, statements and closed periods in both databases."""

from __future__ import annotations

import json

import msgspec
import pytest

from gpool.core.errors import Conflict
from gpool.core.ids import NodeId, UserId
from gpool.core.model import Instant
from gpool.core.money.transfers import format_month, month_of
from gpool.server.store.generated_rows import (
    OutboxRecord,
    PayoutLinesRecord,
    PayoutsRecord,
    ReceiptKeysRecord,
    ReceiptsRecord,
)
from gpool.server.store.operations.events.outbox import OUTBOX, put_reader
from gpool.server.store.operations.identity import accounts as identities
from gpool.server.store.operations.identity import receipt_keys
from gpool.server.store.operations.money import earnings, payouts, receipts, vesting
from gpool.server.store.operations.money.payouts import ClosedPeriod, NewReward
from gpool.server.store.operations.money.receipts import IssuedReceipts, ReceiptQuery
from gpool.server.store.protocol import Operation, operation
from gpool.server.store.rows import select
from gpool.wire.frames import SignedGpu, Started, WorkSignature
from tests.store.store_pool import Pool, exited
from tests.store.test_charges import Priced, S, executed

WORK = WorkSignature(b"\1" * 64, (SignedGpu("gpu-1", "H100", "exclusive"),))
SHARE = S - S // 10
KEY = ReceiptKeysRecord("rk-1", b"sealed", "ab" * 32, 5, "cd" * 64)
AFTER = (1 << 62) - 1


@operation
def outbox() -> Operation[list[OutboxRecord]]:
    return (yield from select(OutboxRecord, f"SELECT {OUTBOX} FROM outbox o ORDER BY o.id"))  # noqa: S608


@pytest.fixture
def priced(pool: Pool) -> Priced:
    made = Priced(pool)
    pool.write(executed("UPDATE nodes SET public_key = 'key-of-the-node'"))
    pool.write(receipt_keys.put_receipt_key(KEY, []))
    return made


def posted(priced: Priced, *, is_signed: bool = True) -> int:
    pool = priced.pool
    (task,) = pool.submit()
    priced.grant([task])
    pool.record(priced.node, Started(task, 1))
    end = exited(task, code=0)
    pool.record(priced.node, msgspec.structs.replace(end, work=WORK if is_signed else None))
    priced.settle()
    return task


def issue(priced: Priced, key: str = "rk-1", window_us: int = 0) -> list[ReceiptsRecord]:
    pool = priced.pool
    now = pool.now()
    rows = [
        ReceiptsRecord(
            next(pool.numbers),
            row.task_id,
            row.epoch,
            row.node_id,
            row.payer_id,
            row.owner_id,
            month_of(now),
            now,
            b"receipt",
        )
        for row in pool.read(receipts.issuable(10))
    ]
    if rows:
        pool.write(receipts.put_receipts(IssuedReceipts(key, rows, window_us)))
    return rows


def vest(priced: Priced) -> int:
    ids = [next(priced.pool.numbers) for _ in range(11)]
    return priced.pool.write(vesting.vest(priced.pool.now(), 10, ids))


@operation
def caught(node: NodeId, at: Instant) -> Operation[vesting.Forfeited]:
    return (yield from vesting.forfeit(node, at))


def test_a_signed_end_gets_one_receipt_and_its_earning_vests_once(priced: Priced) -> None:
    pool = priced.pool
    task = posted(priced)
    [row] = pool.read(receipts.issuable(10))
    assert (row.task_id, row.node_key, row.signature) == (task, "key-of-the-node", WORK.signature)
    assert not vest(priced)
    [receipt] = issue(priced)
    assert issue(priced) == []
    account = row.owner_id
    query = ReceiptQuery((row.payer_id, account), AFTER, 10)
    assert [each.id for each in pool.read(receipts.receipts(query))] == [receipt.id]
    assert pool.read(receipts.receipt(receipt.id)) == receipt
    assert pool.read(receipts.bodies(receipt.month, 0, 10)) == (receipt.id, (b"receipt",))
    assert pool.read(vesting.has_vested(Instant(AFTER)))
    assert (vest(priced), vest(priced)) == (1, 0)
    assert priced.balances()["owner"] == SHARE
    span = (Instant(0), Instant(AFTER))
    lines = pool.read(earnings.statement((account,), span, earnings.FIRST, 10))
    assert [(each.state, each.receipt_id) for each in lines] == [("vested", receipt.id)]
    month = (month_of(pool.now()), *span)
    [earned] = pool.read(earnings.earnings(account, [month]))
    assert (earned.state, earned.microcredits) == ("vested", SHARE)
    assert pool.write(caught(priced.node, pool.now())).leases == ()
    priced.check_books()


def test_receipts_of_a_replaced_key_are_not_stored(priced: Priced) -> None:
    posted(priced)
    with pytest.raises(Conflict, match="replaced"):
        issue(priced, "rk-0")
    issue(priced)
    late = ReceiptKeysRecord("rk-2", b"sealed", "ac" * 32, 6, "cd" * 64)
    with pytest.raises(Conflict, match="receipt was issued"):
        priced.pool.write(receipt_keys.put_receipt_key(late, ["rk-1"]))


def test_an_unsigned_charge_returns_and_old_signatures_are_deleted(priced: Priced) -> None:
    pool = priced.pool
    before = priced.balances()["user"]
    posted(priced, is_signed=False)
    assert pool.read(receipts.issuable(10)) == ()
    assert pool.write(vesting.forfeit_unsigned(Instant(AFTER), pool.now(), 10)) == 1
    assert priced.balances()["user"] == before
    task = posted(priced)
    pool.write(receipts.reject_signatures([(task, 1, priced.node)]))
    assert pool.write(vesting.forfeit_unsigned(Instant(AFTER), pool.now(), 10)) == 1
    posted(priced)
    done = pool.write(caught(priced.node, pool.now()))
    assert done.microcredits == S
    assert pool.read(receipts.has_signatures(Instant(AFTER)))
    assert pool.write(receipts.forget_signatures(Instant(AFTER), 10)) == 1
    assert not pool.read(receipts.has_signatures(Instant(AFTER)))
    assert priced.balances()["vesting"] == 0
    priced.check_books()


def test_a_period_is_closed_once_and_pays_balances_with_rewards(priced: Priced) -> None:
    pool = priced.pool
    posted(priced)
    issue(priced)
    vest(priced)
    pool.write(identities.link_wallet(pool.ann, "0x" + "11" * 20, pool.now()))
    rewards = [NewReward(pool.ann, 7, 40)]
    pool.write(payouts.put_rewards(24_000, rewards, [next(pool.numbers)], pool.now()))
    with pytest.raises(Conflict, match="paid already"):
        pool.write(payouts.put_rewards(24_000, rewards, [next(pool.numbers)], pool.now()))
    [due] = pool.read(payouts.owner_balances())
    assert (due.user_id, due.microcredits, due.wallet) == (pool.ann, SHARE + 40, "0x" + "11" * 20)
    assert [each.microcredits for each in pool.read(earnings.rewards_of(due.account_id))] == [40]
    record = PayoutsRecord(1, 24_000, pool.now(), 1, "1", None, "0x", b"file")
    line = PayoutLinesRecord(1, due.account_id, "0x" + "11" * 20, due.microcredits)
    closed = ClosedPeriod(record, [line], {due.account_id: due.user_id}, [next(pool.numbers)])
    pool.write(put_reader(("user", pool.ann), Instant(AFTER)))
    pool.write(payouts.put_payout(closed, pool.now()))
    [event] = pool.read(outbox())
    assert (event.kind, event.holder_kind, event.holder_id) == ("payout.ready", "user", pool.ann)
    assert json.loads(event.data) == {
        "month": format_month(24_000),
        "number": 1,
        "payee": line.payee,
        "microcredits": SHARE + 40,
    }
    with pytest.raises(Conflict, match="closed already"):
        pool.write(payouts.put_payout(closed, pool.now()))
    assert pool.read(payouts.payouts(9, 10)) == (record,)
    assert pool.read(payouts.lines_of([due.account_id])) == (line,)
    assert (priced.balances()["owner"], priced.balances()["paid"]) == (0, SHARE + 40)
    use = pool.read(payouts.node_use(month_of(pool.now())))
    assert all(each.gpu_us >= 0 for each in use)
    spans = Instant(0), Instant(AFTER)
    assert [each.node_id for each in pool.read(payouts.verified_use(*spans))] == [priced.node]
    assert pool.read(payouts.measured_gpus()) == ()
    priced.check_books()


def test_changes_of_the_payout_wallet_are_kept_with_their_time(pool: Pool) -> None:
    one, two = "0x" + "11" * 20, "0x" + "22" * 20
    user = UserId(pool.ann)
    for address in (one, two):
        pool.write(identities.link_wallet(user, address, pool.now()))
    pool.write(identities.set_payout_wallet(user, two, pool.now()))
    pool.write(identities.set_payout_wallet(user, two, pool.now()))
    pool.write(identities.unlink_wallet(user, two, pool.now()))
    found = pool.read(earnings.wallet_history(user))
    assert [each.address for each in found] == [one, two, None]
    assert [each.number for each in found] == [1, 2, 3]
    assert found[0].at < found[1].at < found[2].at
