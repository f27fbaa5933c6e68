"""A hash grants nothing: every artifact is seen through a reference, and a node's upload is fenced by its lease."""

from __future__ import annotations

import pytest

from gpool.core.ids import UserId
from gpool.core.model import (
    EndReason,
    InputFile,
    Instant,
    OutputFile,
    TaskKind,
    TaskSpec,
    TaskStatus,
)
from gpool.server.store.operations.tasks import artifacts
from gpool.wire.frames import Finished, Released
from tests.store.store_pool import Pool

A, B, C, D = (letter * 64 for letter in "abcd")
FUNCTION = TaskSpec(TaskKind.FUNCTION, "f", function_sha256=A, inputs=(InputFile("i", B, 3),))
NEVER = Instant(1 << 62)


def upload(pool: Pool, *sha256s: str, user: UserId | None = None) -> None:
    for sha256 in sha256s:
        owner = pool.ann if user is None else user
        assert pool.write(artifacts.add_artifact(sha256, 3, owner, None, None, pool.now()))


def test_an_upload_is_seen_by_its_user_only(pool: Pool) -> None:
    bob = pool.user("bob")
    upload(pool, A)
    assert pool.read(artifacts.visible(A, pool.ann)) == 3
    assert pool.read(artifacts.visible(A, bob)) is None
    assert pool.read(artifacts.known(A)) is True
    assert pool.read(artifacts.known(B)) is False
    upload(pool, A, user=bob)
    assert pool.read(artifacts.visible(A, bob)) == 3


def test_an_upload_of_nobody_is_refused(pool: Pool) -> None:
    assert not pool.write(artifacts.add_artifact(A, 3, None, None, None, pool.now()))
    assert pool.read(artifacts.known(A)) is False


def test_a_node_sees_what_the_leases_it_holds_need(pool: Pool) -> None:
    node, other = pool.node("box"), pool.node("other")
    upload(pool, A, B, C, D)
    task = pool.leased(node, spec=FUNCTION, payload_sha256=C)
    for sha256 in (A, B, C):
        assert pool.read(artifacts.visible_to_node(sha256, node)) == 3
        assert pool.read(artifacts.visible_to_node(sha256, other)) is None
    assert pool.read(artifacts.visible_to_node(D, node)) is None
    pool.record(node, Released(task, 1))
    assert pool.read(artifacts.visible_to_node(A, node)) is None


def add_under(pool: Pool, sha256: str, node: int, task: int, epoch: int) -> bool:
    return pool.write(artifacts.add_artifact(sha256, 3, None, node, (task, epoch), pool.now()))


def test_an_upload_under_a_stale_lease_writes_nothing(pool: Pool) -> None:
    node, other = pool.node("box"), pool.node("other")
    task = pool.running(node)
    assert not add_under(pool, A, other, task, 1)
    assert not add_under(pool, A, node, task, 2)
    pool.expire(node)
    assert not add_under(pool, A, node, task, 1)
    pool.grant(other, [task], epoch=2)
    assert not add_under(pool, A, node, task, 1)
    assert pool.read(artifacts.known(A)) is False


def outputs(*sha256s: str) -> tuple[OutputFile, ...]:
    return tuple(OutputFile(f"out-{i}", sha256, 3) for i, sha256 in enumerate(sha256s))


def test_outputs_are_seen_by_the_user_once_the_end_names_them(pool: Pool) -> None:
    node = pool.node("box")
    task = pool.running(node)
    assert add_under(pool, A, node, task, 1)
    assert add_under(pool, B, node, task, 1)
    assert add_under(pool, C, node, task, 1)
    assert pool.read(artifacts.visible(A, pool.ann)) is None
    named = outputs(A, A)
    pool.record(node, Finished(task, 1, EndReason.EXITED, 0, value_sha256=B, outputs=named))
    assert pool.view(task).outputs == named
    assert pool.view(task).value_sha256 == B
    assert pool.read(artifacts.visible(A, pool.ann)) == 3
    assert pool.read(artifacts.visible(B, pool.ann)) == 3
    assert pool.read(artifacts.visible(C, pool.ann)) is None  # uploaded, never named


def test_an_end_cannot_open_what_its_task_could_not_see(pool: Pool) -> None:
    node, bob = pool.node("box"), pool.user("bob")
    upload(pool, D, user=bob)
    task = pool.running(node)
    pool.record(node, Finished(task, 1, EndReason.EXITED, 0, outputs=outputs(D)))
    assert pool.read(artifacts.visible(D, pool.ann)) is None


@pytest.mark.parametrize("naming", ["output", "value"])
def test_a_success_that_names_what_was_never_uploaded_is_a_bad_output(
    pool: Pool, naming: str
) -> None:
    node = pool.node("box")
    task, honest = pool.running(node), pool.running(node)
    add_under(pool, A, node, honest, 1)  # of another task: no excuse
    named = {"outputs": outputs(A)} if naming == "output" else {"value_sha256": A}
    ends = [Finished(each, 1, EndReason.EXITED, 0, **named) for each in (task, honest)]
    pool.record(node, *ends)
    view = pool.view(task)
    assert (view.row.status, view.record.reason) == (TaskStatus.FAILED, "bad_output")
    assert "never uploaded" in str(view.record.error_text)
    assert view.outputs == ()
    assert pool.view(honest).row.status is TaskStatus.SUCCEEDED  # control


def test_an_upload_of_an_earlier_attempt_is_not_taken_for_this_ones(pool: Pool) -> None:
    node, other = pool.node("box"), pool.node("other")
    task = pool.running(node)
    assert add_under(pool, A, node, task, 1)
    pool.expire(node)
    pool.grant(other, [task], epoch=2)
    pool.record(other, Finished(task, 2, EndReason.EXITED, 0, outputs=outputs(A)))
    assert pool.read(artifacts.visible(A, pool.ann)) is None


def test_an_input_given_back_as_an_output_stays_visible(pool: Pool) -> None:
    node = pool.node("box")
    upload(pool, A, B, C)
    task = pool.running(node, spec=FUNCTION, payload_sha256=C)
    pool.record(node, Finished(task, 1, EndReason.RETURNED, value_sha256=C, outputs=outputs(B)))
    assert pool.read(artifacts.visible(B, pool.ann)) == 3
    assert pool.read(artifacts.unreferenced(NEVER, 10)) == ()


def test_only_what_nothing_holds_is_forgotten(pool: Pool) -> None:
    node = pool.node("box")
    upload(pool, A, B, D)
    before = pool.now()
    task = pool.running(node, spec=FUNCTION)
    add_under(pool, C, node, task, 1)
    assert pool.read(artifacts.unreferenced(before, 10)) == (D,)
    assert pool.read(artifacts.unreferenced(NEVER, 10)) == (D, C)
    assert pool.read(artifacts.unreferenced(NEVER, 1)) == (D,)
    assert pool.write(artifacts.forget_artifacts([A, D])) == (D,)
    assert pool.read(artifacts.known(D)) is False
    assert pool.read(artifacts.visible(D, pool.ann)) is None
    assert pool.read(artifacts.visible(A, pool.ann)) == 3
    assert pool.write(artifacts.forget_artifacts([])) == ()


def test_an_upload_again_keeps_it_from_being_forgotten(pool: Pool) -> None:
    upload(pool, A)
    before = pool.now()
    upload(pool, A)
    assert pool.read(artifacts.unreferenced(before, 10)) == ()
