"""Storage is charged for rows, logs, checkpoints and artifacts alike, and deleting gives back exactly that."""

from __future__ import annotations

import pytest

from gpool.core.errors import StorageFull
from gpool.core.model import EndReason, InputFile, Instant, OutputFile, TaskKind, TaskSpec
from gpool.server.actions import quotas
from gpool.server.store.identity_values import GivenQuota
from gpool.server.store.operations.identity import teams
from gpool.server.store.operations.leases import leases
from gpool.server.store.operations.tasks import (
    artifacts,
    deletion,
    progress,
    storage,
    submissions,
    tasks,
)
from gpool.server.store.operations.tasks.storage import StorageLimits, UploadReservation
from gpool.server.store.protocol import Operation, Statement, operation
from gpool.wire.frames import Checkpointed, Finished, LogChunk, Released
from tests.store.store_pool import Pool, exited, returned

A, B, C = (letter * 64 for letter in "abc")
SAVING = TaskSpec(
    TaskKind.COMMAND,
    "train",
    command=("true",),
    checkpoint="save/",
    inputs=(InputFile("in", A, 1000),),
    env=(("K", "v"),),
)
SOON = StorageLimits(10_000, 10_000)
NEVER = Instant(1 << 62)
TABLES = (
    "tasks",
    "specs",
    "batches",
    "attempts",
    "attempt_notes",
    "checkpoints",
    "log_heads",
    "log_chunks",
    "artifact_refs",
    "stored",
    "task_secrets",
    "members",
    "gangs",
    "uploads",
)


def used(pool: Pool, kind: str = "user", id: int | None = None) -> int:
    return pool.read(teams.usage_of(kind, pool.ann if id is None else id)).storage_bytes


@operation
def _rows() -> Operation[dict[str, int]]:
    found = {}
    for table in TABLES:
        rows = yield Statement(f"SELECT COUNT(*) FROM {table}")  # noqa: S608
        [(found[table],)] = rows
    return found


def rows(pool: Pool) -> dict[str, int]:
    """Tables with rows, and how many."""
    return {table: count for table, count in pool.read(_rows()).items() if count}


def a_full_life(pool: Pool, node: int, **options: object) -> int:
    """A task with an input, a retry, output, a checkpoint, outputs and a sealed log."""
    pool.write(artifacts.add_artifact(A, 1000, pool.ann, None, None, pool.now()))
    task = pool.running(node, spec=SAVING, **options)
    pool.record(node, LogChunk(task, 1, 0, 1, b"hello"), Released(task, 1))
    pool.grant(node, [task], epoch=2)
    for sha256 in (B, C):
        pool.write(artifacts.add_artifact(sha256, 100, None, node, (task, 2), pool.now()))
    pool.record(node, Checkpointed(task, 2, (OutputFile("save/1", B, 100),)))
    named = (OutputFile("out", C, 100),)
    pool.record(node, Finished(task, 2, EndReason.EXITED, 0, outputs=named, error_text="e" * 9000))
    return task


def test_deleting_a_task_gives_back_exactly_what_was_charged(pool: Pool) -> None:
    node = pool.node("box")
    task = a_full_life(pool, node)
    pool.write(progress.seal_logs(task, "d" * 64, 50, pool.now()))
    assert used(pool) > 1000 + 200 + 50 + 9000
    done = pool.write(deletion.delete_tasks([task]))
    assert done.tasks == (task,)
    assert done.artifacts == (A, B, C, "d" * 64)
    assert used(pool) == 0
    assert rows(pool) == {}
    assert pool.read(tasks.task(task, None)) is None
    assert pool.write(artifacts.forget_artifacts(done.artifacts, Instant(1))) == done.artifacts


