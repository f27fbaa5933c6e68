"""Output of tasks: artifacts (a hash alone grants no access) and logs, by page or as a stream."""

from __future__ import annotations

import codecs
from base64 import b64encode
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from gpool.core.errors import Conflict, Invalid, NotFound, StaleLease, StorageFull, TooLarge
from gpool.core.ids import TaskId
from gpool.core.model import MIB, Permission, TaskStatus
from gpool.core.permissions import Action, ObjectKind, Thing, missing
from gpool.server.actions import quotas
from gpool.server.actions.audit import note_read
from gpool.server.actions.tasks import documents, query, sealed_logs
from gpool.server.blobs import UploadPart
from gpool.server.blobs.blobs import BUSY, BlobLocation, StoredBlob
from gpool.server.encryption.ciphers import part_key
from gpool.server.identity.authorization import own, permit
from gpool.server.server import Server
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations import replicas
from gpool.server.store.operations.tasks import artifacts as artifact_operations
from gpool.server.store.operations.tasks import progress, storage
from gpool.server.store.operations.tasks.storage import UploadReservation
from gpool.server.store.protocol import brief
from gpool.server.store.values import LogLine, NodeCredentials, TaskView
from gpool.wire.documents import LogDocument, ProgressDocument
from gpool.wire.frames import Hold

STEP_BYTES = 8 * MIB
"""Room reserved at once for an upload of undeclared length."""


@dataclass(frozen=True, slots=True)
class ArtifactUpload:
    sha256: str
    part: UploadPart | None
    lease: Hold | None
    declared_bytes: int = 0  # by Content-Length; 0: not declared


async def put(
    server: Server,
    who: Caller | NodeCredentials,
    upload: ArtifactUpload,
    body: AsyncIterator[bytes],
) -> int | None:
    """Store an artifact, or a part of one (then None). Its room is reserved before the first byte is stored."""
    charged = await charged_upload(server, who, upload.sha256, upload.lease)
    declared = upload.part.total if upload.part is not None else upload.declared_bytes
    if declared > server.settings.max_artifact_bytes:
        raise TooLarge(
            f"the artifact has {declared} bytes; the limit is {server.settings.max_artifact_bytes}"
        )
    sha256, account, uploader = upload.sha256, charged.account, uploader_of(who, upload.lease)
    if upload.part is None and await server.store.read(storage.is_stored(account, sha256)):
        size = await server.blobs.verify(sha256, body)  # charged already, so not stored again
        none = UploadReservation(uploader, sha256, server.ids.next(), account)
        await refer(server, charged.upload, none, StoredBlob(sha256, size, ""))
        return size
    server.blobs.check_free(declared)
    number = server.ids.next() if upload.part is None else 0
    room = UploadReservation(uploader, sha256, number, account)
    await reserve(server, room, declared)
    async with _sole_writer(server, room, upload.part):
        try:
            return await _store(server, charged.upload, room, upload.part, declared, body)
        finally:
            if upload.part is None or server.blobs.offset(sha256, uploader) is None:
                await server.write(storage.release_upload(room))


@asynccontextmanager
async def _sole_writer(
    server: Server, room: UploadReservation, part: UploadPart | None
) -> AsyncIterator[None]:
    """`Conflict` while another request, of this process or of another replica, writes a part of the upload."""
    if part is None:
        yield
        return
    replica = server.replica.id
    with server.blobs.sole_writer(room.sha256, room.uploader):
        if replica and not await server.write(replicas.begin_part(room, replica)):
            raise Conflict(BUSY)
        try:
            yield
        finally:
            if replica:
                await server.write(replicas.end_part(room, replica))


@dataclass(frozen=True, slots=True)
class ChargedUpload:
    upload: quotas.StoredUpload
    account: storage.Account


async def charged_upload(
    server: Server, who: Caller | NodeCredentials, sha256: str, lease: Hold | None
) -> ChargedUpload:
    """Account that an upload is charged to; `StaleLease` for a node that does not hold the lease it names."""
    if isinstance(who, Caller):
        permit(who, Action.ARTIFACT_UPLOAD, own(who))
        mine = quotas.StoredUpload(sha256, who.user.id, team_key=who.team_key)
        return ChargedUpload(mine, ("user", who.user.id))
    if lease is None:
        raise Invalid("a node uploads under a lease; send the header 'Gpool-Lease: TASK:EPOCH'")
    task, epoch = TaskId(lease.task), lease.epoch
    owner = await server.store.read(artifact_operations.upload_owner(who.node, task, epoch))
    if owner is None:
        raise _stale()
    stored = quotas.StoredUpload(sha256, None, who.node, lease)
    return ChargedUpload(stored, storage.holder_of(owner.user_id, owner.team_id))


