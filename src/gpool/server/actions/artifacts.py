"""Artifacts: who may put and who may get. A hash grants nothing; a node needs a lease, and the current one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from gpool.core.errors import Forbidden, Invalid, NotFound, StaleLease
from gpool.server.actions import quotas
from gpool.server.blobs import Part
from gpool.server.server import Server
from gpool.server.store.operations import artifacts as operations
from gpool.server.store.values import NodeCredentials, User
from gpool.wire.frames import Hold


@dataclass(frozen=True, slots=True)
class Upload:
    sha256: str
    part: Part | None
    lease: Hold | None
    told_bytes: int = 0  # by `Content-Length`; 0: it did not say


async def put(
    server: Server, who: User | NodeCredentials, upload: Upload, body: AsyncIterator[bytes]
) -> int | None:
    """Takes the bytes, then the reference; the size, or None while parts are missing."""
    if isinstance(who, NodeCredentials) and upload.lease is None:
        raise Invalid("a node uploads under a lease: send the header 'Gpool-Lease: TASK:EPOCH'")
    coming = (
        quotas.Upload(upload.sha256, who.id)
        if isinstance(who, User)
        else quotas.Upload(upload.sha256, None, who.node, upload.lease)
    )
    told = upload.part.total if upload.part is not None else upload.told_bytes
    if told <= server.settings.max_artifact_bytes:  # else that is what is said
        body = await quotas.body_within(server, coming, told, body)
    with server.blobs.pinned(upload.sha256):
        if upload.part is None:
            size: int | None = await server.blobs.store(upload.sha256, body)
        else:
            size = await server.blobs.store_part(upload.sha256, _uploader(who), upload.part, body)
        if size is not None:
            await _refer(server, coming, size)
    return size


async def _refer(server: Server, coming: quotas.Upload, size: int) -> None:
    done = await server.write(quotas.add_within(server.settings, coming, size, server.now))
    if isinstance(done, Forbidden):
        raise done
    if not done:
        raise StaleLease("this lease is not the current one; what was uploaded under it is dropped")


async def size_of(server: Server, who: User | NodeCredentials, sha256: str) -> int:
    """Its size, if it is there and `who` may read it."""
    if isinstance(who, User):
        size = await server.store.read(operations.visible(sha256, who.id))
    else:
        size = await server.store.read(operations.visible_to_node(sha256, who.node))
    if size is None:
        offset = server.blobs.offset(sha256, _uploader(who))
        members = {} if offset is None else {"offset": offset}
        raise NotFound(f"no artifact {sha256} that you may read", **members)
    return size


def _uploader(who: User | NodeCredentials) -> str:
    return f"u{who.id}" if isinstance(who, User) else f"n{who.node}"
