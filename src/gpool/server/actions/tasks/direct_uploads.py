"""Uploads straight to the object store: reservation, presigned parts, completion, and removal of what was left.

    reserve (row `uploads`) -> multipart upload of a new key -> signed parts -> complete -> verify -> row `artifacts`

The row of a key decides who removes its bytes: the transaction that deletes the row without recording an artifact. An
upload of one part is verified by the store, whose signed checksum is the artifact's hash; longer ones are read back once.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence

from gpool.core.errors import Conflict, Invalid, NotFound, StaleLease, TooLarge, Unreachable
from gpool.core.model import SECOND, Instant
from gpool.server.actions.tasks import outputs
from gpool.server.blobs.blobs import BlobLocation, StoredBlob, mismatch
from gpool.server.blobs.bucket import new_key
from gpool.server.blobs.multipart import MultipartUploads, part_bytes_of, part_sizes
from gpool.server.server import Server
from gpool.server.store.generated_rows import UploadsRecord
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations.tasks import storage
from gpool.server.store.operations.tasks.storage import (
    DIRECT,
    UnfinishedUpload,
    UploadReservation,
)
from gpool.server.store.values import NodeCredentials
from gpool.wire.documents import DirectPart, DirectUpload, DirectUploadDocument, SignedPart
from gpool.wire.frames import Hold

log = logging.getLogger(__name__)

ANSWER_WITHIN_S = 20.0
"""A completion that takes longer is answered 202, and asked for again."""
THROUGH_SERVER = DirectUploadDocument(part_bytes=0, stored=[], parts=[])


def is_direct(server: Server, size: int) -> bool:
    least = server.settings.direct_bytes
    return server.blobs.direct is not None and 0 < least <= size


async def sign(
    server: Server,
    who: Caller | NodeCredentials,
    sha256: str,
    lease: Hold | None,
    wanted: DirectUpload,
) -> DirectUploadDocument:
    """Begin or continue an upload: its stored parts, and URLs of the wanted ones.

    `part_bytes` 0: it goes through the server, because it is small, or stored already, or the store is not fit.
    """
    charged = await outputs.charged_upload(server, who, sha256, lease)
    size, direct = wanted.size_bytes, server.blobs.direct
    if size > server.settings.max_artifact_bytes:
        raise TooLarge(
            f"the artifact has {size} bytes; the limit is {server.settings.max_artifact_bytes}"
        )
    if direct is None or not is_direct(server, size):
        return THROUGH_SERVER
    if await server.store.read(storage.is_stored(charged.account, sha256)):
        return THROUGH_SERVER
    room = UploadReservation(outputs.uploader_of(who, lease), sha256, DIRECT, charged.account)
    before = await server.store.read(storage.direct_upload(room))
    if before is not None and before.size_bytes != size:
        raise Invalid(
            f"an upload of this artifact with {before.size_bytes} bytes is in progress, this one has {size}; "
            f"delete the other first (DELETE /v1/artifacts/{sha256})"
        )
    await outputs.reserve(server, room, size)
    row = await _opened(server, direct, room)
    stored = await direct.parts(row.object, row.upload_id)
    if stored is None:  # completed, but not recorded yet
        return DirectUploadDocument(
            part_bytes=part_bytes_of(size),
            stored=list(range(1, len(part_sizes(size)) + 1)),
            parts=[],
        )
    sizes = part_sizes(size)
    return DirectUploadDocument(
        part_bytes=part_bytes_of(size),
        stored=[
            part.number for part in stored if [part.size] == sizes[part.number - 1 : part.number]
        ],
        parts=[_signed(direct, row, sizes, each) for each in wanted.parts],
    )


async def _opened(
    server: Server, direct: MultipartUploads, room: UploadReservation
) -> UploadsRecord:
    """Row of the upload, with a multipart upload; of two that are begun at once the second is aborted."""
    row = await server.store.read(storage.direct_upload(room))
    if row is not None and row.upload_id:
        return row
    key = new_key(room.sha256)
    upload_id = await direct.begin(key)
    row = await server.write(storage.open_direct_upload(room, key, upload_id))
    if row is None or row.upload_id != upload_id:
        await direct.abort(key, upload_id)
    if row is None:
        raise Conflict("the upload was deleted meanwhile; begin again")
    return row


def _signed(
    direct: MultipartUploads, row: UploadsRecord, sizes: Sequence[int], part: DirectPart
) -> SignedPart:
    if part.number > len(sizes):
        raise Invalid(f"part {part.number} of an artifact that has {len(sizes)} parts")
    if len(sizes) == 1 and part.sha256 != row.sha256:
        raise Invalid("the only part of an artifact has the artifact's SHA-256")
    signed = direct.part_url(
        row.object, row.upload_id, part.number, sizes[part.number - 1], part.sha256
    )
    return SignedPart(number=part.number, url=signed.url, headers=dict(signed.headers))


async def complete(
    server: Server,
    who: Caller | NodeCredentials,
    sha256: str,
    lease: Hold | None,
    part_sha256s: Sequence[str],
) -> int | None:
    """Size of the artifact once all its bytes are stored and verified; None: not yet, ask again.

    `part_sha256s`: as they were signed; the store compares them with what it has.
    """
    charged, direct = await outputs.charged_upload(server, who, sha256, lease), server.blobs.direct
    room = UploadReservation(outputs.uploader_of(who, lease), sha256, DIRECT, charged.account)
    row = await server.store.read(storage.direct_upload(room))
    if row is None or not row.upload_id:
        try:
            return await outputs.size_of(server, who, sha256, lease)  # it was completed before
        except NotFound:
            raise Conflict(
                f"no upload of {sha256} is in progress; begin with POST /v1/artifacts/{sha256}/parts"
            ) from None
    if direct is None:
        raise Unreachable("the object store is not ready; try again later")
    running = direct.completions
    task = running.get(row.object)
    if task is None:
        work = _complete(server, direct, charged, room, row, part_sha256s)
        task = asyncio.create_task(work)
        running[row.object] = task
        task.add_done_callback(lambda done: _ended(running, row.object, done))
    done, _ = await asyncio.wait([task], timeout=ANSWER_WITHIN_S)
    return task.result() if done else None


def _ended(running: dict[str, asyncio.Task[int]], key: str, done: asyncio.Task[int]) -> None:
    running.pop(key, None)
    if not done.cancelled():
        done.exception()  # marks it as retrieved: no request may be waiting


async def _complete(
    server: Server,
    direct: MultipartUploads,
    charged: outputs.ChargedUpload,
    room: UploadReservation,
    row: UploadsRecord,
    part_sha256s: Sequence[str],
) -> int:
    sizes = part_sizes(row.size_bytes)
    stored = await direct.parts(row.object, row.upload_id)
    if stored is not None:
        if [part.size for part in stored] != sizes:
            raise Conflict(f"{len(stored)} of {len(sizes)} parts are stored; send the others first")
        if len(part_sha256s) != len(sizes):
            raise Invalid(f"{len(part_sha256s)} checksums for {len(sizes)} parts")
        await direct.complete(row.object, row.upload_id, stored, part_sha256s)
    try:
        async with direct.verifying:
            found = await _verified(server, row, reads=len(sizes) > 1)
    except (Invalid, NotFound):
        await drop(server, room)
        raise
    try:
        await outputs.refer(server, charged.upload, room, found)
    except StaleLease:
        # another replica may have completed the same upload while this one verified it
        if not await server.store.read(storage.is_stored(room.account, row.sha256)):
            raise
    return found.size


async def _verified(server: Server, row: UploadsRecord, *, reads: bool) -> StoredBlob:
    digest, size = hashlib.sha256(), 0
    if not reads:
        async for _ in server.blobs.read(BlobLocation(row.object), row.size_bytes - 1, 1):
            size = row.size_bytes
        return StoredBlob(row.sha256, size, row.object)
    async for piece in server.blobs.read(BlobLocation(row.object), 0, row.size_bytes):
        size += len(piece)
        await asyncio.to_thread(digest.update, piece)
    if size != row.size_bytes or digest.hexdigest() != row.sha256:
        raise mismatch(row.sha256, digest.hexdigest())
    return StoredBlob(row.sha256, size, row.object)


# ---- removal


async def drop(server: Server, room: UploadReservation) -> bool:
    """Give up the direct upload of an uploader; False if there is none."""
    direct = UploadReservation(room.uploader, room.sha256, DIRECT, room.account)
    if await server.store.read(storage.direct_upload(direct)) is None:
        return False
    dropped = await server.write(storage.forget_upload(direct))
    await discard(server, dropped)
    return bool(dropped)


async def drop_all(server: Server, uploader: str) -> None:
    await discard(server, await server.write(storage.forget_uploads_of(uploader)))


async def discard(server: Server, uploads: Sequence[UnfinishedUpload]) -> None:
    """Remove the bytes of direct uploads whose rows were deleted; the sweep repeats what fails here."""
    multipart = server.blobs.multipart
    for upload in uploads:
        if multipart is None or not upload.upload_id:
            continue
        try:
            await multipart.abort(upload.object, upload.upload_id)
            await server.blobs.remove(upload.object)
        except Unreachable as error:
            log.warning("an unfinished upload stays in the object store for now: %s", error)


async def sweep(server: Server, shard: str, before: Instant) -> None:
    """Remove objects of a shard and multipart uploads that no row names and that are older than `before`."""
    multipart = server.blobs.multipart
    try:
        objects = await server.blobs.listed(shard)
        uploads = () if multipart is None else await multipart.unfinished()
        old = [each.key for each in objects if each.modified.timestamp() * SECOND < before]
        begun = [each for each in uploads if each.began.timestamp() * SECOND < before]
        if not old and not begun:
            return
        named = [key.rpartition("/")[2].partition("-")[0] for key in old]
        known = await server.store.read(storage.known_objects(named))
        for key in old:
            if key not in known.objects:
                await server.blobs.remove(key)
        for upload in begun:
            if multipart is not None and upload.upload_id not in known.upload_ids:
                await multipart.abort(upload.key, upload.upload_id)
    except Unreachable as error:
        log.warning("the object store was not swept: %s", error)
