"""Uploads through the server, and access to stored artifacts by key. Authorization is decided elsewhere.

Bytes reach the store after they are on disk and match the hash. Parts of a resumable upload are kept per uploader, so
nobody can corrupt another's. With encryption no plain byte is written: see `encryption.ciphers`.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from gpool.core.errors import Conflict, Invalid, NotFound, TooLarge, Unreachable
from gpool.core.model import Instant, Span
from gpool.server.blobs.multipart import MultipartUploads
from gpool.server.blobs.stores import (
    CHUNK_BYTES,
    BlobStore,
    FolderStore,
    StoredObject,
    is_in_folder,
)
from gpool.server.encryption.ciphers import (
    FileSealer,
    PartCipher,
    new_file_key,
    opened_range,
    sealed_range,
)

log = logging.getLogger(__name__)

BUSY = "another of your requests is uploading this artifact; wait for it"


@dataclass(frozen=True, slots=True)
class UploadPart:
    first: int
    last: int
    total: int

    @property
    def is_last(self) -> bool:
        return self.last + 1 == self.total


class StoredBlob(NamedTuple):
    sha256: str
    size: int
    object: str  # key in the bucket or in the folder; empty: the bytes were stored before
    file_key: bytes = b""  # key of the encrypted bytes; empty: plain


class BlobLocation(NamedTuple):
    """Key under which bytes are stored, and the key that decrypts them (empty: plain)."""

    key: str
    file_key: bytes = b""


class StreamCipher(Protocol):
    def update(self, data: bytes) -> bytes: ...
    def finish(self) -> bytes: ...


class Blobs:
    """`min_free_bytes`: free space of the disk that uploads leave untouched. `bucket` keeps new artifacts, if given;
    those in the folder stay readable. `encrypts`: new artifacts, which then pass through the server only.
    """

    def __init__(
        self,
        root: Path,
        max_bytes: int,
        min_free_bytes: int = 0,
        bucket: BlobStore | None = None,
        multipart: MultipartUploads | None = None,
        *,
        encrypts: bool = False,
    ) -> None:
        self._root = root
        self._folder = FolderStore(root)
        self._bucket = bucket
        self.multipart = multipart
        self._incoming = root / "incoming"
        self._max_bytes = max_bytes
        self._min_free_bytes = min_free_bytes
        self._encrypts = encrypts
        self._busy: set[Path] = set()
        self._claimed: set[Path] = set()
        self._incoming.mkdir(parents=True, exist_ok=True, mode=0o700)

    @property
    def direct(self) -> MultipartUploads | None:
        """Transfers between others and the bucket, if it was found fit for them; others cannot encrypt."""
        fit = self.multipart is not None and self.multipart.is_ready and not self._encrypts
        return self.multipart if fit else None

    async def close(self) -> None:
        if self.multipart is not None:
            await self.multipart.close()

    def check_free(self, more_bytes: int = 0) -> None:
        """Raise `Unreachable` if the disk would have less than its free minimum after `more_bytes`."""
        if not self._min_free_bytes:
            return
        free = shutil.disk_usage(self._root).free
        if free - more_bytes < self._min_free_bytes:
            raise Unreachable(
                f"the server's disk has {free} bytes free and keeps {self._min_free_bytes} of them "
                "(GPOOL_SERVER_MIN_FREE_BYTES); try again when an operator has made room"
            )

    async def verify(self, sha256: str, body: AsyncIterator[bytes]) -> int:
        """Size of a body that must have this hash; nothing is stored."""
        digest, size = hashlib.sha256(), 0
        async for chunk in body:
            size += len(chunk)
            if size > self._max_bytes:
                raise TooLarge(f"the upload exceeds its {self._max_bytes} bytes")
            digest.update(chunk)
        if digest.hexdigest() != sha256:
            raise mismatch(sha256, digest.hexdigest())
        return size

    async def store(
        self, sha256: str, body: AsyncIterator[bytes], *, leaves_free: bool = True
    ) -> StoredBlob:
        """Store an artifact. `leaves_free`: refuse to use the free minimum of the disk."""
        temporary = self._incoming / f"{secrets.token_hex(8)}.tmp"
        digest, key = hashlib.sha256(), new_file_key() if self._encrypts else b""
        cipher = FileSealer(key) if key else None
        try:
            size = await self._append(
                temporary, 0, self._max_bytes, body, digest, cipher, leaves_free=leaves_free
            )
            if digest.hexdigest() != sha256:
                raise mismatch(sha256, digest.hexdigest())
            return await self._publish(temporary, sha256, size, key)
        finally:
            temporary.unlink(missing_ok=True)

    async def store_part(
        self,
        sha256: str,
        uploader: str,
        part: UploadPart,
        body: AsyncIterator[bytes],
        part_key: bytes = b"",
    ) -> StoredBlob | None:
        """Append a part; return the artifact after the last, else None. `Conflict` if it starts elsewhere.

        `part_key` encrypts the parts; given if and only if artifacts are encrypted.
        """
        if part.total > self._max_bytes:
            raise TooLarge(f"the artifact has {part.total} bytes; the limit is {self._max_bytes}")
        partial = self._partial(sha256, uploader)
        if partial in self._busy:
            raise Conflict("another of your requests is uploading this artifact; wait for it")
        self._busy.add(partial)
        try:
            have = self.offset(sha256, uploader) or 0
            if part.first != have:
                raise Conflict(
                    f"the part starts at byte {part.first}, but {have} bytes are stored; continue there",
                    offset=have,
                )
            cipher = PartCipher(part_key, have) if part_key else None
            await self._append(partial, have, part.last + 1, body, None, cipher)
            if self.offset(sha256, uploader) != part.last + 1:
                raise Invalid(
                    "the part is shorter than its Content-Range says",
                    offset=self.offset(sha256, uploader),
                )
            if not part.is_last:
                return None
            key = new_file_key() if part_key else b""
            whole = self._incoming / f"{secrets.token_hex(8)}.tmp" if key else partial
            try:
                found = await asyncio.to_thread(_digest_of, partial, part_key, whole, key)
                if found != sha256:
                    partial.unlink(missing_ok=True)
                    raise mismatch(sha256, found)
                stored = await self._publish(whole, sha256, part.total, key)
            except Unreachable:  # of the bucket: the uploader sends its last part again
                await asyncio.to_thread(os.truncate, partial, have)
                raise
            finally:
                if key:
                    whole.unlink(missing_ok=True)
            partial.unlink(missing_ok=True)
            return stored
        finally:
            self._busy.discard(partial)

    def offset(self, sha256: str, uploader: str) -> int | None:
        """Bytes stored of an upload in parts. Opened, since a network file system may remember an old size."""
        try:
            with self._partial(sha256, uploader).open("rb") as file:
                return os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            return None

    @contextmanager
    def sole_writer(self, sha256: str, uploader: str) -> Iterator[None]:
        """`Conflict` while another request of this process writes a part, or claims the upload among replicas."""
        partial = self._partial(sha256, uploader)
        if partial in self._claimed:
            raise Conflict(BUSY)
        self._claimed.add(partial)
        try:
            yield
        finally:
            self._claimed.discard(partial)

    def read(self, at: BlobLocation, first: int, length: int) -> AsyncIterator[bytes]:
        store = self._store_of(at.key)
        if not at.file_key or length <= 0:
            return store.read(at.key, first, length)
        sealed = sealed_range(first, length)
        pieces = store.read(at.key, sealed.first, sealed.length)
        return opened_range(at.file_key, pieces, sealed, length)

    async def read_range(self, at: BlobLocation, first: int, length: int) -> bytes:
        return b"".join([piece async for piece in self.read(at, first, length)])

    async def put_bytes(self, data: bytes) -> StoredBlob:
        async def once() -> AsyncIterator[bytes]:
            yield data

        return await self.store(hashlib.sha256(data).hexdigest(), once(), leaves_free=False)

    async def remove(self, key: str) -> bool:
        """False: the object store does not answer; its sweep repeats it."""
        try:
            await self._store_of(key).remove(key)
        except (Unreachable, NotFound) as error:
            log.warning("%s was not removed: %s", key, error)
            return False
        return True

    async def listed(self, shard: str) -> Sequence[StoredObject]:
        """Objects of the folder and of the bucket."""
        found = await self._folder.listed(shard)
        return found if self._bucket is None else (*found, *await self._bucket.listed(shard))

    def _store_of(self, key: str) -> BlobStore:
        if is_in_folder(key):
            return self._folder
        if self._bucket is None:
            raise NotFound(
                f"{key} lies in an object store and this server has none; set GPOOL_SERVER_ARTIFACTS as before"
            )
        return self._bucket

    def remove_part(self, sha256: str, uploader: str) -> bool:
        """Drop an unfinished upload in parts; False if there is none, or a request is writing to it."""
        partial = self._partial(sha256, uploader)
        if partial in self._busy or not partial.exists():
            return False
        partial.unlink(missing_ok=True)
        return True

    def remove_parts_of(self, uploader: str) -> None:
        for path in self._incoming.glob(f"{uploader}-*.part"):
            path.unlink(missing_ok=True)

    def remove_temporary(self) -> None:
        """Remove files of requests that a stopped server did not finish."""
        for path in self._incoming.glob("*.tmp"):
            path.unlink(missing_ok=True)

    def remove_stale_parts(self, now: Instant, older_than: Span) -> int:
        removed = 0
        for path in self._incoming.iterdir():
            with suppress(FileNotFoundError):  # the upload ended meanwhile
                if path not in self._busy and path.stat().st_mtime_ns // 1000 + older_than < now:
                    path.unlink()
                    removed += 1
        return removed

    def _partial(self, sha256: str, uploader: str) -> Path:
        kind = "sealed.part" if self._encrypts else "part"
        return self._incoming / f"{uploader}-{sha256}.{kind}"

    async def _append(
        self,
        path: Path,
        have: int,
        limit: int,
        body: AsyncIterator[bytes],
        digest: hashlib._Hash | None,
        cipher: StreamCipher | None = None,
        *,
        leaves_free: bool = True,
    ) -> int:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        buffer: list[bytes] = []
        buffered = 0
        try:
            async for chunk in body:
                have += len(chunk)
                if have > limit:
                    raise TooLarge(f"the upload exceeds its {limit} bytes")
                buffer.append(chunk)
                buffered += len(chunk)
                if buffered >= CHUNK_BYTES:
                    if leaves_free:
                        self.check_free(buffered)
                    await _uncancelled(_write, descriptor, b"".join(buffer), digest, cipher)
                    buffer, buffered = [], 0
            await _uncancelled(_write, descriptor, b"".join(buffer), digest, cipher, True)
        finally:
            os.close(descriptor)
        return have

    async def _publish(self, file: Path, sha256: str, size: int, file_key: bytes) -> StoredBlob:
        store: BlobStore = self._folder if self._bucket is None else self._bucket
        key = await store.put(file, sha256)
        await asyncio.to_thread(file.unlink, missing_ok=True)
        return StoredBlob(sha256, size, key, file_key)


async def _uncancelled(work: Callable[..., None], *args: object) -> None:
    """Run in a thread and wait even if cancelled: the caller then closes the descriptor, and a thread still writing
    would write into whichever file gets the same number next.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def _write(
    descriptor: int,
    data: bytes,
    digest: hashlib._Hash | None,
    cipher: StreamCipher | None,
    sync: bool = False,
) -> None:
    """`sync`: these are the last bytes."""
    if digest is not None:
        digest.update(data)
    if cipher is not None:
        data = cipher.update(data) + (cipher.finish() if sync else b"")
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
        if sync:
            os.fsync(descriptor)
    except OSError as full:
        if full.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise Unreachable("the server's disk is full; try again later") from full


def _digest_of(path: Path, part_key: bytes, into: Path, key: bytes) -> str:
    """SHA-256 of the contents of a finished upload. With keys it is decrypted, and written encrypted as an artifact."""
    with path.open("rb") as file:
        if not part_key:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest, parts, cipher = hashlib.sha256(), PartCipher(part_key, 0), FileSealer(key)
        descriptor = os.open(into, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            while piece := file.read(CHUNK_BYTES):
                _write(descriptor, parts.update(piece), digest, cipher)
            _write(descriptor, b"", digest, cipher, sync=True)
        finally:
            os.close(descriptor)
        return digest.hexdigest()


def mismatch(wanted: str, found: str) -> Invalid:
    return Invalid(
        f"the bytes have SHA-256 {found}, but the URL names {wanted}; nothing was stored"
    )
