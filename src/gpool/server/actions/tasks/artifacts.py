"""Upload and download of artifacts. Knowing a hash grants no access; a node needs its current lease."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from gpool.core.errors import Forbidden, Invalid, NotFound, StaleLease
from gpool.core.ids import TaskId
from gpool.core.model import Permission
from gpool.core.permissions import Action, ObjectKind, Thing, missing
from gpool.server.actions.operators import quotas
from gpool.server.blobs import UploadPart
from gpool.server.identity.authorization import own, permit
from gpool.server.server import Server
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations.tasks import artifacts as operations
from gpool.server.store.values import NodeCredentials
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
        if not await server.store.read(operations.may_upload(who.node, task, epoch)):
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
        await server.write(operations.leave_to_prune(charged.sha256, size, server.now))
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
        size = await server.store.read(operations.visible_to_node(sha256, who.node, task))
        return size, missing(ObjectKind.ARTIFACT) if size is None else Thing(
            ObjectKind.ARTIFACT, holder=who.node
        )
    size = await server.store.read(operations.visible(sha256, who.user.id, tuple(who.teams)))
    if size is not None:
        return size, Thing(
            ObjectKind.ARTIFACT,
            owner=who.user.id if who.key_team is None else None,
            team=who.key_team,
        )
    if Permission.OPERATOR in who.user.permissions:
        size = await server.store.read(operations.size_of(sha256))
    return size, missing(ObjectKind.ARTIFACT) if size is None else Thing(ObjectKind.ARTIFACT)


def _uploader(who: Caller | NodeCredentials) -> str:
    return f"u{who.user.id}" if isinstance(who, Caller) else f"n{who.node}"
