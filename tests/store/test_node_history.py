"""Tasks on a node for its owner, counts of a batch, and whether a task printed."""

from __future__ import annotations

from gpool.core.model import TaskStatus
from gpool.server.store.operations.tasks import node_history, tasks
from gpool.wire.frames import LogChunk
from tests.store.store_pool import Pool, exited, returned


def test_a_node_has_its_held_leases_and_its_newest_ended_tasks(pool: Pool) -> None:
    here, there = pool.node("here"), pool.node("there")
    ended = [pool.running(here) for _ in range(3)]
    for task in ended:
        pool.record(here, returned(task))
    elsewhere = pool.running(there)
    held = [pool.running(here), pool.leased(here)]
    assert [one.id for one in pool.read(node_history.held_by(here))] == held
    assert [one.id for one in pool.read(node_history.ended_on(here, 2)).tasks] == ended[:0:-1]
    assert [one.id for one in pool.read(node_history.held_by(there))] == [elsewhere]
    assert pool.read(node_history.ended_on(there, 2)).tasks == []
    newest = pool.read(node_history.ended_on(here, 1)).tasks[0]
    assert newest.user_name
    assert newest.started_at is not None
    assert newest.finished_at is not None


def test_older_tasks_of_a_node_are_found_page_by_page(pool: Pool) -> None:
    here, there = pool.node("here"), pool.node("there")
    old = pool.running(here)
    pool.record(here, returned(old))
    for _ in range(3):
        pool.record(there, returned(pool.running(there)))
    page = pool.read(node_history.ended_on(here, 5, None, 2))
    assert (page.tasks, page.last is None) == ([], False)
    page = pool.read(node_history.ended_on(here, 5, page.last, 2))
    assert [one.id for one in page.tasks] == [old]
    page = pool.read(node_history.ended_on(here, 5, old, 2))
    assert (page.tasks, page.last) == ([], None)


def test_the_tasks_of_a_batch_are_counted_by_status(pool: Pool) -> None:
    node = pool.node("here")
    first = pool.submit(4)
    pool.grant(node, first[:3])
    pool.record(node, returned(first[0]), exited(first[1]))
    batch = pool.view(first[0]).row.batch
    counts = pool.read(tasks.batch_counts(batch))
    assert counts == {TaskStatus.SUCCEEDED: 1, TaskStatus.FAILED: 1, TaskStatus.LEASED: 1}
    other = pool.submit(1)
    heads = pool.read(tasks.tasks(None, None, 10, heads=True))
    assert [view.row.id for view in heads] == [other[0], first[0]]
    found = pool.read(tasks.batches({view.row.batch for view in heads}))
    assert sorted((one.total, one.done) for one in found) == [(1, 0), (4, 2)]


def test_a_result_says_whether_its_task_printed(pool: Pool) -> None:
    node = pool.node("here")
    loud, quiet = pool.submit(2)
    pool.grant(node, [loud, quiet])
    pool.record(node, LogChunk(loud, 1, 1, 1, b"hello\n"))
    pool.record(node, returned(loud), returned(quiet))
    results = pool.read(tasks.batch_results(pool.view(loud).row.batch, 0, 10))
    assert {one.task: one.printed for one in results} == {loud: True, quiet: False}
    assert pool.read(tasks.has_printed(loud))
    assert not pool.read(tasks.has_printed(quiet))
