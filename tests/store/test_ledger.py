"""The ledger in the store: set-based writes, races, sealing, verification, deletion of the link to a person."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gpool.core.errors import Conflict
from gpool.core.model import Instant
from gpool.core.money.blocks import LedgerBlock
from gpool.core.money.budgets import BudgetLevel
from gpool.core.money.transfers import (
    FEE,
    TREASURY,
    AccountKind,
    Expire,
    Grant,
    LedgerAccountId,
    Post,
    Posting,
    Refund,
    Reserve,
    TransferId,
    TransferOutcome,
    TransferRequest,
    Void,
    month_of,
)
from gpool.server.actions.money.verification import BlockAnchor, LedgerReport, verify
from gpool.server.store.operations.identity import account_deletion
from gpool.server.store.operations.money import accounts, blocks, transfers
from gpool.server.store.operations.money.accounts import NewAccount
from gpool.server.store.operations.money.transfers import RecordedTransfers
from gpool.server.store.protocol import Operation, Statement, operation
from gpool.server.store.rows import values
from tests.store.store_pool import Database, Pool, race

NOW = Instant(1_790_000_000_000_000)
LATER = Instant(NOW + 600_000_000)
MOVED, REPEATED = TransferOutcome.MOVED, TransferOutcome.REPEATED
ANN, HELD, BOB = LedgerAccountId(10), LedgerAccountId(11), LedgerAccountId(12)


def t(text: str) -> TransferId:
    return TransferId(text)


@operation
def opened(*wanted: NewAccount) -> Operation[Any]:
    return (yield from accounts.open_accounts(wanted))


@operation
def balances() -> Operation[dict[int, int]]:
    rows = yield Statement("SELECT id, balance FROM ledger_accounts")
    assert isinstance(rows, list)
    return dict(rows)


@pytest.fixture
def ledger(pool: Pool) -> Pool:
    """`ann` pays, and lends as well; her accounts have the ids 10, 11 and 12."""
    kinds = (AccountKind.USER, AccountKind.PENDING, AccountKind.OWNER)
    wanted = [
        NewAccount(("user", pool.ann), kind, LedgerAccountId(10 + place))
        for place, kind in enumerate(kinds)
    ]
    found = pool.write(opened(*wanted))
    assert [found[each.holder, each.kind] for each in wanted] == [ANN, HELD, BOB]
    return pool


def record(pool: Pool, *requests: TransferRequest, at: Instant = NOW) -> RecordedTransfers:
    return pool.write(transfers.record(requests, at))


def outcomes(pool: Pool, *requests: TransferRequest, at: Instant = NOW) -> tuple[Any, ...]:
    return record(pool, *requests, at=at).outcomes


def reserve(name: str, amount: int, expires_at: Instant = LATER) -> Reserve:
    return Reserve(t(name), ANN, HELD, amount, expires_at)


def post(name: str, pending: str, owner: int, fee: int = 0) -> Post:
    postings = (Posting(BOB, owner), *((Posting(FEE, fee),) if fee else ()))
    return Post(t(name), t(pending), postings)


def verified(pool: Pool, *anchors: BlockAnchor) -> LedgerReport:
    return pool.database.run(verify(pool.database.store, anchors))


def seal(pool: Pool, at: Instant = NOW) -> int:
    return pool.write(blocks.seal(at, 100))


def test_transfers_of_every_kind_are_written_and_the_books_verify(ledger: Pool) -> None:
    done = outcomes(
        ledger,
        Grant(t("g"), ANN, 10_000),
        reserve("r1", 2_000),
        reserve("r2", 1_000),
        reserve("r3", 500, NOW),
    )
    assert done == (MOVED,) * 4
    done = outcomes(
        ledger,
        post("p1", "r1", 1_350, 150),
        Void(t("v2"), t("r2")),
        Expire(t("e3"), t("r3")),
    )
    assert done == (MOVED,) * 3
    assert outcomes(ledger, Refund(t("f"), t("p1"), 300)) == (MOVED,)
    assert ledger.read(balances()) == {
        TREASURY: -10_300,
        FEE: 150,
        ANN: 8_800,
        HELD: 0,
        BOB: 1_350,
    }
    assert seal(ledger) == 8
    report = verified(ledger)
    assert report.findings == ()
    assert (report.transfers, report.entries, report.unsealed) == (8, 18, 0)


def test_a_repeated_id_moves_once_in_one_write_and_over_several(ledger: Pool) -> None:
    grant = Grant(t("g"), ANN, 100)
    assert outcomes(ledger, grant, grant) == (MOVED, REPEATED)
    ledger.database.reopen()
    assert outcomes(ledger, grant, Grant(t("g"), ANN, 1)) == (REPEATED, TransferOutcome.ID_REUSED)
    assert ledger.read(balances())[ANN] == 100


def test_refused_transfers_write_nothing(ledger: Pool) -> None:
    record(ledger, Grant(t("g"), ANN, 100))
    refused = outcomes(
        ledger,
        reserve("r", 101),
        Grant(t("x"), LedgerAccountId(99), 1),
        Void(t("v"), t("nothing")),
        Refund(t("f"), t("g"), 1),
    )
    assert refused == (
        TransferOutcome.NO_FUNDS,
        TransferOutcome.NO_ACCOUNT,
        TransferOutcome.NO_PENDING,
        TransferOutcome.NO_CHARGE,
    )
    assert verified(ledger).transfers == 1


def test_refunds_are_limited_over_several_writes(ledger: Pool) -> None:
    record(ledger, Grant(t("g"), ANN, 100), reserve("r", 60), post("p", "r", 50))
    assert outcomes(ledger, Refund(t("f1"), t("p"), 30)) == (MOVED,)
    assert outcomes(ledger, Refund(t("f2"), t("p"), 21)) == (TransferOutcome.TOO_MUCH,)
    assert outcomes(ledger, Refund(t("f2"), t("p"), 20)) == (MOVED,)


def test_pending_transfers_expire_in_portions(ledger: Pool) -> None:
    record(ledger, Grant(t("g"), ANN, 100))
    record(ledger, *(reserve(f"r{n}", 1, Instant(NOW + n)) for n in range(5)))
    assert ledger.write(transfers.expire_pending(Instant(NOW + 3), 3)) == 3
    assert ledger.write(transfers.expire_pending(Instant(NOW + 3), 3)) == 1
    assert ledger.write(transfers.expire_pending(Instant(NOW + 3), 3)) == 0
    assert ledger.read(balances())[HELD] == 1
    uncleared = ledger.read(accounts.uncleared())
    assert (uncleared.amount, uncleared.oldest_at) == (1, NOW)
    assert verified(ledger).findings == ()


def test_a_budget_caps_the_month_and_warns_before(ledger: Pool) -> None:
    payer = NewAccount(("user", ledger.ann), AccountKind.USER, LedgerAccountId(500))
    ledger.write(accounts.set_budget(payer, 100, NOW))
    record(ledger, Grant(t("g"), ANN, 1_000))
    assert record(ledger, reserve("a", 79)).warnings == ()
    [warning] = record(ledger, reserve("b", 6)).warnings
    assert (warning.account, warning.level, warning.spent) == (ANN, BudgetLevel.WARNING, 85)
    assert outcomes(ledger, reserve("c", 16)) == (TransferOutcome.OVER_BUDGET,)
    record(ledger, post("p", "a", 9))
    spent = ledger.read(accounts.spending(payer.holder, payer.kind, NOW))
    assert (spent.spent, spent.cap) == (15, 100)
    assert outcomes(ledger, reserve("c", 85)) == (MOVED,)
    next_month = Instant(NOW + 40 * 86_400_000_000)
    assert month_of(next_month) == month_of(NOW) + 1
    assert outcomes(ledger, reserve("d", 100), at=next_month) == (MOVED,)
    ledger.write(accounts.set_budget(payer, None, NOW))
    assert outcomes(ledger, reserve("e", 500)) == (MOVED,)
    assert verified(ledger).findings == ()


def test_racing_writers_move_each_id_once_and_keep_the_floor(
    ledger: Pool, database: Database
) -> None:
    """Each id is written by two of four stores at once; only 50 of 80 reservations are funded."""
    record(ledger, Grant(t("g"), ANN, 50))
    stores = 1 if database.url.startswith("sqlite") else 4
    operations = [transfers.record([reserve(f"r{number % 80}", 1)], NOW) for number in range(160)]
    found = [each.outcomes[0] for each in race(database, operations, stores)]
    assert found.count(MOVED) == 50
    assert set(found) == {MOVED, REPEATED, TransferOutcome.NO_FUNDS}
    assert ledger.read(balances())[ANN] == 0
    voids = [
        transfers.record([Void(t(f"v{number}-{place}"), t(f"r{number}"))], NOW)
        for number in range(80)
        for place in range(2)
    ]
    found = [each.outcomes[0] for each in race(database, voids, stores)]
    assert found.count(MOVED) == 50
    assert ledger.read(balances())[ANN] == 50
    seal(ledger)
    assert verified(ledger).findings == ()


def test_an_account_is_opened_once_by_racing_writers(pool: Pool, database: Database) -> None:
    stores = 1 if database.url.startswith("sqlite") else 4
    wanted = [
        opened(NewAccount(("user", pool.ann), AccountKind.USER, LedgerAccountId(100 + number)))
        for number in range(20)
    ]
    found = race(database, wanted, stores)
    assert len({account for each in found for account in each.values()}) == 1
    assert len(pool.read(balances())) == 3


def test_transfers_are_part_of_the_transaction_of_their_cause(ledger: Pool) -> None:
    """The cause refuses after the transfers were written: neither exists."""

    @operation
    def cause(fails: bool) -> Operation[RecordedTransfers]:
        done = yield from transfers.record_transfers([Grant(t("g"), ANN, 5)], NOW)
        if fails:
            raise Conflict("the lease has ended meanwhile")
        return done

    with pytest.raises(Conflict):
        ledger.write(cause(True))
    assert ledger.read(balances())[ANN] == 0
    assert ledger.write(cause(False)).outcomes == (MOVED,)


def test_blocks_are_chained_and_an_anchor_finds_a_rewritten_chain(ledger: Pool) -> None:
    for number in range(3):
        record(ledger, Grant(t(f"g{number}"), ANN, 5), Grant(t(f"h{number}"), BOB, 7))
        assert seal(ledger) == 2
    assert seal(ledger) == 0
    head = ledger.read(blocks.head())
    assert isinstance(head, LedgerBlock)
    assert head.number == 3
    assert verified(ledger, BlockAnchor(3, head.hash)).findings == ()
    [finding] = verified(ledger, BlockAnchor(3, "0" * 64)).findings
    assert finding.thing == "block 3"
    [finding] = verified(ledger, BlockAnchor(4, head.hash)).findings
    assert "missing" in finding.why


def test_deleting_an_account_deletes_the_link_and_no_entry(
    ledger: Pool, database: Database
) -> None:
    bea = ledger.user("bea")
    payer = NewAccount(("user", bea), AccountKind.USER, LedgerAccountId(70))
    ledger.write(accounts.set_budget(payer, 100, NOW))
    record(ledger, Grant(t("g"), LedgerAccountId(70), 100))
    assert len(ledger.read(accounts.balances(("user", bea)))) == 1
    ledger.write(account_deletion.delete_account(bea, NOW))
    assert ledger.read(accounts.balances(("user", bea))) == ()

    @operation
    def rows(table: str) -> Operation[int]:
        [found] = yield from values(int, f"SELECT COUNT(*) FROM {table}")  # noqa: S608
        return found

    assert (ledger.read(rows("ledger_entries")), ledger.read(rows("budgets"))) == (2, 0)
    assert ledger.read(balances())[70] == 100
    assert verified(ledger).findings == ()


def test_entries_of_an_account_are_listed_newest_first(ledger: Pool) -> None:
    record(ledger, *(Grant(t(f"g{number}"), ANN, number + 1) for number in range(5)))
    page = ledger.read(accounts.entries(ANN, 1 << 62, 2))
    assert [(each.transfer_id, each.amount, each.balance) for each in page] == [
        ("g4", 5, 15),
        ("g3", 4, 10),
    ]
    page = ledger.read(accounts.entries(ANN, page[-1].sequence, 10))
    assert [each.transfer_id for each in page] == ["g2", "g1", "g0"]


def test_a_serving_ledger_is_verified_while_it_is_written(ledger: Pool) -> None:
    """Pages are read at different times; nothing that is written meanwhile looks wrong."""
    record(ledger, Grant(t("g"), ANN, 1_000_000))

    async def both() -> LedgerReport:
        store = ledger.database.store

        async def spend() -> None:
            for number in range(60):
                await store.write(
                    transfers.record(
                        [reserve(f"r{number}", 9), post(f"p{number}", f"r{number}", 5)], NOW
                    )
                )
                if number % 7 == 0:
                    await store.write(blocks.seal(NOW, 5))

        spending = asyncio.create_task(spend())
        reports = [await verify(store)]
        while not spending.done():
            reports.append(await verify(store))
        await spending
        assert [report.findings for report in reports] == [()] * len(reports)
        return reports[-1]

    ledger.database.run(both())
