"""Many operations in one commit: the refused fail alone, the broken do not harm the others, the answered are durable."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpool.core.errors import GpoolError, InternalFault, NotFound, Unreachable
from gpool.core.ids import BatchId, NodeId, UserId
from gpool.core.model import Instant, Offer
from gpool.server.store import open_inline, open_store, operation
from gpool.server.store.drivers.shared import Waiting
from gpool.server.store.drivers.sqlite_connection import Connection
from gpool.server.store.operations import nodes
from gpool.server.store.operations.identity import users
from gpool.server.store.operations.tasks import tasks
from gpool.server.store.operations.tasks.submissions import SubmittedTasks
from gpool.server.store.protocol import Operation, Statement
from tests.store.store_pool import Database, Pool, opened, submit_one


def together(database: Database, *operations: Operation) -> list:
    """All of them put before the writer can answer any."""

    async def all_at_once() -> list:
        writes = (database.store.write(operation) for operation in operations)
        return await asyncio.gather(*writes, return_exceptions=True)

    return database.run(all_at_once())


def test_a_refused_operation_fails_alone(pool: Pool, database: Database) -> None:
    good = [pool.submission() for _ in range(20)]
    answers = together(
        database,
        *(submit_one(s) for s in good[:10]),
        submit_one(pool.submission(batch=BatchId(1))),
        *(submit_one(s) for s in good[10:]),
    )
    assert isinstance(answers.pop(10), NotFound)
    assert all(isinstance(answer, SubmittedTasks) for answer in answers)
    assert len(pool.read(tasks.tasks(None, None, 100))) == 20


def test_an_operation_the_database_refuses_fails_alone(pool: Pool, database: Database) -> None:
    first, last = pool.submission(2), pool.submission(2)
    taken = pool.submission()
    pool.write(submit_one(taken))
    clash = pool.submission(batch=None)
    twice = type(clash)(
        *(getattr(clash, name) for name in clash.__slots__[:6]), taken.tasks, clash.at
    )
    answers = together(database, *(submit_one(s) for s in (first, twice, last)))
    assert isinstance(answers[1], InternalFault)
    assert isinstance(answers[0], SubmittedTasks)
    assert isinstance(answers[2], SubmittedTasks)
    assert len(pool.read(tasks.tasks(None, None, 100))) == 5
    assert pool.read(tasks.batch(clash.batch, None)) is None


@operation
def write_then_break(name: str, at: Instant) -> Operation[None]:
    yield Statement(
        "INSERT INTO invites (hashed, owner_id, expires_at, created_at) VALUES (:name, 1, 1, :at)",
        {"name": name, "at": at},
    )
    raise ZeroDivisionError("a bug of ours")


def test_a_bug_in_one_operation_rolls_back_only_that_one(pool: Pool, database: Database) -> None:
    good = [pool.submission() for _ in range(4)]
    answers = together(
        database,
        submit_one(good[0]),
        write_then_break("token", pool.now()),
        *(submit_one(s) for s in good[1:]),
    )
    assert isinstance(answers[1], ZeroDivisionError)
    assert len(pool.read(tasks.tasks(None, None, 100))) == 4
    with pytest.raises(GpoolError, match="not known"):
        pool.write(
            nodes.create_node(NodeId(5), "box", None, "token", "s", Offer(1, 1, 1), (), pool.now())
        )


@operation
def write_then_refuse(name: str, at: Instant) -> Operation[None]:
    yield Statement(
        "INSERT INTO invites (hashed, owner_id, expires_at, created_at) VALUES (:name, 1, 1, :at)",
        {"name": name, "at": at},
    )
    raise NotFound("too late to say so")


def test_what_a_late_refusal_wrote_never_stays(pool: Pool, database: Database) -> None:
    good = [pool.submission() for _ in range(4)]
    answers = together(
        database,
        submit_one(good[0]),
        write_then_refuse("token", pool.now()),
        *(submit_one(s) for s in good[1:]),
    )
    assert isinstance(answers.pop(1), NotFound)
    assert all(isinstance(answer, SubmittedTasks) for answer in answers)
    with pytest.raises(NotFound, match="too late"):
        pool.write(write_then_refuse("token", pool.now()))
    with pytest.raises(GpoolError, match="not known"):
        pool.write(
            nodes.create_node(NodeId(5), "box", None, "token", "s", Offer(1, 1, 1), (), pool.now())
        )


def test_a_bare_generator_never_passes_for_done_when_it_cannot_run_again(
    pool: Pool, database: Database
) -> None:
    at = pool.now()

    def bare() -> Operation[str]:
        yield Statement("SELECT 1")
        return "done"

    assert pool.write(bare()) == "done"
    first, broken, last = together(database, bare(), write_then_break("token", at), bare())
    assert isinstance(broken, ZeroDivisionError)
    for answer in (first, last):
        assert answer == "done" or isinstance(answer, InternalFault)


@operation
def cut_the_line() -> Operation[None]:
    yield Statement("SELECT pg_terminate_backend(pg_backend_pid())")


def test_a_lost_connection_is_unreachable_and_then_made_again(
    postgres: Callable[..., str],
) -> None:
    with opened(postgres()) as database:
        pool = Pool(database)
        lost = together(database, submit_one(pool.submission()), cut_the_line())
        assert [type(answer) for answer in lost] == [Unreachable, Unreachable]
        assert pool.read(tasks.tasks(None, None, 10)) == ()
        (task,) = pool.submit()
        assert pool.view(task).row.id == task
        with pytest.raises(Unreachable):
            pool.read(cut_the_line())
        assert pool.view(task).row.id == task


def test_what_is_answered_is_seen_by_every_other_connection(pool: Pool, database: Database) -> None:
    async def watch() -> int:
        other = await open_store(database.url)
        seen = 0
        for _ in range(20):
            done = await database.store.write(submit_one(pool.submission()))
            seen += await other.read(tasks.task(done.tasks[0].id, pool.ann)) is not None
        await other.close()
        return seen

    assert database.run(watch()) == 20


def test_what_waits_when_the_store_closes_is_still_written(pool: Pool, database: Database) -> None:
    submissions = [pool.submission() for _ in range(50)]

    async def close_at_once() -> list[SubmittedTasks]:
        writes = [asyncio.ensure_future(database.store.write(submit_one(s))) for s in submissions]
        await asyncio.gather(*(asyncio.wait([write], timeout=0) for write in writes[:1]))
        await database.store.close()
        return await asyncio.gather(*writes)

    assert len(database.run(close_at_once())) == 50
    with pytest.raises(Unreachable, match="shutting down"):
        pool.write(submit_one(pool.submission()))
    database.reopen()
    assert len(pool.read(tasks.tasks(None, None, 100))) == 50


def test_an_asker_that_goes_away_does_not_disturb_the_others(
    pool: Pool, database: Database
) -> None:
    gone, stays = pool.submission(), pool.submission()

    async def leave() -> object:
        leaving = asyncio.ensure_future(database.store.write(submit_one(gone)))
        staying = asyncio.ensure_future(database.store.write(submit_one(stays)))
        await asyncio.wait([leaving], timeout=0)
        leaving.cancel()
        return await staying

    assert isinstance(database.run(leave()), SubmittedTasks)


CHILD = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from tests.store.store_pool import COMMAND
from gpool.core.ids import BatchId, SpecId, TaskId, UserId
from gpool.core.model import Instant
from gpool.server.store import open_store
from gpool.server.store.operations.tasks import submissions
from gpool.server.store.operations.tasks.submissions import NewTask, Submission

async def main():
    store = await open_store(sys.argv[1])
    async def submit(lane):
        for number in range(100000):
            task = TaskId(int(sys.argv[3]) * 10**9 + lane * 10**6 + number)
            s = Submission(BatchId(task), True, True, SpecId(task), COMMAND, UserId(1000), [NewTask(task, 0)], Instant(1))
            await store.write(submissions.submit([s]))
            print(task, flush=True)
    await asyncio.gather(*(submit(lane) for lane in range(4)))

asyncio.run(main())
"""


