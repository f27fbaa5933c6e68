"""Deletion of ended tasks, batches and uploads by their owners, and of expired ones by the loop `retention`.

Files are removed after the commit that dropped their last reference; pruning repeats what a crash interrupts.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpool.core.errors import Conflict, Invalid, NotFound
from gpool.core.ids import BatchId, TaskId, encode
from gpool.core.model import Instant, Permission
from gpool.core.permissions import Action, ObjectKind, TeamId, Thing, missing
from gpool.server.actions import quotas
from gpool.server.actions.audit import audited, entry
from gpool.server.actions.tasks import direct_uploads
from gpool.server.actions.tasks.outputs import uploader_of
from gpool.server.actions.tasks.query import named
from gpool.server.identity.authorization import batch_thing, own, permit, task_thing
from gpool.server.server import Once, Server
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations.identity import teams
from gpool.server.store.operations.tasks import artifacts as artifact_operations
from gpool.server.store.operations.tasks import deletion, storage
from gpool.server.store.operations.tasks import tasks as task_operations
from gpool.server.store.operations.tasks.deletion import DeletedTasks, StoredArtifact
from gpool.server.store.operations.tasks.storage import UploadReservation
from gpool.server.store.protocol import Operation, operation
from gpool.wire.documents import (
    ArtifactPage,
    StorageReport,
    StorageUse,
    StoredArtifactDocument,
)

AT_ONCE = 500
"""Tasks deleted by one write, so that other writes are not delayed."""

FORGOTTEN = Instant(1)
"""Later than `touched_at` of artifacts that lost their last reference, which is 0."""


# ---- tasks and batches


async def delete_task(server: Server, who: Caller, id_: TaskId, once: Once | None) -> None:
    """Delete an ended task with its data; `Conflict` for one that has not ended."""
    note = entry(server.now, who, "task.delete", encode("task", id_))
    deleting = audited(_delete_task(id_, who), [note])
    answered = await server.write_once(who.user, once, deleting, lambda _: b"")
    if answered.value is not None:
        await remove_files(server, answered.value.artifacts)
        server.hub.publish((id_,))


@operation
def _delete_task(id_: TaskId, who: Caller) -> Operation[DeletedTasks]:
    found = yield from task_operations.task(id_, None)
    permit(who, Action.TASK_DELETE, task_thing(found), named(id_))
    assert found is not None
    if not found.row.status.is_final:
        raise Conflict(f"{named(id_)} is {found.row.status.text}; cancel it, then delete it")
    if found.row.holding:
        raise Conflict(f"{named(id_)} is cancelled, but its node still stops it; try again later")
    return (yield from deletion.delete_tasks([id_]))


async def delete_batch(server: Server, who: Caller, id_: BatchId, once: Once | None) -> None:
    """Delete a batch with its tasks; `Conflict` while one of them has not ended."""
    note = entry(server.now, who, "batch.delete", encode("batch", id_))
    answered = await server.write_once(
        who.user, once, audited(_close_batch(id_, who), [note]), lambda _: b""
    )
    for _ in range(0, (answered.value or 0) + 2 * AT_ONCE, AT_ONCE):
        deleted = await server.write(deletion.delete_batch(id_, AT_ONCE))
        await remove_files(server, deleted.artifacts)
        if not deleted.tasks:
            break
    server.hub.publish((id_,))


@operation
def _close_batch(id_: BatchId, who: Caller) -> Operation[int]:
    """Number of tasks."""
    found = yield from task_operations.batch(id_, None)
    name = f"batch {encode('batch', id_)}"
    permit(who, Action.BATCH_DELETE, batch_thing(found), name)
    assert found is not None
    if found.done < found.total:
        open_ = found.total - found.done
        raise Conflict(
            f"{open_} of the {found.total} tasks of {name} have not ended; cancel it first"
        )
    if (yield from deletion.is_held(id_)):
        raise Conflict(f"a node still stops a task of {name}; try again later")
    yield from task_operations.close_batch(id_)
    return found.total


async def remove_files(server: Server, sha256s: Sequence[str]) -> None:
    if sha256s:
        gone = await server.write(artifact_operations.forget_artifacts(sha256s, FORGOTTEN))
        for key in gone:
            await server.blobs.remove(key)


# ---- uploads


async def list_artifacts(
    server: Server, who: Caller, team: TeamId | None, cursor: str | None, limit: int
) -> ArtifactPage:
    """Artifacts that the caller's account or a team is charged for, largest first."""
    account = _account(who, team)
    reading = deletion.artifacts_of(account, _after(cursor), limit)
    found = await server.store.read(reading)
    used = await server.store.read(_used(account))
    last = found[-1] if len(found) == limit else None
    return ArtifactPage(
        items=[_document(each) for each in found],
        next=None if last is None else f"{last.size_bytes}-{last.sha256}",
        used_bytes=used,
    )


