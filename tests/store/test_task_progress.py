"""Progress of a task in the store: of its present attempt, from the node that holds it, on both databases."""

from __future__ import annotations

from gpool.core.model import EndReason, Instant
from gpool.server.actions.tasks.documents import task as document_of
from gpool.server.store.operations.tasks import deletion
from gpool.wire.documents import ReportedProgress
from gpool.wire.frames import Finished, Hold, Progressed
from tests.store.store_pool import Pool


def shown(pool: Pool, task: int) -> ReportedProgress | None:
    return document_of(pool.view(task)).progress  # type: ignore[arg-type]


def test_the_newest_progress_is_shown_and_stays_after_the_end(pool: Pool) -> None:
    node = pool.node("one")
    task = pool.running(node)
    assert shown(pool, task) is None
    done = pool.record(node, Progressed(task, 1, 1, "a"), Progressed(task, 1, 400_000, "epoch 4"))
    assert done.noted == (task,)
    found = shown(pool, task)
    assert found is not None
    assert (found.fraction, found.text) == (0.4, "epoch 4")
    pool.record(node, Finished(task, 1, EndReason.EXITED, 0))
    assert shown(pool, task) == found
    pool.write(deletion.shrink_expired(Instant(1 << 60), pool.now(), 10))
    assert shown(pool, task) is None


def test_progress_of_another_node_or_epoch_is_refused(pool: Pool) -> None:
    node, other = pool.node("one"), pool.node("two")
    task = pool.running(node)
    assert pool.record(other, Progressed(task, 1, 5, "x")).refused
    assert pool.record(node, Progressed(task, 2, 5, "x")).refused
    assert pool.record(node, Progressed(task + 1, 1, 5, "")).refused == (Hold(task + 1, 1),)
    assert shown(pool, task) is None


def test_a_new_attempt_begins_without_progress(pool: Pool) -> None:
    node = pool.node("one")
    task = pool.running(node)
    pool.record(node, Progressed(task, 1, 5, "first attempt"))
    pool.record(node, Finished(task, 1, EndReason.PREEMPTED, 137))
    assert shown(pool, task) is not None, "until it is leased again"
    assert pool.grant(node, [task], epoch=2).refused == ()
    assert shown(pool, task) is None


def test_a_text_like_a_sealed_one_is_only_a_text(pool: Pool) -> None:
    node = pool.node("one")
    task = pool.running(node)
    pool.record(node, Progressed(task, 1, 5, "\x1agpool:AAAA"))
    found = shown(pool, task)
    assert found is not None
    assert found.text == "\x1agpool:AAAA"