def test_a_shrunk_task_keeps_its_summary_and_little_storage(pool: Pool) -> None:
    node = pool.node("box")
    task = a_full_life(pool, node)
    before = pool.view(task)
    assert pool.write(deletion.shrink_expired(before.row.finished_at, pool.now(), 10)).tasks == ()
    at = pool.now()
    done = pool.write(deletion.shrink_expired(NEVER, at, 10))
    assert (done.tasks, done.artifacts) == ((task,), (A, B, C))
    view = pool.view(task)
    assert view.record.shrunk_at == at
    assert (view.row.status, view.row.finished_at) == (before.row.status, before.row.finished_at)
    assert view.spec.command == ("true",)
    assert (view.outputs, view.checkpoint, view.spec.inputs, view.spec.env) == ((), None, (), ())
    assert view.row.error_text == "e" * 200
    assert pool.read(progress.logs(task, -1, 10)) == ()
    assert set(rows(pool)) == {"tasks", "specs", "batches", "attempts"}
    assert 0 < used(pool) <= storage.SUMMARY_BYTES + storage.SPEC_BYTES + 2000
    assert pool.write(deletion.shrink_expired(NEVER, at, 10)).tasks == ()
    assert pool.write(deletion.delete_expired(NEVER, 10)).tasks == (task,)
    assert (used(pool), rows(pool)) == (0, {})


def test_an_equal_submission_after_the_expiry_gets_a_spec_of_its_own(pool: Pool) -> None:
    node = pool.node("box")
    task = a_full_life(pool, node)
    pool.write(deletion.shrink_expired(NEVER, pool.now(), 10))
    pool.write(artifacts.forget_artifacts([A, B, C], Instant(1)))
    assert pool.try_submit(spec=SAVING).sha256s == (A,)
    pool.write(artifacts.add_artifact(A, 1000, pool.ann, None, None, pool.now()))
    [again] = pool.submit(spec=SAVING)
    assert pool.view(again).row.spec != pool.view(task).row.spec
    assert pool.view(again).spec.inputs == SAVING.inputs


def test_a_spec_is_kept_while_another_task_needs_it(pool: Pool) -> None:
    node = pool.node("box")
    first = a_full_life(pool, node)
    [second] = pool.submit(spec=SAVING)
    assert A not in pool.write(deletion.delete_tasks([first])).artifacts
    assert pool.view(second).spec == SAVING
    pool.cancel(second)
    assert pool.write(deletion.delete_tasks([second])).artifacts == (A,)
    assert (used(pool), rows(pool)) == (0, {})


def test_open_and_held_tasks_are_not_deleted(pool: Pool) -> None:
    node = pool.node("box")
    [queued], running = pool.submit(), pool.running(node)
    assert pool.write(deletion.delete_tasks([queued, running])).tasks == ()
    pool.cancel(running)
    assert pool.write(deletion.delete_tasks([running])).tasks == ()  # the node still holds it
    assert pool.write(deletion.delete_expired(NEVER, 10)).tasks == ()
    assert pool.write(deletion.shrink_expired(NEVER, NEVER, 10)).tasks == ()
    pool.record(node, Released(running, 1))
    assert pool.write(deletion.delete_tasks([running])).tasks == (running,)


def test_an_artifact_of_two_accounts_is_given_back_to_one(pool: Pool) -> None:
    bob, node = pool.user("bob"), pool.node("box")
    pool.write(artifacts.add_artifact(A, 1000, bob, None, None, pool.now()))
    task = a_full_life(pool, node)
    assert used(pool, id=bob) == 1000
    assert A not in pool.write(deletion.delete_tasks([task])).artifacts
    assert (used(pool), used(pool, id=bob)) == (0, 1000)
    assert pool.read(artifacts.visible(A, bob)) == 1000


def test_a_team_is_charged_for_its_tasks(pool: Pool) -> None:
    lab, node = pool.team("lab"), pool.node("box")
    task = a_full_life(pool, node, team=lab)
    assert used(pool, "team", lab) > 9000
    assert used(pool) == 1000  # the upload
    pool.write(deletion.delete_tasks([task]))
    assert (used(pool), used(pool, "team", lab), rows(pool)) == (0, 0, {})


def test_a_batch_is_deleted_with_its_last_task(pool: Pool) -> None:
    ids = pool.submit(3)
    batch = pool.view(ids[0]).row.batch
    pool.cancel(*ids)
    assert len(pool.write(deletion.delete_batch(batch, 2)).tasks) == 2
    assert pool.read(tasks.batch(batch, None)) is not None
    assert len(pool.write(deletion.delete_batch(batch, 2)).tasks) == 1
    assert pool.read(tasks.batch(batch, None)) is None
    assert rows(pool) == {}