async def report_storage(server: Server, who: Caller, team: TeamId | None) -> StorageReport:
    """Bytes that the caller's account or a team is charged for, by use."""
    account = _account(who, team)
    uses = await server.store.read(storage.artifact_uses(account))
    used = await server.store.read(_used(account))
    given = await server.store.read(teams.quota_of(*account))
    items = [
        StorageUse(used_as=use.kind, count=use.number, size_bytes=use.size_bytes) for use in uses
    ]
    rows = used - sum(use.size_bytes for use in uses)
    if rows > 0:
        items.append(StorageUse(used_as="rows", count=None, size_bytes=rows))
    return StorageReport(
        used_bytes=used,
        limit_bytes=quotas.effective(server.settings, account, given).storage_bytes,
        items=sorted(items, key=lambda item: -item.size_bytes),
    )


def _account(who: Caller, team: TeamId | None) -> storage.Account:
    thing = own(who) if team is None else Thing(ObjectKind.ACCOUNT, team=team)
    if team is not None and team not in who.teams:
        thing = missing(ObjectKind.ACCOUNT)
    permit(who, Action.ARTIFACTS_LIST, thing, "team")
    return ("user", who.user.id) if team is None else ("team", team)


@operation
def _used(account: storage.Account) -> Operation[int]:
    return (yield from storage.used(account))


def _after(cursor: str | None) -> tuple[int, str]:
    if cursor is None:
        return (1 << 62, "")
    size, _, sha256 = cursor.partition("-")
    if not (size.isdecimal() and size.isascii() and len(size) < 19):
        raise Invalid(f"'cursor' is {cursor[:40]!r}; send the 'next' of a page")
    return int(size), sha256


def _document(found: StoredArtifact) -> StoredArtifactDocument:
    return StoredArtifactDocument(
        sha256=found.sha256, size_bytes=found.size_bytes, used_as=found.kind or "upload"
    )


async def delete_artifact(server: Server, who: Caller, sha256: str, once: Once | None) -> None:
    """Delete the caller's upload, finished or not; `Conflict` while a task of the caller names it."""
    note = entry(server.now, who, "artifact.delete", sha256)
    room = UploadReservation(uploader_of(who), sha256, 0, ("user", who.user.id))
    unfinished = server.blobs.remove_part(sha256, room.uploader)
    unfinished = await direct_uploads.drop(server, room) or unfinished
    deleting = audited(_delete_artifact(sha256, who, room if unfinished else None), [note])
    answered = await server.write_once(who.user, once, deleting, lambda _: b"")
    if answered.value is not None:
        await remove_files(server, answered.value.artifacts)


@operation
def _delete_artifact(
    sha256: str, who: Caller, unfinished: UploadReservation | None
) -> Operation[DeletedTasks]:
    if unfinished is not None:
        yield from storage.take_reservation(unfinished)
        return DeletedTasks((), ())
    thing = yield from _artifact_thing(sha256, who)
    permit(who, Action.ARTIFACT_DELETE, thing, f"artifact {sha256}")
    found = yield from deletion.delete_upload(who.user.id, sha256, who.team_key, who.key_team)
    if found is None:
        raise NotFound(f"no upload {sha256} of yours")
    if not isinstance(found, DeletedTasks):
        task = encode("task", found)
        raise Conflict(f"task {task} uses artifact {sha256}; delete the task instead")
    return found


def _artifact_thing(sha256: str, who: Caller) -> Operation[Thing]:
    key = who.team_key
    if (yield from artifact_operations.visible(sha256, who.user.id, (), key)) is not None:
        return Thing(ObjectKind.ARTIFACT, owner=who.user.id, team=who.key_team)
    for team in who.teams:
        if (yield from artifact_operations.visible(sha256, who.user.id, (team,), key)) is not None:
            return Thing(ObjectKind.ARTIFACT, team=team)
    known = yield from artifact_operations.known(sha256)
    if known and Permission.OPERATOR in who.user.permissions:
        return Thing(ObjectKind.ARTIFACT)
    return missing(ObjectKind.ARTIFACT)
