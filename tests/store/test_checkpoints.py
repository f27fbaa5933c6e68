"""Phases and checkpoints: fenced like every report, taken whole or not at all, granted again with the next lease."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import EndReason, InputFile, OutputFile, Phase, TaskStatus
from gpool.server.store.operations.identity import teams
from gpool.server.store.operations.leases import grants, leases
from gpool.server.store.operations.tasks import artifacts, progress, tasks
from gpool.server.store.operations.tasks.storage import CHECKPOINT_BYTES
from gpool.server.store.values import AppliedPlan
from gpool.wire.frames import Checkpointed, Finished, HandedBack, Hold, Lease, Reached, Released
from tests.store.store_pool import COMMAND, Pool, exited

SAVING = replace(COMMAND, checkpoint="state/")
A, B, C = "a" * 64, "b" * 64, "c" * 64


def file(sha256: str, path: str = "state/weights", size: int = 10) -> OutputFile:
    return OutputFile(path, sha256, size)


def upload(pool: Pool, node: NodeId, task: TaskId, *sha256s: str, epoch: int = 1) -> None:
    for sha256 in sha256s:
        done = artifacts.add_artifact(sha256, 10, None, node, (task, epoch), pool.now())
        assert pool.write(done)


def save(pool: Pool, node: NodeId, task: TaskId, *files: OutputFile, epoch: int = 1) -> bool:
    """Whether it was taken."""
    done = pool.record(node, Checkpointed(task, epoch, files))
    assert done.refused == ()
    return done.unusable == ()


def granted(pool: Pool, node: NodeId, task: TaskId, epoch: int) -> Lease:
    spec = pool.view(task).row.spec
    place = pool.place(node, [task], epoch)
    applied: AppliedPlan = pool.write(
        leases.apply_plan([place], pool.term, pool.now(), (), frozenset({spec}))
    )
    ((_, lease),) = applied.lines[0].leases
    return lease


def may_go(pool: Pool) -> set[str]:
    """What the next pruning would remove."""
    return set(pool.read(artifacts.unreferenced(pool.now(), 100)))


def test_the_phase_an_attempt_came_to_is_shown_while_a_node_has_it(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.leased(node)
    assert pool.view(task).note is None
    assert pool.record(node, Reached(task, 1, Phase.FETCH)).noted == (task,)
    pool.record(node, Reached(task, 1, Phase.BUILD))
    assert pool.view(task).note == "build"
    pool.record(node, Reached(task, 1, Phase.BUILD), Reached(task, 1, Phase.FETCH))
    assert pool.view(task).note == "build"
    story = pool.read(tasks.story(task, None))
    assert [(note.epoch, note.note) for note in story.notes] == [(1, "fetch"), (1, "build")]
    pool.record(node, exited(task, code=0))
    assert pool.view(task).note is None


def test_phases_told_at_once_are_in_the_order_of_the_work(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.leased(node)
    pool.record(
        node,
        Reached(task, 1, Phase.START),
        Reached(task, 1, Phase.FETCH),
        Reached(task, 1, Phase.BUILD),
    )
    assert pool.view(task).note == "start"


def test_a_new_attempt_begins_without_a_phase(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.leased(node)
    pool.record(node, Reached(task, 1, Phase.BUILD), HandedBack(task, 1))
    pool.grant(node, [task], epoch=2)
    assert pool.view(task).note is None


def test_a_checkpoint_goes_with_the_next_lease(pool: Pool) -> None:
    node, other = pool.node("box"), pool.node("other")
    task = pool.running(node, spec=SAVING)
    upload(pool, node, task, A, B)
    assert save(pool, node, task, file(B, "state/b"), replace(file(A), executable=True))
    saved = pool.view(task).checkpoint
    assert (saved.epoch, saved.files, saved.size_bytes) == (1, 2, 20)
    assert pool.view(task).row.started_at < saved.saved_at
    pool.expire(node)
    lease = granted(pool, other, task, 2)
    assert lease.checkpoint == (
        InputFile("state/b", B, 10),
        InputFile("state/weights", A, 10, executable=True),
    )
    held = pool.read(leases.held(other))
    assert [one.task for one in held] == [task]


def test_the_node_of_the_next_lease_may_read_it_and_no_other_may(pool: Pool) -> None:
    node, other, third = pool.node("box"), pool.node("other"), pool.node("third")
    task = pool.running(node, spec=SAVING)
    upload(pool, node, task, A)
    assert pool.read(artifacts.visible_to_node(A, node)) is None
    save(pool, node, task, file(A))
    assert pool.read(artifacts.visible_to_node(A, node)) == 10
    pool.expire(node)
    assert pool.read(artifacts.visible_to_node(A, node)) is None
    granted(pool, other, task, 2)
    assert pool.read(artifacts.visible_to_node(A, other)) == 10
    assert pool.read(artifacts.visible_to_node(A, other, task)) == 10
    elsewhere = pool.leased(other, spec=SAVING)
    assert pool.read(artifacts.visible_to_node(A, other, elsewhere)) is None
    assert pool.read(artifacts.visible_to_node(A, third)) is None


def test_a_checkpoint_under_an_old_epoch_is_refused(pool: Pool) -> None:
    node, other = pool.node("box"), pool.node("other")
    task = pool.running(node, spec=SAVING)
    upload(pool, node, task, A)
    pool.expire(node)
    stale = Checkpointed(task, 1, (file(A),))
    assert pool.record(node, stale).refused == (Hold(task, 1),)
    pool.grant(other, [task], epoch=2)
    assert pool.record(node, stale, Reached(task, 1, Phase.BUILD)).refused == (Hold(task, 1),)
    assert pool.record(other, stale).refused == (Hold(task, 1),)
    view = pool.view(task)
    assert (view.checkpoint, view.note) == (None, None)


def test_what_was_not_uploaded_under_this_lease_is_no_checkpoint(pool: Pool) -> None:
    node, other = pool.node("box"), pool.node("other")
    task, stranger = pool.running(node, spec=SAVING), pool.running(other, spec=SAVING)
    assert not save(pool, node, task, file(A))
    upload(pool, other, stranger, A)
    assert not save(pool, node, task, file(A))
    upload(pool, node, task, B)
    assert not save(pool, node, task, file(A), file(B, "state/b"))
    assert not save(pool, node, task, file(B, size=11))
    assert pool.view(task).checkpoint is None
    assert pool.read(artifacts.visible_to_node(A, node)) is None
    assert pool.read(artifacts.visible_to_node(B, node)) is None
    assert save(pool, node, task, file(B))


@pytest.mark.parametrize("path", ["weights", "statement", "other/state/weights"])
def test_a_file_outside_the_directory_is_no_checkpoint(pool: Pool, path: str) -> None:
    node = pool.node("box")
    task = pool.running(node, spec=SAVING)
    upload(pool, node, task, A)
    assert not save(pool, node, task, file(A, path))
    plain = pool.running(node)
    upload(pool, node, plain, A)
    assert not save(pool, node, plain, file(A))


def test_the_newest_checkpoint_replaces_the_one_before_and_lets_its_files_go(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.running(node, spec=SAVING)
    upload(pool, node, task, A, B)
    save(pool, node, task, file(A), file(B, "state/b"))
    assert may_go(pool) == set()
    upload(pool, node, task, C)
    assert save(pool, node, task, file(C), file(B, "state/b"))
    assert may_go(pool) == {A}
    pool.write(artifacts.forget_artifacts([A]))
    assert not save(pool, node, task, file(A))
    assert pool.view(task).checkpoint.files == 2
    pool.expire(node)
    assert {one.sha256 for one in granted(pool, node, task, 2).checkpoint} == {B, C}


def test_what_was_uploaded_again_meanwhile_is_not_forgotten(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.running(node, spec=SAVING)
    upload(pool, node, task, A, B)
    save(pool, node, task, file(A))
    save(pool, node, task, file(B))
    before = pool.now()
    assert pool.read(artifacts.unreferenced(before, 10)) == (A,)
    upload(pool, node, task, A)
    assert pool.write(artifacts.forget_artifacts([A], before)) == ()
    assert save(pool, node, task, file(A))


def test_files_that_did_not_change_need_no_second_upload(pool: Pool) -> None:
    node, other = pool.node("box"), pool.node("other")
    task = pool.running(node, spec=SAVING)
    upload(pool, node, task, A)
    save(pool, node, task, file(A))
    pool.expire(node)
    granted(pool, other, task, 2)
    upload(pool, other, task, B, epoch=2)
    assert save(pool, other, task, file(A), file(B, "state/b"), epoch=2)
    assert pool.view(task).checkpoint.epoch == 2


def test_a_dropped_file_that_somebody_else_has_stays(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.running(node, spec=SAVING)
    twin = pool.running(node, spec=SAVING)
    upload(pool, node, task, A)
    upload(pool, node, twin, A)
    save(pool, node, task, file(A))
    save(pool, node, twin, file(A))
    upload(pool, node, task, B)
    save(pool, node, task, file(B))
    assert may_go(pool) == set()
    assert pool.read(artifacts.visible_to_node(A, node, twin)) == 10


def test_a_checkpoint_said_again_changes_nothing(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.running(node, spec=SAVING)
    upload(pool, node, task, A)
    assert save(pool, node, task, file(A))
    before = pool.view(task)
    assert save(pool, node, task, file(A))
    assert pool.view(task) == before


def test_an_output_that_is_a_file_of_the_checkpoint_is_kept(pool: Pool) -> None:
    node, other = pool.node("box"), pool.node("other")
    task = pool.running(node, spec=SAVING)
    upload(pool, node, task, A)
    save(pool, node, task, file(A))
    pool.expire(node)
    granted(pool, other, task, 2)
    pool.record(other, Finished(task, 2, EndReason.EXITED, 0, outputs=(file(A, "state/weights"),)))
    pool.write(progress.forget_checkpoints(pool.now(), 10))
    assert pool.read(artifacts.visible(A, pool.ann)) == 10
    assert may_go(pool) == set()


def test_a_checkpoint_is_forgotten_some_time_after_the_end_and_not_before(pool: Pool) -> None:
    node = pool.node("box")
    done, waiting = pool.running(node, spec=SAVING), pool.running(node, spec=SAVING)
    for task, sha256 in ((done, A), (waiting, B)):
        upload(pool, node, task, sha256)
        save(pool, node, task, file(sha256))
    before = pool.now()
    pool.record(node, exited(done, code=0), Released(waiting, 1))
    assert pool.write(progress.forget_checkpoints(before, 10)) == 0
    assert pool.write(progress.forget_checkpoints(pool.now(), 10)) == 1
    assert pool.view(done).checkpoint is None
    assert pool.view(waiting).checkpoint is not None
    assert may_go(pool) == {A}


def test_what_is_kept_counts_as_its_owners_storage_until_it_is_gone(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.running(node, spec=SAVING)
    before = pool.read(teams.usage_of("user", pool.ann)).storage_bytes
    upload(pool, node, task, A, B)
    assert pool.read(teams.usage_of("user", pool.ann)).storage_bytes == before + 20
    save(pool, node, task, file(A))
    saved = pool.read(teams.usage_of("user", pool.ann)).storage_bytes
    assert saved > before + 20 + CHECKPOINT_BYTES  # its list of files counts too
    save(pool, node, task, file(B))
    pool.write(artifacts.forget_artifacts(sorted(may_go(pool))))
    assert pool.read(teams.usage_of("user", pool.ann)).storage_bytes == saved - 10


def test_a_preempted_task_is_queued_again_and_counts_as_no_try(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.running(node, spec=SAVING)
    asked = pool.write(grants.preempt([task], pool.now()))
    assert asked.to_preempt == ((node, Hold(task, 1)),)
    assert pool.view(task).row.status is TaskStatus.RUNNING
    assert pool.view(task).note is None
    upload(pool, node, task, A)
    done = pool.record(
        node, Checkpointed(task, 1, (file(A),)), Finished(task, 1, EndReason.PREEMPTED, 143)
    )
    assert [(one.reason, one.epoch) for one in done.requeued] == [(EndReason.PREEMPTED, 1)]
    row = pool.view(task).row
    assert (row.status, row.tries, row.losses, row.epoch) == (TaskStatus.QUEUED, 0, 0, 1)
    assert granted(pool, node, task, 2).checkpoint == (InputFile("state/weights", A, 10),)


def test_a_preempted_task_that_ended_well_meanwhile_has_ended(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.running(node)
    pool.write(grants.preempt([task], pool.now()))
    pool.record(node, exited(task, code=0))
    assert pool.view(task).row.status is TaskStatus.SUCCEEDED


def test_only_what_a_node_holds_can_be_preempted(pool: Pool) -> None:
    node = pool.node("box")
    (queued,) = pool.submit()
    ended, cancelled, leased = pool.leased(node), pool.running(node), pool.leased(node)
    pool.record(node, exited(ended, code=0))
    pool.cancel(cancelled)
    asked = pool.write(grants.preempt([queued, ended, cancelled, leased], pool.now()))
    assert asked.to_preempt == ((node, Hold(leased, 1)),)


def test_a_node_that_comes_back_is_told_again_until_it_let_go(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.running(node)
    pool.write(grants.preempt([task], pool.now()))
    assert pool.write(grants.preempting(node)) == (Hold(task, 1),)
    pool.database.reopen()
    assert pool.write(grants.preempting(node)) == (Hold(task, 1),)
    pool.record(node, Released(task, 1))
    pool.grant(node, [task], epoch=2)
    assert pool.write(grants.preempting(node)) == ()
