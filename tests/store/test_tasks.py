"""Submitting, listing and cancelling: what users do, each with their own tasks only."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpool.core.errors import Conflict, Invalid, NotFound
from gpool.core.ids import BatchId, TaskId
from gpool.core.model import EndReason, InputFile, TaskKind, TaskSpec, TaskStatus
from gpool.server.store.operations import nodes
from gpool.server.store.operations.leases import leases
from gpool.server.store.operations.tasks import artifacts, tasks
from gpool.server.store.operations.tasks.submissions import MissingArtifacts, SubmittedTasks
from gpool.wire.frames import HandedBack, Hold, Released, Started
from tests.store.store_pool import COMMAND, Pool, exited, returned

FUNCTION = TaskSpec(
    TaskKind.FUNCTION,
    "f",
    function_sha256="a" * 64,
    inputs=(InputFile("in.txt", "b" * 64, 3),),
    env=(("A", "ü\n"),),
    retries=2,
)


def upload(pool: Pool, *letters: str) -> None:
    for letter in letters:
        pool.write(artifacts.add_artifact(letter * 64, 3, pool.ann, None, None, pool.now()))


def test_a_submitted_task_is_read_back_as_it_was_sent(pool: Pool) -> None:
    upload(pool, "a", "b")
    (task,) = pool.submit(spec=FUNCTION, payload=b"\x00\xff")
    view = pool.view(task)
    assert view.spec == FUNCTION
    assert (view.row.status, view.row.epoch, view.row.user) == (TaskStatus.QUEUED, 0, pool.ann)
    assert (view.row.position, view.row.holding, view.row.node) == (0, False, None)


def test_equal_specs_of_a_user_are_one(pool: Pool) -> None:
    one, two = pool.try_submit(), pool.try_submit()
    bob = pool.user("bob")
    other = pool.try_submit(user=bob)
    assert one.spec_id == two.spec_id != other.spec_id
    assert pool.read(leases.spec(one.spec_id)) == (pool.ann, COMMAND)


def test_a_submission_names_what_is_missing_and_writes_nothing(pool: Pool) -> None:
    upload(pool, "a")
    done = pool.try_submit(spec=FUNCTION, payload_sha256="c" * 64)
    assert done == MissingArtifacts(("c" * 64, "b" * 64))
    assert pool.read(tasks.tasks(None, None, 10)) == ()
    upload(pool, "b", "c")
    assert isinstance(pool.try_submit(spec=FUNCTION, payload_sha256="c" * 64), SubmittedTasks)


def test_anothers_artifact_is_missing(pool: Pool) -> None:
    upload(pool, "a", "b")
    bob = pool.user("bob")
    assert isinstance(pool.try_submit(spec=FUNCTION, user=bob), MissingArtifacts)


def test_an_open_batch_takes_more_until_it_is_closed(pool: Pool) -> None:
    first = pool.try_submit(count=2, more=True)
    second = pool.try_submit(count=2, batch=first.batch, more=True)
    assert (first.first_position, second.first_position) == (0, 2)
    assert [task.position for task in second.tasks] == [2, 3]
    assert pool.view(second.tasks[1].id).row.position == 3
    pool.try_submit(count=0, batch=first.batch)
    batch = pool.read(tasks.batch(first.batch, pool.ann))
    assert (batch.total, batch.done, batch.closed) == (4, 0, True)
    with pytest.raises(Conflict, match="closed"):
        pool.try_submit(batch=first.batch)


def test_nobody_adds_to_anothers_batch_or_to_none(pool: Pool) -> None:
    batch = pool.try_submit(more=True).batch
    bob = pool.user("bob")
    for wanted, user in ((batch, bob), (BatchId(1), pool.ann)):
        with pytest.raises(NotFound):
            pool.try_submit(batch=wanted, user=user)
    assert pool.read(tasks.batch(batch, None)).total == 1


def test_a_stranger_sees_neither_task_nor_story_nor_batch(pool: Pool) -> None:
    done = pool.try_submit()
    task, bob = done.tasks[0].id, pool.user("bob")
    assert pool.read(tasks.task(task, bob)) is None
    assert pool.read(tasks.story(task, bob)) is None
    assert pool.read(tasks.batch(done.batch, bob)) is None
    assert pool.read(tasks.tasks(bob, None, 10)) == ()
    assert pool.read(tasks.task(task, pool.ann)) is not None
    assert pool.read(tasks.story(task, pool.ann)).row.id == task


def listed(pool: Pool, *arguments: object) -> list[TaskId]:
    return [view.row.id for view in pool.read(tasks.tasks(*arguments))]


def test_tasks_are_listed_newest_first_page_by_page(pool: Pool) -> None:
    made = pool.submit(5)
    assert listed(pool, pool.ann, None, 2) == [made[4], made[3]]
    assert listed(pool, pool.ann, made[3], 2) == [made[2], made[1]]
    assert listed(pool, None, made[1], 9) == [made[0]]


def test_tasks_are_listed_by_status(pool: Pool) -> None:
    node = pool.node("box")
    queued, leased, running, done, cancelled = pool.submit(5)
    pool.grant(node, [leased, running, done, cancelled])
    pool.record(node, Started(running, 1), returned(done))
    pool.cancel(cancelled)
    for user in (pool.ann, None):
        assert listed(pool, user, None, 9, [TaskStatus.QUEUED]) == [queued]
        assert listed(pool, user, None, 9, [TaskStatus.RUNNING]) == [running]
        assert listed(pool, user, None, 9, [TaskStatus.SUCCEEDED]) == [done]
        assert listed(pool, user, None, 9, [TaskStatus.CANCELLED]) == [cancelled]
        waiting = [TaskStatus.QUEUED, TaskStatus.LEASED, TaskStatus.RUNNING]
        assert listed(pool, user, None, 9, waiting) == [running, leased, queued]
        assert listed(pool, user, None, 2, waiting) == [running, leased]
        assert listed(pool, user, running, 9, waiting) == [leased, queued]
        mixed = [TaskStatus.QUEUED, TaskStatus.SUCCEEDED]
        assert listed(pool, user, None, 9, mixed) == [done, queued]


def test_results_come_in_the_order_of_finishing_without_gaps(pool: Pool) -> None:
    node = pool.node("box")
    done = pool.try_submit(count=4)
    a, b, c, d = (task.id for task in done.tasks)
    pool.grant(node, [a, b, c, d])
    pool.record(node, returned(c, value=b"c"), exited(a, code=3, text="no\x00pe"))
    pool.cancel(b)
    results = pool.read(tasks.batch_results(done.batch, 0, 10))
    assert [(r.sequence, r.task, r.position, r.status) for r in results] == [
        (1, c, 2, TaskStatus.SUCCEEDED),
        (2, a, 0, TaskStatus.FAILED),
        (3, b, 1, TaskStatus.CANCELLED),
    ]
    assert (results[0].value, results[1].exit_code, results[1].error_text) == (
        b"c",
        3,
        "no\ufffdpe",
    )
    assert results[2].reason is EndReason.CANCELLED
    assert pool.read(tasks.batch_results(done.batch, 1, 1)) == results[1:2]
    batch = pool.read(tasks.batch(done.batch, None))
    assert (batch.total, batch.done) == (4, 3)
    assert pool.read(tasks.batch_tasks(done.batch)) == (d,)


def test_the_open_tasks_of_a_batch_are_its_own_queued_leased_and_running(pool: Pool) -> None:
    node = pool.node("box")
    pool.submit(2)
    done = pool.try_submit(count=3)
    a, b, c = (task.id for task in done.tasks)
    pool.grant(node, [b, c])
    pool.record(node, Started(c, 1))
    assert pool.read(tasks.batch_tasks(done.batch)) == (a, b, c)


def test_a_queued_task_is_cancelled_at_once(pool: Pool) -> None:
    (task,) = pool.submit()
    done = pool.cancel(task, user=pool.ann)
    assert (done.withdrawn, done.to_stop, done.released) == ((task,), (), ())
    assert [(e.task, e.status) for e in done.ended] == [(task, TaskStatus.CANCELLED)]
    row = pool.view(task).row
    assert (row.status, row.reason) == (TaskStatus.CANCELLED, EndReason.CANCELLED)


def test_a_leased_task_is_cancelled_at_once_and_holds_until_it_is_released(pool: Pool) -> None:
    node = pool.node("box")
    for report in (Released, HandedBack):
        task = pool.running(node)
        done = pool.cancel(task)
        assert (done.withdrawn, done.to_stop) == ((), ((node, Hold(task, 1)),))
        assert pool.view(task).row.status is TaskStatus.CANCELLED
        assert pool.view(task).row.holding
        assert pool.record(node, report(task, 1)).released == (task,)
        assert not pool.view(task).row.holding


def test_cancelling_again_unknown_final_or_anothers_does_nothing(pool: Pool) -> None:
    node, bob = pool.node("box"), pool.user("bob")
    task, over = pool.leased(node), pool.leased(node)
    pool.record(node, returned(over))
    assert pool.cancel(task, user=bob) == pool.cancel(TaskId(1), over) == pool.cancel()
    assert pool.view(task).row.status is TaskStatus.LEASED
    assert pool.cancel(task).ended
    assert not pool.cancel(task).ended


def test_a_result_after_the_cancel_only_releases(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.running(node)
    pool.cancel(task)
    done = pool.record(node, returned(task, value=b"late"))
    assert (done.ended, done.released, done.refused) == ((), (task,), ())
    view = pool.view(task)
    assert (view.row.status, view.value) == (TaskStatus.CANCELLED, b"")


def test_a_story_holds_every_earlier_attempt(pool: Pool) -> None:
    node, other = pool.node("box"), pool.node("other")
    task = pool.running(node)
    pool.expire(node)
    pool.grant(other, [task], epoch=2)
    pool.record(other, HandedBack(task, 2))
    story = pool.read(tasks.story(task, None))
    assert [(a.epoch, a.node, a.reason) for a in story.attempts] == [
        (1, node, EndReason.LOST),
        (2, other, EndReason.HANDED_BACK),
    ]
    assert story.attempts[0].started_at is not None
    assert story.attempts[1].started_at is None
    assert (story.row.status, story.row.epoch) == (TaskStatus.QUEUED, 2)


def test_a_node_that_is_gone_leaves_its_tasks_readable(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.leased(node)
    pool.record(node, returned(task))
    assert pool.view(task).node_name == "box"
    pool.write(nodes.remove_node(node, pool.ann))
    assert pool.view(task).node_name is None


def test_text_that_is_no_text_is_refused(pool: Pool) -> None:
    with pytest.raises(Invalid, match="surrogate"):
        pool.try_submit(spec=replace(COMMAND, env=(("A", "half \ud800 a letter"),)))


def test_text_with_a_nul_in_it_is_kept(pool: Pool) -> None:
    spec = replace(COMMAND, name="a\x00b", env=(("A", "x\x00y"),))
    (task,) = pool.submit(spec=spec)
    assert pool.view(task).spec == spec
