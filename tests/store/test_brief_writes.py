"""Brief operations may run where they are asked for; nobody can tell, but by the time it takes."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from gpool.core.errors import NotFound
from gpool.core.ids import BatchId
from gpool.server.store import open_store, operation
from gpool.server.store.operations.identity import users
from gpool.server.store.operations.tasks import tasks
from gpool.server.store.protocol import BRIEF_ROWS, Operation, Statement, brief, is_brief
from tests.store.store_pool import Database, Pool, submit_one


@operation
def noted(number: int, order: list[int]) -> Operation[int]:
    yield Statement("SELECT 1")
    order.append(number)
    return number


def test_an_operation_of_many_rows_is_never_brief() -> None:
    assert is_brief(brief(noted(1, []), BRIEF_ROWS))
    assert not is_brief(brief(noted(1, []), BRIEF_ROWS + 1))
    assert not is_brief(noted(1, []))


@pytest.mark.parametrize("pattern", ["bbbb", "blbl", "lbbl", "bbbl", "llbb"])
def test_operations_always_run_in_the_order_of_the_calls(database: Database, pattern: str) -> None:
    order: list[int] = []

    async def all_at_once() -> list[int]:
        made = [
            brief(noted(n, order)) if kind == "b" else noted(n, order)
            for n, kind in enumerate(pattern * 20)
        ]
        return list(await asyncio.gather(*map(database.store.write, made)))

    answers = database.run(all_at_once())
    assert answers == order == list(range(len(pattern) * 20))


def test_a_refused_brief_operation_fails_alone(pool: Pool, database: Database) -> None:
    good = [pool.submission() for _ in range(4)]

    async def all_at_once() -> list[object]:
        made = [*map(submit_one, good), submit_one(pool.submission(batch=BatchId(1)))]
        writes = (database.store.write(brief(op)) for op in made)
        return await asyncio.gather(*writes, return_exceptions=True)

    answers = database.run(all_at_once())
    assert isinstance(answers.pop(), NotFound)
    assert not any(isinstance(answer, Exception) for answer in answers)
    assert len(pool.read(brief(tasks.tasks(None, None, 100)))) == 4


def test_a_lock_of_somebody_elses_never_stops_the_loop(tmp_path: Path) -> None:
    async def locked() -> None:
        store = await open_store(f"sqlite:///{tmp_path}/gpool.db")
        other = sqlite3.connect(
            tmp_path / "gpool.db", isolation_level=None, check_same_thread=False
        )
        other.execute("BEGIN IMMEDIATE")
        writing = asyncio.create_task(store.write(brief(users.user_by_name("nobody"))))
        await asyncio.to_thread(other.execute, "SELECT 1")  # the loop turns meanwhile
        assert not writing.done()
        other.execute("ROLLBACK")
        assert await writing is None
        other.close()
        await store.close()

    asyncio.run(locked())