def test_a_submission_over_the_quota_is_refused_and_the_others_go_on(pool: Pool) -> None:
    bob = pool.user("bob")
    wanted = [
        pool.submission(3),
        pool.submission(9),
        pool.submission(2),
        pool.submission(3, user=bob),
    ]
    limits = StorageLimits(3 * storage.TASK_BYTES + 2000, None)
    first, second, third, fourth = pool.write(submissions.submit(wanted, limits))
    assert isinstance(second, StorageFull)
    assert isinstance(third, StorageFull)
    assert (len(first.tasks), len(fourth.tasks)) == (3, 3)
    assert 3 * storage.TASK_BYTES < used(pool) < 3 * storage.TASK_BYTES + 2000


def test_room_is_reserved_once_for_an_upload_and_shared_by_all(pool: Pool) -> None:
    pool.write(teams.set_quota("user", pool.ann, GivenQuota(storage_bytes=1000)))
    one = UploadReservation("u1", A, 0, ("user", pool.ann))
    two = UploadReservation("u1", B, 5, ("user", pool.ann))
    limits = StorageLimits()
    assert pool.write(storage.reserve(one, 600, limits, pool.now())) is None
    assert pool.write(storage.reserve(one, 600, limits, pool.now())) is None  # the next part
    refused = pool.write(storage.reserve(two, 600, limits, pool.now()))
    assert isinstance(refused, StorageFull)
    assert "may store only 400 more" in refused.detail
    assert pool.write(storage.reserve(two, 400, limits, pool.now())) is None
    assert used(pool) == 1000
    pool.write(storage.release_upload(one))
    assert used(pool) == 400
    assert len(pool.write(storage.forget_interrupted())) == 1
    assert used(pool) == 0


def test_unfinished_uploads_are_forgotten_after_a_while(pool: Pool) -> None:
    one = UploadReservation("u1", A, 0, ("user", pool.ann))
    pool.write(storage.reserve(one, 600, StorageLimits(), pool.now()))
    began = pool.now()
    pool.write(storage.reserve(one, 600, StorageLimits(), pool.now()))
    assert pool.write(storage.forget_uploads(began, 10)) == []
    assert pool.write(storage.forget_interrupted()) == []  # in parts: it may go on
    assert len(pool.write(storage.forget_uploads(NEVER, 10))) == 1
    assert (used(pool), rows(pool)) == (0, {})


def test_a_direct_upload_keeps_the_first_multipart_upload_and_survives_a_restart(
    pool: Pool,
) -> None:
    one = UploadReservation("u1", A, storage.DIRECT, ("user", pool.ann))
    assert pool.write(storage.open_direct_upload(one, "aa/x", "1")) is None  # nothing is reserved
    pool.write(storage.reserve(one, 600, StorageLimits(), pool.now()))
    for key, number in (("aa/x", "1"), ("aa/y", "2")):
        row = pool.write(storage.open_direct_upload(one, key, number))
        assert row is not None
        assert (row.object, row.upload_id) == ("aa/x", "1")
    assert pool.write(storage.forget_interrupted()) == []
    known = pool.read(storage.known_objects([A]))
    assert (known.objects, known.upload_ids) == ({"aa/x"}, {"1"})
    [gone] = pool.write(storage.forget_upload(one))
    assert (gone.object, gone.upload_id, used(pool)) == ("aa/x", "1", 0)


def test_a_direct_upload_whose_reservation_is_gone_records_nothing(pool: Pool) -> None:
    """Whoever deleted the row removes the object, so no artifact may name it."""
    one = UploadReservation("u1", A, storage.DIRECT, ("user", pool.ann))
    mine = quotas.StoredUpload(A, pool.ann)

    def finish(key: str) -> object:
        limits = StorageLimits()
        stored = artifacts.StoredBytes(key)
        return pool.write(quotas.finish_upload(mine, one, 600, limits, pool.now(), stored))

    assert finish("aa/x") is False
    pool.write(storage.reserve(one, 600, StorageLimits(), pool.now()))
    pool.write(storage.open_direct_upload(one, "aa/x", "1"))
    assert finish("aa/other") is False
    assert pool.read(artifacts.object_of(A)) is None
    assert finish("aa/x") is True  # the control
    assert (pool.read(artifacts.object_of(A)), used(pool)) == ("aa/x", 600)
    assert pool.write(artifacts.forget_artifacts([A])) == ("aa/x",)


