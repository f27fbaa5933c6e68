"""Output is kept once, in order, up to a cap; then it becomes one artifact."""

from __future__ import annotations

import pytest

from gpool.core.ids import TaskId
from gpool.core.model import Instant
from gpool.server.store.operations.tasks import artifacts, progress
from gpool.server.store.operations.tasks.progress import MAX_LOG_BYTES, TRUNCATED
from gpool.wire.frames import HandedBack, LogChunk
from tests.store.store_pool import Pool, returned

NEVER = Instant(1 << 62)


def text(pool: Pool, task: TaskId) -> bytes:
    return b"".join(line.data for line in pool.read(progress.logs(task, -1, 1000)))


def test_chunks_are_read_in_order_from_a_cursor(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.running(node)
    done = pool.record(node, LogChunk(task, 1, 0, 1, b"out\x00"), LogChunk(task, 1, 1, 2, b"err"))
    assert done.logged == (task,)
    first, second = pool.read(progress.logs(task, -1, 10))
    assert (first.epoch, first.stream, first.data) == (1, 1, b"out\x00")
    assert (second.stream, second.data) == (2, b"err")
    assert pool.read(progress.logs(task, first.cursor, 10)) == (second,)
    assert pool.read(progress.logs(task, -1, 1)) == (first,)


def test_a_chunk_sent_again_is_kept_once_and_one_sent_late_is_kept_too(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.running(node)
    one, two = LogChunk(task, 1, 0, 1, b"one"), LogChunk(task, 1, 1, 1, b"two")
    assert pool.record(node, two, two).logged == (task,)
    assert pool.record(node, one, two).logged == (task,)
    assert pool.record(node, one, two).logged == ()
    assert text(pool, task) == b"onetwo"


def test_a_later_attempts_output_comes_after_an_earlier_ones(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.running(node)
    pool.record(node, LogChunk(task, 1, 0, 1, b"a"), LogChunk(task, 1, 1, 1, b"b"))
    pool.record(node, HandedBack(task, 1))
    pool.grant(node, [task], epoch=2)
    pool.record(node, LogChunk(task, 2, 0, 1, b"c"))
    assert text(pool, task) == b"abc"
    assert [line.epoch for line in pool.read(progress.logs(task, -1, 9))] == [1, 1, 2]


def test_output_in_one_frame_with_the_end_is_kept(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.running(node)
    chunk = LogChunk(task, 1, 0, 1, b"last words")
    pool.record(node, returned(task), chunk)
    assert text(pool, task) == b"last words"


def test_output_after_the_end_is_not_kept(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.running(node)
    pool.record(node, returned(task))
    done = pool.record(node, LogChunk(task, 1, 0, 1, b"ghost"))
    assert (done.logged, done.refused) == ((), ())
    assert text(pool, task) == b""


def test_output_over_the_cap_is_cut_with_one_line_that_says_so(pool: Pool) -> None:
    node = pool.node("box")
    task, other = pool.running(node), pool.running(node)
    big = b"x" * (MAX_LOG_BYTES // 4)
    for sequence in range(4):
        pool.record(node, LogChunk(task, 1, sequence, 1, big))
    pool.record(node, LogChunk(task, 1, 4, 1, b"y"), LogChunk(task, 1, 5, 1, b"z"))
    pool.record(node, LogChunk(task, 1, 6, 1, b"z"), LogChunk(other, 1, 0, 1, b"fine"))
    kept = text(pool, task)
    assert len(kept) == MAX_LOG_BYTES + len(TRUNCATED)
    assert kept.endswith(b"x" + TRUNCATED)
    assert text(pool, other) == b"fine"


def test_the_logs_of_a_finished_task_are_replaced_by_one_artifact(pool: Pool) -> None:
    node = pool.node("box")
    task, open_, silent = pool.running(node), pool.running(node), pool.running(node)
    for wanted in (task, open_):
        pool.record(node, LogChunk(wanted, 1, 0, 1, b"hello"))
    pool.record(node, returned(task), returned(silent))
    ended = pool.view(task).row.finished_at
    assert pool.read(progress.finished_with_logs(ended, 10)) == ()
    assert pool.read(progress.finished_with_logs(NEVER, 10)) == (task,)
    pool.write(progress.seal_logs(task, "c" * 64, 5, pool.now()))
    assert pool.view(task).log_sha256 == "c" * 64
    assert text(pool, task) == b""
    assert pool.read(progress.finished_with_logs(NEVER, 10)) == ()
    assert pool.read(artifacts.visible("c" * 64, pool.ann)) == 5
    assert pool.read(artifacts.unreferenced(NEVER, 10)) == ()


def test_logs_are_not_sealed_while_the_task_may_still_print(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.running(node)
    pool.record(node, LogChunk(task, 1, 0, 1, b"hello"))
    pool.cancel(task)
    assert pool.read(progress.finished_with_logs(NEVER, 10)) == ()
    pool.write(progress.seal_logs(task, "c" * 64, 5, pool.now()))
    assert text(pool, task) == b"hello"
    pool.record(node, LogChunk(task, 1, 1, 1, b" again"))
    assert text(pool, task) == b"hello again"


@pytest.mark.parametrize("sequence", [-1, 1 << 32])
def test_a_chunk_that_would_stand_for_another_attempts_is_dropped(
    pool: Pool, sequence: int
) -> None:
    node = pool.node("box")
    task = pool.running(node)
    pool.record(node, LogChunk(task, 1, sequence, 1, b"odd"), LogChunk(task, 1, 0, 9, b"fine"))
    assert text(pool, task) == b"fine"
