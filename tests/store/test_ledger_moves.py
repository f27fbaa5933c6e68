"""Tens of thousands of random money moves on a real SQLite file, with crashes between any two steps, and tampered rows.

`make test` runs 50,000 moves in one process and 12 processes that kill themselves; GPOOL_SOAK=1 runs 1,000,000 and 200.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

from gpool.core.money.transfers import (
    AccountKind,
    TransferKind,
    TransferOutcome,
    TransferRequest,
    floor_of,
)
from gpool.server.actions.money.verification import LedgerReport, verify
from gpool.server.store.drivers.sqlite import InlineStore, SqliteStore
from gpool.server.store.operations.money import blocks, transfers
from gpool.server.store.protocol import Operation, Statement, operation
from gpool.server.store.rows import select, values
from tests.tools.ledger_moves import ModelBooks, at_of, batch_of, open_all
from tests.tools.processes import PATIENCE_S

T = TypeVar("T")
SOAKS = bool(os.environ.get("GPOOL_SOAK"))
MOVES = 1_000_000 if SOAKS else 50_000
KILLS = 200 if SOAKS else 12
TAMPERED = 1_000
MOVED, REPEATED = TransferOutcome.MOVED, TransferOutcome.REPEATED
SEED = 16
_FLOORS = " ".join(f"WHEN '{kind.value}' THEN {floor_of(kind)}" for kind in AccountKind)


class _Sums(NamedTuple):
    total: int
    least: int  # above the floor


@operation
def sums() -> Operation[_Sums]:
    [found] = yield from select(
        _Sums,
        f"SELECT SUM(balance), MIN(balance - CASE kind {_FLOORS} END) FROM ledger_accounts",  # noqa: S608
    )
    return found


class _Balance(NamedTuple):
    id: int
    balance: int
    sequence: int


@operation
def balances() -> Operation[list[_Balance]]:
    return (
        yield from select(_Balance, "SELECT id, balance, sequence FROM ledger_accounts ORDER BY id")
    )


class _Types(NamedTuple):
    table: str
    kind: str
    rows: int


@operation
def types() -> Operation[list[_Types]]:
    """Storage classes of every amount: SQLite would keep a float as REAL."""
    columns = (
        ("ledger_entries", "amount"),
        ("ledger_entries", "balance"),
        ("ledger_accounts", "balance"),
        ("pending_transfers", "amount"),
        ("pending_transfers", "returned"),
        ("ledger_spending", "amount"),
    )
    parts = (
        f"SELECT '{table}.{column}', typeof({column}), COUNT(*) FROM {table} GROUP BY 1, 2"  # noqa: S608
        for table, column in columns
    )
    return (yield from select(_Types, " UNION ALL ".join(parts)))


class _Crash(BaseException):
    """The transaction ends between two statements, as if the connection were gone."""


@operation
def crashing(op: Operation[T], after: int) -> Operation[T]:
    rows: object = None
    for _ in range(after):
        try:
            statement = op.send(rows)
        except StopIteration:
            break
        rows = yield statement
    raise _Crash


class SameTransaction:
    """Reads in the transaction that the store has open: uncommitted changes are seen, and rolled back after."""

    def __init__(self, store: InlineStore) -> None:
        self._store = store

    async def read(self, op: Operation[T]) -> T:
        return self._store.write_now(op)


def verified(store: InlineStore) -> LedgerReport:
    return asyncio.run(verify(SameTransaction(store)))


@pytest.fixture
def database(migrated_file: Path, tmp_path: Path) -> Path:
    shutil.copy(migrated_file, tmp_path / "ledger.db")
    return tmp_path / "ledger.db"


def check_model(store: InlineStore, model: ModelBooks) -> None:
    stored = [tuple(row) for row in store.read_now(balances())]
    expected = sorted((each.id, each.balance, each.sequence) for each in model.accounts.values())
    assert stored == expected


def test_random_moves_with_crashes_sum_to_zero_at_every_step(database: Path) -> None:
    """Each write may lose its transaction between two statements, after which it is repeated; the file is reopened too."""
    dice, model = random.Random(SEED), ModelBooks()
    store = SqliteStore.inline(database, synchronous="OFF")
    store.write_now(open_all())
    crashes, moved, outcomes = 0, 0, set()
    for batch in count():
        if moved >= MOVES:
            break
        requests, at = batch_of(SEED, batch), at_of(batch)
        while dice.random() < 0.2:
            crashes += 1
            store.begin_group()
            with pytest.raises(_Crash):
                store.write_now(crashing(transfers.record(requests, at), dice.randrange(12)))
            store.abandon_group()
            if dice.random() < 0.2:
                store.close()
                store = SqliteStore.inline(database, synchronous="OFF")
        done = store.write_now(transfers.record(requests, at))
        if dice.random() < 0.05:  # committed, but the answer was lost: the caller repeats it
            again = done_ones(requests, done.outcomes)
            assert set(store.write_now(transfers.record(again, at)).outcomes) <= {REPEATED}
        assert done.outcomes == model.write(requests, at).outcomes
        found = store.read_now(sums())
        assert found.total == 0
        assert found.least >= 0
        outcomes |= set(done.outcomes)
        moved += done.outcomes.count(MOVED)
        if batch % 50 == 0:
            store.write_now(blocks.seal(at, 5_000))
    check_model(store, model)
    while store.write_now(blocks.seal(at, 5_000)):
        pass
    report = verified(store)
    assert report.findings == ()
    assert report.transfers == moved
    assert {row.kind for row in store.read_now(types())} == {"integer"}
    assert crashes > batch // 8
    assert len(outcomes) >= 8  # refusals of most kinds occur as well
    store.close()


def test_a_process_killed_between_any_two_steps_neither_loses_nor_doubles_a_move(
    database: Path,
) -> None:
    """The batch that was being written is there whole or not at all; written again, it moves once."""
    dice, model, first, committed = random.Random(SEED), ModelBooks(), 0, 0
    for number in range(KILLS):
        step = -dice.randint(1, 8) if number % 3 == 0 else dice.randint(1, 150)
        words = [str(database), str(SEED), str(first), str(first + 40), str(step)]
        done = subprocess.run(
            [sys.executable, "-m", "tests.tools.ledger_moves", *words],
            cwd=Path(__file__).resolve().parents[2],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        acknowledged = [int(word) for word in done.stdout.split()]
        assert acknowledged == list(range(first, first + len(acknowledged)))
        with closing(SqliteStore.inline(database)) as store:
            for batch in acknowledged:
                model.write(batch_of(SEED, batch), at_of(batch))
            first += len(acknowledged)
            committed += settle(store, model, first)
            first += 1
            assert store.read_now(sums()).total == 0
            if number % (KILLS // 12) == 0:  # a long soak does not recompute everything 200 times
                assert verified(store).findings == ()
    assert committed == sum(number % 3 == 0 for number in range(KILLS))


def settle(store: InlineStore, model: ModelBooks, batch: int) -> bool:
    """Finish the batch that a killed process was writing; return whether it had committed it."""
    store.write_now(open_all())
    requests, at = batch_of(SEED, batch), at_of(batch)
    expected = model.write(requests, at)
    moved = {transfer.id for transfer in expected.transfers}
    there = moved & store.read_now(transfer_ids())
    assert there in (set(), moved)
    again = done_ones(requests, expected.outcomes) if there else requests
    outcomes = store.write_now(transfers.record(again, at)).outcomes
    assert set(outcomes) == {REPEATED} if there else outcomes == expected.outcomes
    check_model(store, model)
    return bool(there)


@operation
def transfer_ids() -> Operation[set[str]]:
    return set((yield from values(str, "SELECT id FROM ledger_transfers")))


def done_ones(
    requests: Sequence[TransferRequest], outcomes: Sequence[TransferOutcome]
) -> list[TransferRequest]:
    """Requests that have moved: a refused one may be possible later, and would move then."""
    return [each for each, outcome in zip(requests, outcomes, strict=True) if outcome.is_done]


# ---- tampered rows


class Tampering(NamedTuple):
    table: str
    key: str
    column: str  # empty: the row is deleted
    value: Any


TABLES = {
    "ledger_accounts": ("id",),
    "ledger_transfers": ("id",),
    "ledger_entries": ("account_id", "sequence"),
    "pending_transfers": ("id",),
    "ledger_blocks": ("number",),
    "ledger_spending": ("account_id", "month"),
}
WORDS = {
    "ledger_accounts": [kind.value for kind in AccountKind],
    "ledger_transfers": [kind.value for kind in TransferKind],
}


def tamperings(database: Path, dice: random.Random) -> Iterator[Tampering]:
    """Changes of one row each: another value in any column, or the row is gone."""
    with closing(sqlite3.connect(database)) as raw:
        raw.row_factory = sqlite3.Row
        rows = {table: raw.execute(f"SELECT * FROM {table}").fetchall() for table in TABLES}  # noqa: S608
    while True:
        table = dice.choice(list(TABLES))
        row = dice.choice(rows[table])
        key = " AND ".join(f"{name} = {row[name]!r}" for name in TABLES[table])
        if dice.random() < 0.1:
            yield Tampering(table, key, "", None)
            continue
        column = dice.choice(row.keys())
        yield Tampering(table, key, column, _other(dice, table, column, row[column]))


def _other(dice: random.Random, table: str, column: str, value: Any) -> Any:
    if column == "kind" and dice.random() < 0.7:
        return dice.choice([word for word in WORDS[table] if word != value])
    if isinstance(value, int):
        return value + dice.choice((-1, 1, -1_000_000, 1_000_000, 1 << 40))
    if value is None:
        return dice.choice(("r-0-1", "x"))
    place = dice.randrange(len(value))
    return value[:place] + dice.choice("0123456789abcdef:-") + value[place + 1 :]


@operation
def tampered(change: Tampering) -> Operation[None]:
    if change.column:
        sql = f"UPDATE {change.table} SET {change.column} = :value WHERE {change.key}"  # noqa: S608
        yield Statement(sql, {"value": change.value})
    else:
        yield Statement(f"DELETE FROM {change.table} WHERE {change.key}")  # noqa: S608


@operation
def all_rows(table: str) -> Operation[object]:
    rows = yield Statement(f"SELECT * FROM {table}")  # noqa: S608
    return rows


def test_each_of_a_thousand_tampered_rows_is_found(database: Path) -> None:
    """One row is changed, added to nothing else and rolled back; the untouched books are the control."""
    dice = random.Random(SEED)
    with closing(SqliteStore.inline(database, synchronous="OFF")) as store:
        store.write_now(open_all())
        for batch in range(6):
            store.write_now(transfers.record(batch_of(SEED, batch), at_of(batch)))
            store.write_now(blocks.seal(at_of(batch), 100))
        assert verified(store).findings == ()
        plain = {table: store.read_now(all_rows(table)) for table in TABLES}
        found, tried, by_table, missed = 0, 0, set(), []
        for change in tamperings(database, dice):
            store.begin_group()
            try:
                store.write_now(tampered(change))
                if store.write_now(all_rows(change.table)) == plain[change.table]:
                    continue  # another letter that is the same one
                tried += 1
                findings = verified(store).findings
            except sqlite3.IntegrityError:
                continue  # the database itself refuses it
            finally:
                store.abandon_group()
            found += bool(findings)
            by_table.add((change.table, change.column))
            if not findings:
                missed.append(change)
            if change.table == "ledger_entries" and change.column in ("amount", "balance"):
                account, sequence = (part.split(" = ")[1] for part in change.key.split(" AND "))
                assert any(f"entry {account}/{sequence} " in each.thing for each in findings)
            if tried == TAMPERED:
                break
        assert missed == []
        assert found == TAMPERED
        assert len(by_table) > 35
        assert verified(store).findings == ()
