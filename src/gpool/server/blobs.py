"""Artifact files in a directory, named by SHA-256. Authorization is decided elsewhere.

A file gets its name after its bytes are on disk and match the hash. Parts of a resumable upload are kept per uploader,
so nobody can corrupt another's. An upload pins its artifact until its reference is written.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import secrets
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gpool.core.errors import Conflict, Invalid, NotFound, TooLarge, Unreachable
from gpool.core.model import Instant, Span

CHUNK_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class UploadPart:
    first: int
    last: int
    total: int

    @property
    def is_last(self) -> bool:
        return self.last + 1 == self.total


class Blobs:
    """`min_free_bytes`: free space of the disk that uploads leave untouched."""

    def __init__(self, root: Path, max_bytes: int, min_free_bytes: int = 0) -> None:
        self._root = root
        self._incoming = root / "incoming"
        self._max_bytes = max_bytes
        self._min_free_bytes = min_free_bytes
        self._pins: Counter[str] = Counter()
        self._busy: set[Path] = set()
        self._incoming.mkdir(parents=True, exist_ok=True, mode=0o700)

    def path(self, sha256: str) -> Path:
        return self._root / sha256[:2] / sha256[2:4] / sha256

    @contextmanager
    def pinned(self, sha256: str) -> Iterator[None]:
        self._pins[sha256] += 1
        try:
            yield
        finally:
            self._pins[sha256] -= 1
            if not self._pins[sha256]:
                del self._pins[sha256]

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
            raise _mismatch(sha256, digest.hexdigest())
        return size

    async def store(
        self, sha256: str, body: AsyncIterator[bytes], *, leaves_free: bool = True
    ) -> int:
        """Store an artifact. `leaves_free`: refuse to use the free minimum of the disk."""
        temporary = self._incoming / f"{secrets.token_hex(8)}.tmp"
        digest = hashlib.sha256()
        try:
            size = await self._append(temporary, 0, self._max_bytes, body, digest, leaves_free)
            if digest.hexdigest() != sha256:
                raise _mismatch(sha256, digest.hexdigest())
            await asyncio.to_thread(self._publish, temporary, sha256)
        finally:
            temporary.unlink(missing_ok=True)
        return size

    async def store_part(
        self, sha256: str, uploader: str, part: UploadPart, body: AsyncIterator[bytes]
    ) -> int | None:
        """Append a part; return the artifact's size after the last, else None. `Conflict` if it starts elsewhere."""
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
            await self._append(partial, have, part.last + 1, body, None)
            if self.offset(sha256, uploader) != part.last + 1:
                raise Invalid(
                    "the part is shorter than its Content-Range says",
                    offset=self.offset(sha256, uploader),
                )
            if not part.is_last:
                return None
            found = await asyncio.to_thread(_digest_of, partial)
            if found != sha256:
                partial.unlink(missing_ok=True)
                raise _mismatch(sha256, found)
            await asyncio.to_thread(self._publish, partial, sha256)
            return part.total
        finally:
            self._busy.discard(partial)

    def offset(self, sha256: str, uploader: str) -> int | None:
        try:
            return self._partial(sha256, uploader).stat().st_size
        except FileNotFoundError:
            return None

    async def read(self, sha256: str, first: int, length: int) -> AsyncIterator[bytes]:
        try:
            descriptor = os.open(self.path(sha256), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFound(f"there is no artifact {sha256}") from None
        try:
            while length > 0:
                chunk = await asyncio.to_thread(
                    os.pread, descriptor, min(CHUNK_BYTES, length), first
                )
                if not chunk:
                    return
                first += len(chunk)
                length -= len(chunk)
                yield chunk
        finally:
            os.close(descriptor)

    async def put_bytes(self, data: bytes) -> str:
        async def once() -> AsyncIterator[bytes]:
            yield data

        sha256 = hashlib.sha256(data).hexdigest()
        await self.store(sha256, once(), leaves_free=False)
        return sha256

    def remove(self, sha256: str) -> bool:
        if sha256 in self._pins:
            return False
        self.path(sha256).unlink(missing_ok=True)
        return True

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
        return self._incoming / f"{uploader}-{sha256}.part"

    async def _append(
        self,
        path: Path,
        have: int,
        limit: int,
        body: AsyncIterator[bytes],
        digest: hashlib._Hash | None,
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
                    await _uncancelled(_write, descriptor, b"".join(buffer), digest)
                    buffer, buffered = [], 0
            await _uncancelled(_write, descriptor, b"".join(buffer), digest, True)
        finally:
            os.close(descriptor)
        return have

    def _publish(self, temporary: Path, sha256: str) -> None:
        final = self.path(sha256)
        final.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary.replace(final)
        for folder in (final.parent, final.parent.parent, self._root):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


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


def _write(descriptor: int, data: bytes, digest: hashlib._Hash | None, sync: bool = False) -> None:
    if digest is not None:
        digest.update(data)
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


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _mismatch(wanted: str, found: str) -> Invalid:
    return Invalid(
        f"the bytes have SHA-256 {found}, but the URL names {wanted}; nothing was stored"
    )
