"""Output of tasks: artifacts (a hash alone grants no access) and logs, by page or as a stream."""

from __future__ import annotations

import codecs
from base64 import b64encode
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

import msgspec

from gpool.core.errors import Forbidden, Invalid, NotFound, StaleLease
from gpool.core.ids import TaskId
from gpool.core.model import Permission, TaskStatus
from gpool.core.permissions import Action, ObjectKind, Thing, missing
from gpool.server.actions import quotas
from gpool.server.actions.tasks import documents, query
from gpool.server.blobs import UploadPart
from gpool.server.identity.authorization import own, permit
from gpool.server.server import Server
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations.tasks import artifacts as artifact_operations
from gpool.server.store.operations.tasks import progress
from gpool.server.store.values import LogLine, NodeCredentials, TaskView
from gpool.wire.documents import LogDocument, ProgressDocument
from gpool.wire.frames import Hold


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
    if isinstance(who, Caller):
        permit(who, Action.ARTIFACT_UPLOAD, own(who))
    else:
        if upload.lease is None:
            raise Invalid("a node uploads under a lease; send the header 'Gpool-Lease: TASK:EPOCH'")
        task, epoch = TaskId(upload.lease.task), upload.lease.epoch
        if not await server.store.read(artifact_operations.may_upload(who.node, task, epoch)):
            raise _stale()
    charged = (
        quotas.StoredUpload(upload.sha256, who.user.id)
        if isinstance(who, Caller)
        else quotas.StoredUpload(upload.sha256, None, who.node, upload.lease)
    )
    declared = upload.part.total if upload.part is not None else upload.declared_bytes
    if (
        declared <= server.settings.max_artifact_bytes
    ):  # larger ones are refused for that reason below
        body = await quotas.body_within_quota(server, charged, declared, body)
    with server.blobs.pinned(upload.sha256):
        if upload.part is None:
            size: int | None = await server.blobs.store(upload.sha256, body)
        else:
            size = await server.blobs.store_part(upload.sha256, _uploader(who), upload.part, body)
        if size is not None:
            await _refer(server, charged, size)
    return size


async def _refer(server: Server, charged: quotas.StoredUpload, size: int) -> None:
    done = await server.write(quotas.add_within_quota(server.settings, charged, size, server.now))
    if isinstance(done, Forbidden):
        raise done
    if not done:
        await server.write(artifact_operations.leave_to_prune(charged.sha256, size, server.now))
        raise _stale()


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
        offset = server.blobs.offset(sha256, _uploader(who))
        if offset is not None:
            raise NotFound(hidden.detail, offset=offset) from None
        raise
    assert size is not None
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
        artifact_operations.visible(sha256, who.user.id, tuple(who.teams))
    )
    if size is not None:
        return size, Thing(
            ObjectKind.ARTIFACT,
            owner=who.user.id if who.key_team is None else None,
            team=who.key_team,
        )
    if Permission.OPERATOR in who.user.permissions:
        size = await server.store.read(artifact_operations.size_of(sha256))
    return size, missing(ObjectKind.ARTIFACT) if size is None else Thing(ObjectKind.ARTIFACT)


def _uploader(who: Caller | NodeCredentials) -> str:
    return f"u{who.user.id}" if isinstance(who, Caller) else f"n{who.node}"


LOG_ROWS = 500
SILENCE_S = 15.0
QUEUED_SILENCE_S = 1.0
"""First silence of a waiting task: its follower asks why it waits, since it may never start."""

_line_decoder = msgspec.json.Decoder(LogLine)


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
    found: list[LogLine] = []
    rest = b""
    async for chunk in server.blobs.read(sha256, 0, 1 << 62):
        *whole, rest = (rest + chunk).split(b"\n")
        for text in whole:
            line = _line_decoder.decode(text)
            if line.cursor > after:
                found.append(line)
                if len(found) >= LOG_ROWS:
                    return found
    return found
