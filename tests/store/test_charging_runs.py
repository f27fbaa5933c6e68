"""Whole lives of charged tasks: `max_cost` is never exceeded, and a killed process changes nothing of the result."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from gpool.server.actions.money.verification import verify
from gpool.server.store.drivers.sqlite import SqliteStore
from tests.store.test_ledger_moves import SameTransaction
from tests.tools.charging_runs import ChargedTasks
from tests.tools.processes import PATIENCE_S

SOAKS = bool(os.environ.get("GPOOL_SOAK"))
LIVES = 1000 if SOAKS else 150
KILLS = 200 if SOAKS else 12
SEED = 51
COMPARED = (
    "SELECT task_id, epoch, node_id, charged_us, microcredits, fee, reason, state, transfer_id FROM charges ORDER BY 1, 2, 3",
    "SELECT id, balance FROM ledger_accounts ORDER BY id",
    "SELECT id, status, reason, epoch FROM tasks ORDER BY id",
    "SELECT * FROM usage_totals",
)


def copied(migrated_file: Path, folder: Path, name: str) -> Path:
    shutil.copy(migrated_file, folder / name)
    return folder / name


def lives(path: Path, count: int) -> list[int]:
    """Run them; return how far each stayed below its cap."""
    left = []
    with closing(SqliteStore.inline(path, synchronous="OFF")) as store:
        tasks = ChargedTasks(store, SEED)
        for number in range(count):
            life = tasks.run(number)
            left.append(life.max_cost - life.cost)
        assert asyncio.run(verify(SameTransaction(store))).findings == ()
    return left


def rows(path: Path) -> list[list[tuple[object, ...]]]:
    with closing(sqlite3.connect(path)) as raw:
        assert raw.execute("SELECT COUNT(*) FROM meters").fetchone() == (0,)
        open_states = raw.execute("SELECT COUNT(*) FROM charges WHERE state = 'metered'").fetchone()
        assert open_states == (0,)
        pending = "SELECT COUNT(*) FROM pending_transfers WHERE resolved_by IS NULL"
        assert raw.execute(pending).fetchone() == (0,)
        return [raw.execute(sql).fetchall() for sql in COMPARED]


def test_no_life_with_retries_reclaims_and_preemptions_exceeds_its_max_cost(
    migrated_file: Path, tmp_path: Path
) -> None:
    left = lives(copied(migrated_file, tmp_path, "lives.db"), LIVES)
    assert min(left) == 0, "some are used up to the micro-credit"
    assert max(left) > 0


def test_a_process_killed_between_any_two_steps_ends_with_the_same_charges(
    migrated_file: Path, tmp_path: Path
) -> None:
    """The reference was never killed; the other one is killed many times and continues from its rows."""
    count = 6
    plain = copied(migrated_file, tmp_path, "plain.db")
    lives(plain, count)
    killed = copied(migrated_file, tmp_path, "killed.db")
    dice, kills = random.Random(SEED), 0
    while kills < KILLS:
        words = [str(killed), str(SEED), "0", str(count), str(dice.randint(5, 400))]
        done = subprocess.run(
            [sys.executable, "-m", "tests.tools.charging_runs", *words],
            cwd=Path(__file__).resolve().parents[2],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        kills += 1
    lives(killed, count)
    assert kills >= min(KILLS, 3)
    assert rows(killed) == rows(plain)