async def _store(
    server: Server,
    charged: quotas.StoredUpload,
    room: UploadReservation,
    part: UploadPart | None,
    declared: int,
    body: AsyncIterator[bytes],
) -> int | None:
    account_key = await server.sealer.account_key(room.account)
    if part is None:
        body = _reserving(server, room, declared, body)
        stored: StoredBlob | None = await server.blobs.store(charged.sha256, body)
    else:
        key = b"" if account_key is None else part_key(account_key, room.uploader, room.sha256)
        stored = await server.blobs.store_part(charged.sha256, room.uploader, part, body, key)
    if stored is None:
        return None
    await refer(server, charged, room, stored)
    return stored.size


async def _reserving(
    server: Server, room: UploadReservation, reserved: int, body: AsyncIterator[bytes]
) -> AsyncIterator[bytes]:
    """Reserve more for a body that is longer than declared, before its bytes are stored."""
    size = 0
    async for piece in body:
        size += len(piece)
        if size > reserved:
            wanted = max(size, reserved + STEP_BYTES)
            try:
                await reserve(server, room, wanted)
            except StorageFull:
                await reserve(server, room, size)
                wanted = size
            reserved = wanted
        yield piece


async def reserve(server: Server, room: UploadReservation, size: int) -> None:
    """Charge an upload before its bytes are stored; `StorageFull` if they do not fit."""
    limits = server.settings.storage_limits
    full = await server.write(storage.reserve(room, size, limits, server.now))
    if full is not None:
        raise full


async def refer(
    server: Server, charged: quotas.StoredUpload, room: UploadReservation, stored: StoredBlob
) -> None:
    """Replace the reservation by a reference to the stored bytes, or leave these to pruning and say why."""
    limits = server.settings.storage_limits
    is_new = bool(stored.object)
    recorded = artifact_operations.StoredBytes(stored.object, stored.file_key, is_new)
    finishing = quotas.finish_upload(charged, room, stored.size, limits, server.now, recorded)
    try:
        done = await server.write(finishing)
    finally:
        await remove_unless_recorded(server, stored)
    if isinstance(done, StorageFull):
        raise done
    if not done:
        raise _stale()


async def remove_unless_recorded(server: Server, stored: StoredBlob) -> None:
    """Remove bytes that no row names: they were refused, or the artifact was stored before under another key."""
    if not stored.object:
        return
    if await server.store.read(artifact_operations.object_of(stored.sha256)) != stored.object:
        await server.blobs.remove(stored.object)


async def location_of(server: Server, sha256: str) -> BlobLocation:
    """Place of the bytes of a recorded artifact."""
    found = await server.store.read(brief(artifact_operations.location_of(sha256)))
    if found is None:
        raise NotFound(f"there is no artifact {sha256}")
    return BlobLocation(found.object or sha256, found.key_sealed or b"")


def _stale() -> StaleLease:
    return StaleLease("this lease is not the task's current lease; the upload is dropped")


async def size_of(
    server: Server,
    who: Caller | NodeCredentials,
    sha256: str,
    lease: Hold | None = None,
    *,
    to_name: bool = False,
) -> int:
    """Size of an artifact that `who` may read; a node reads under the lease it names.

    `to_name`: only if `who` may name it in a task. Operators read artifacts of others but may not name them.
    """
    size, thing = await _seen(server, who, sha256, lease)
    if to_name and isinstance(who, Caller) and thing.owner is None and thing.team is None:
        thing = missing(ObjectKind.ARTIFACT)
    try:
        permit(who, Action.ARTIFACT_READ, thing, f"artifact {sha256}")
    except NotFound as hidden:
        offset = server.blobs.offset(sha256, uploader_of(who, lease))
        if offset is not None:
            raise NotFound(hidden.detail, offset=offset) from None
        raise
    assert size is not None
    if isinstance(who, Caller):
        await note_read(server, who, Action.ARTIFACT_READ, thing, sha256)
    return size