def test_a_killed_process_loses_nothing_it_acknowledged(pool: Pool, database: Database) -> None:
    """Each time others: what the last one had sent may still be on its way into the database."""
    root = str(Path(__file__).parents[2])
    for turn in ("1", "2", "3"):
        with subprocess.Popen(
            [sys.executable, "-c", CHILD, database.url, root, turn], stdout=subprocess.PIPE
        ) as child:
            said = [child.stdout.readline() for _ in range(150)]
            child.kill()
            said += child.stdout.readlines()
        acknowledged = [int(line) for line in said if line.endswith(b"\n")]
        assert len(acknowledged) >= 150
        database.reopen()
        lost = [task for task in acknowledged if pool.read(tasks.task(task, None)) is None]
        assert lost == []


def test_inline_an_abandoned_group_leaves_no_trace(tmp_path: Path) -> None:
    store = open_inline(tmp_path / "inline.db", synchronous="OFF")
    store.begin_group()
    store.write_now(nodes.create_invite("token", 1, Instant(5), Instant(1)))
    assert store.read_now(invites()) == 0
    store.abandon_group()
    assert store.read_now(invites()) == 0
    store.begin_group()
    store.write_now(nodes.create_invite("token", 1, Instant(5), Instant(1)))
    store.commit_group()
    assert store.read_now(invites()) == 1
    answers = store.group_now(
        [
            nodes.create_invite("second", 1, Instant(5), Instant(1)),
            nodes.greet(NodeId(9), Offer(1, 1, 1), (), Instant(1)),
            users.user_by_name("nobody"),
        ]
    )
    assert answers[0] is None
    assert isinstance(answers[1], NotFound)
    assert store.read_now(invites()) == 2
    store.close()


@operation
def invites() -> Operation[int]:
    rows = yield Statement("SELECT COUNT(*) FROM invites")
    return rows[0][0]


class CountsItsWaits(Connection):
    waits = 0

    def begin(self) -> None:
        self.waits += 1
        super().begin()


def test_a_locked_database_fails_a_whole_group_after_one_wait(
    migrated_file: Path, tmp_path: Path
) -> None:
    """Not one wait for each: with a group of 256 and 30 s that would be hours."""
    path = tmp_path / "locked.db"
    shutil.copy(migrated_file, path)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    connection = CountsItsWaits(str(path), writes=True, busy_timeout_s=0.5)
    loop = asyncio.new_event_loop()
    group = [Waiting(users.user_by_name("a"), loop.create_future()) for _ in range(200)]
    connection.group(group)
    assert connection.waits == 1
    assert all(isinstance(waiting.error, Unreachable) for waiting in group)
    holder.execute("ROLLBACK")
    connection.group(group[:1])
    holder.close()
    connection.close()
    loop.close()


def test_a_full_disk_refuses_and_says_so(migrated_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "full.db"
    shutil.copy(migrated_file, path)
    connection = Connection(str(path), writes=True)
    connection.execute(Statement("PRAGMA max_page_count = 1"))
    big = users.add_key(1, UserId(1), "x" * 5_000_000, "hash", Instant(1))
    with pytest.raises(Unreachable, match="disk is full"):
        connection.alone(big)
    assert connection.alone(users.user_by_key("hash")) is None
    connection.close()