def test_what_takes_the_space_is_summed_by_use(pool: Pool) -> None:
    account = ("user", pool.ann)
    for sha256, size in ((A, 100), (B, 30)):
        pool.write(artifacts.add_artifact(sha256, size, pool.ann, None, None, pool.now()))
    one = UploadReservation("u1", C, 0, account)
    pool.write(storage.reserve(one, 600, StorageLimits(), pool.now()))
    uses = {use.kind: use[1:] for use in pool.read(storage.artifact_uses(account))}
    assert uses == {"upload": (2, 130), "unfinished": (1, 600)}
    assert pool.read(storage.artifact_uses(("team", 1))) == []


def test_an_artifact_stored_again_keeps_its_first_object(pool: Pool) -> None:
    for key in ("aa/first", "aa/second"):
        stored = artifacts.StoredBytes(key)
        add = artifacts.add_artifact(A, 100, pool.ann, None, None, pool.now(), None, stored)
        assert pool.write(add)
    assert pool.read(artifacts.object_of(A)) == "aa/first"


def test_output_over_the_quota_is_cut_and_its_task_goes_on(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.running(node)
    limits = StorageLimits(used(pool) + 1000)
    chunks = [LogChunk(task, 1, number, 1, b"x" * 400) for number in range(9)]
    pool.write(leases.record([(node, chunks)], pool.now(), limits))
    text = b"".join(line.data for line in pool.read(progress.logs(task, -1, 100)))
    assert text == b"x" * 800 + progress.OUT_OF_ROOM
    pool.write(leases.record([(node, [returned(task, value=b"v")])], pool.now(), limits))
    assert pool.view(task).value == b"v"


@pytest.mark.parametrize("is_full", [False, True])
def test_the_end_of_a_task_is_recorded_though_its_data_does_not_fit(
    pool: Pool, is_full: bool
) -> None:
    node = pool.node("box")
    good, bad = pool.running(node), pool.running(node)
    limits = StorageLimits(used(pool) + (0 if is_full else 1 << 20))
    items = [returned(good, value=b"v" * 5000), exited(bad, text="e" * 5000)]
    done = pool.write(leases.record([(node, items)], pool.now(), limits))
    assert [each.status.value for each in done.ended] == [
        "failed" if is_full else "succeeded",
        "failed",
    ]
    view = pool.view(good)
    assert view.row.status.value == ("failed" if is_full else "succeeded")
    assert len(view.value) == (0 if is_full else 5000)
    text = pool.view(bad).row.error_text
    assert text is not None
    tiny = pool.running(node)
    over = StorageLimits(1)  # lowered below what is in use
    pool.write(leases.record([(node, [returned(tiny, value=b"v")])], pool.now(), over))
    assert pool.view(tiny).value == b"v"
    assert len(text) == (storage.END_BYTES if is_full else 5000)
    pool.write(deletion.delete_tasks([good, bad, tiny]))
    assert used(pool) == 0


def test_a_checkpoint_whose_list_does_not_fit_is_rejected(pool: Pool) -> None:
    node = pool.node("box")
    spec = TaskSpec(TaskKind.COMMAND, "t", command=("true",), checkpoint="save/")
    task = pool.running(node, spec=spec)
    files = tuple(OutputFile(f"save/{number}", A, 100) for number in range(100))
    pool.write(artifacts.add_artifact(A, 100, None, node, (task, 1), pool.now()))
    full = StorageLimits(used(pool) + 100)
    done = pool.write(leases.record([(node, [Checkpointed(task, 1, files)])], pool.now(), full))
    assert [hold.task for hold in done.unusable] == [task]
    done = pool.write(leases.record([(node, [Checkpointed(task, 1, files)])], pool.now()))
    assert done.unusable == ()