async def _seen(
    server: Server, who: Caller | NodeCredentials, sha256: str, lease: Hold | None
) -> tuple[int | None, Thing]:
    if isinstance(who, NodeCredentials):
        task = None if lease is None else TaskId(lease.task)
        size = await server.store.read(artifact_operations.visible_to_node(sha256, who.node, task))
        return size, missing(ObjectKind.ARTIFACT) if size is None else Thing(
            ObjectKind.ARTIFACT, holder=who.node
        )
    size = await server.store.read(
        artifact_operations.visible(sha256, who.user.id, tuple(who.teams), who.team_key)
    )
    if size is not None:
        return size, Thing(
            ObjectKind.ARTIFACT,
            owner=who.user.id if who.key_team is None else None,
            team=who.key_team,
        )
    if Permission.OPERATOR in who.user.permissions and who.key_team is None:
        size = await server.store.read(artifact_operations.size_of(sha256))
    return size, missing(ObjectKind.ARTIFACT) if size is None else Thing(ObjectKind.ARTIFACT)


def uploader_of(who: Caller | NodeCredentials, lease: Hold | None = None) -> str:
    """Name under which parts are kept; a key for one team does not see the parts of its user.

    Those of a node are kept per task: they are charged to its owner, and dropped when the lease ends.
    """
    if isinstance(who, NodeCredentials):
        return storage.node_uploader(who.node, 0 if lease is None else lease.task)
    return f"u{who.user.id}" if who.team_key is None else f"k{who.team_key}"


LOG_ROWS = 500
SILENCE_S = 15.0
QUEUED_SILENCE_S = 1.0
"""First silence of a waiting task: its follower asks why it waits, since it may never start."""


@dataclass(frozen=True, slots=True)
class OutputPage:
    items: list[LogDocument]
    next: int | None
    ended: bool


class _ChunkDecoder:
    def __init__(self) -> None:
        self._decoders: dict[tuple[int, int], codecs.IncrementalDecoder] = {}

    def documents(self, lines: Iterable[LogLine]) -> list[LogDocument]:
        return [self._document(line) for line in lines]

    def _document(self, line: LogLine) -> LogDocument:
        key = (line.epoch, line.stream)
        decoder = self._decoders.get(key)
        if decoder is None:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            self._decoders[key] = decoder
        text = decoder.decode(line.data)
        return LogDocument(
            cursor=line.cursor,
            epoch=line.epoch,
            stream="stderr" if line.stream == 2 else "stdout",
            text=text,
            data=None if text.encode() == line.data else b64encode(line.data).decode(),
        )


async def page(server: Server, who: Caller, id_: TaskId, after: int) -> OutputPage:
    view = await query.task(server, who, id_)
    lines = await _after(server, view, after)
    more = len(lines) >= LOG_ROWS
    return OutputPage(
        _ChunkDecoder().documents(lines),
        lines[-1].cursor if more else None,
        view.row.status.is_final and not more,
    )


async def follow(
    server: Server, who: Caller, id_: TaskId, after: int
) -> AsyncIterator[list[LogDocument] | ProgressDocument]:
    """Output as it comes until the task has ended, and a progress document whenever the phase changes.

    An empty list is a sign of life after `SILENCE_S` without output, the first of a waiting task after
    `QUEUED_SILENCE_S`.
    """
    await query.task(server, who, id_)
    return _follow(server, id_, after)


async def _follow(
    server: Server, id_: TaskId, after: int
) -> AsyncIterator[list[LogDocument] | ProgressDocument]:
    chunks = _ChunkDecoder()
    last: ProgressDocument | None = None
    with server.hub.subscription(id_) as changed:
        while True:
            # The task is read before its output, so that all output of a finished task is seen.
            view = await query.task_again(server, id_)
            now = documents.progress(view)
            if now != last and not view.row.status.is_final:
                last = now
                yield now
            lines = await _after(server, view, after)
            if lines:
                after = lines[-1].cursor
                yield chunks.documents(lines)
            elif view.row.status.is_final:
                return
            else:
                silence = QUEUED_SILENCE_S if view.row.status is TaskStatus.QUEUED else SILENCE_S
                while not await changed.wait(silence):
                    silence = SILENCE_S
                    yield []


async def _after(server: Server, view: TaskView, after: int) -> list[LogLine]:
    if not view.log_sha256:
        return list(await server.store.read(progress.logs(view.row.id, after, LOG_ROWS)))
    return await _sealed_after(server, view.log_sha256, after)


async def _sealed_after(server: Server, sha256: str, after: int) -> list[LogLine]:
    blobs = server.blobs
    try:
        at = await location_of(server, sha256)
    except NotFound:
        raise sealed_logs.expired() from None
    size = await server.store.read(artifact_operations.size_of(sha256)) or 0

    async def read(first: int, length: int) -> bytes:
        return await blobs.read_range(at, first, length)

    return await sealed_logs.page(read, size, after, LOG_ROWS)
