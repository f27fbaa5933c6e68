"""Deposits by chain transfers in both databases: recorded with the cursor, credited once."""

from __future__ import annotations

from collections.abc import Sequence

from gpool.core.ids import UserId
from gpool.core.money.transfers import MAX_AMOUNT
from gpool.server.store.generated_rows import DepositCursorsRecord
from gpool.server.store.operations import deposits
from gpool.server.store.operations.deposits import ChainDeposit, DepositSource, ScannedBlocks
from gpool.server.store.operations.identity import account_deletion, accounts
from gpool.server.store.operations.money import accounts as ledger
from tests.store.store_pool import Pool, race

SOURCE = DepositSource(8453, "0x" + "70" * 20, "0x" + "71" * 20)
WALLET, OTHER = "0x" + "aa" * 20, "0x" + "bb" * 20


def a_deposit(
    number: int, amount: int, block: int = 5, sender: str = WALLET, log_index: int = 0
) -> ChainDeposit:
    return ChainDeposit(f"0x{number:064x}", log_index, block, f"0x{block:064x}", sender, amount)


def blocks(pool: Pool, after: int, block: int, found: Sequence[ChainDeposit]) -> ScannedBlocks:
    ids = [next(pool.numbers) for _ in found]
    return ScannedBlocks(SOURCE, after, block, f"0x{block:064x}", found, ids)


def scan(pool: Pool, after: int, block: int, *found: ChainDeposit) -> bool:
    return pool.write(deposits.record_scanned(blocks(pool, after, block, found), pool.now()))


def opened(pool: Pool) -> None:
    pool.write(deposits.open_cursor(SOURCE, 0, pool.now()))
    pool.write(accounts.link_wallet(pool.ann, WALLET, pool.now()))


def cursor(pool: Pool) -> DepositCursorsRecord:
    found = pool.read(deposits.cursor(SOURCE))
    assert found is not None
    return found


def balance(pool: Pool, user: UserId) -> int:
    return sum(each.balance for each in pool.read(ledger.balances(("user", user))))


def states(pool: Pool, user: UserId) -> list[tuple[str, str]]:
    return [(row.amount, row.status) for row in pool.read(deposits.deposits_of(user, 100))]


def test_deposits_and_cursor_are_recorded_together_and_once(pool: Pool) -> None:
    opened(pool)
    pool.write(deposits.open_cursor(SOURCE, 99, pool.now()))
    one, two = a_deposit(1, 30), a_deposit(1, 4, log_index=1)
    assert scan(pool, 0, 7, one, two)
    assert (cursor(pool).block, cursor(pool).block_hash) == (7, f"0x{7:064x}")
    assert not scan(pool, 0, 7, one, two)  # a slower scan of the same blocks
    assert balance(pool, pool.ann) == 34
    pool.write(deposits.resume(SOURCE, 5, pool.now()))
    assert (cursor(pool).block, cursor(pool).block_hash) == (4, "")
    assert scan(pool, 4, 9, one, two, a_deposit(2, 100, block=8))
    assert (balance(pool, pool.ann), len(states(pool, pool.ann))) == (134, 3)


def test_concurrent_scans_credit_a_deposit_once(pool: Pool) -> None:
    opened(pool)
    now = pool.now()
    scans = [deposits.record_scanned(blocks(pool, 0, 7, [a_deposit(1, 30)]), now) for _ in range(8)]
    assert sorted(race(pool.database, scans)) == [False] * 7 + [True]
    assert balance(pool, pool.ann) == 30


def test_an_unmatched_deposit_is_credited_to_the_account_that_binds_its_wallet(pool: Pool) -> None:
    opened(pool)
    bob = pool.user("bob")
    scan(pool, 0, 7, a_deposit(1, 30, sender=OTHER), a_deposit(2, 5, sender=OTHER))
    assert [row.status for row in pool.read(deposits.open_deposits(10))] == ["unmatched"] * 2
    assert not pool.read(deposits.has_bound(SOURCE))
    pool.write(accounts.link_wallet(bob, OTHER, pool.now()))
    assert pool.read(deposits.has_bound(SOURCE))
    ids = [next(pool.numbers) for _ in range(4)]
    now = pool.now()
    crediting = [deposits.credit_bound(SOURCE, ids, now) for _ in range(4)]
    assert sorted(race(pool.database, crediting)) == [0, 0, 0, 2]
    assert (balance(pool, bob), balance(pool, pool.ann)) == (35, 0)
    assert not pool.read(deposits.has_bound(SOURCE))
    assert pool.read(deposits.open_deposits(10)) == ()


def test_a_halt_stops_crediting_until_it_is_resumed(pool: Pool) -> None:
    opened(pool)
    scan(pool, 0, 7, a_deposit(1, 30, sender=OTHER), a_deposit(2, 1))
    pool.write(deposits.halt(SOURCE, 6, "an older block", pool.now()))
    assert cursor(pool).halted_at is None
    pool.write(deposits.halt(SOURCE, 7, "changed", pool.now()))
    assert cursor(pool).why == "changed"
    pool.write(accounts.link_wallet(pool.ann, OTHER, pool.now()))
    assert not scan(pool, 7, 8, a_deposit(3, 500, block=8))
    assert not pool.read(deposits.has_bound(SOURCE))
    assert pool.write(deposits.credit_bound(SOURCE, [next(pool.numbers)], pool.now())) == 0
    assert balance(pool, pool.ann) == 1
    pool.write(deposits.resume(SOURCE, 5, pool.now()))
    assert states(pool, pool.ann) == [("1", "credited")]  # the others must be found again
    assert scan(pool, 4, 8, a_deposit(3, 500, block=8))
    assert balance(pool, pool.ann) == 501


def test_too_large_and_mined_again_deposits_are_held(pool: Pool) -> None:
    opened(pool)
    scan(pool, 0, 7, a_deposit(1, 3), a_deposit(2, 1 << 255), a_deposit(3, MAX_AMOUNT))
    pool.write(deposits.resume(SOURCE, 5, pool.now()))
    scan(pool, 4, 9, a_deposit(1, 3, block=6, log_index=4), a_deposit(2, 1 << 255, block=6))
    assert balance(pool, pool.ann) == 3 + MAX_AMOUNT
    held = sorted(row.amount for row in pool.read(deposits.open_deposits(10)))
    assert held == sorted(["3", str(1 << 255)])


def test_a_deleted_accounts_deposits_lose_their_sender_and_are_not_credited_again(
    pool: Pool,
) -> None:
    opened(pool)
    bob = pool.user("bob")
    pool.write(accounts.link_wallet(bob, OTHER, pool.now()))
    scan(pool, 0, 7, a_deposit(1, 30, sender=OTHER))
    pool.write(account_deletion.delete_account(bob, pool.now()))
    pool.write(accounts.link_wallet(pool.ann, OTHER, pool.now()))
    pool.write(deposits.resume(SOURCE, 1, pool.now()))
    scan(pool, 0, 7, a_deposit(1, 30, sender=OTHER))
    assert (balance(pool, pool.ann), states(pool, pool.ann)) == (0, [])
