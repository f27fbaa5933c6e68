"""The node's artifact cache by SHA-256: one download for all requests, least recently used files evicted past the cap.

`held` counts users; a file in use stays. Files of an earlier agent are verified by hash; its partial downloads are
resumed, and evicted first.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gpool.core.errors import GpoolError
from gpool.core.model import GIB
from gpool.transfer.requests import LeaseRef, hash_of

Fetch = Callable[[str, Path, LeaseRef], Awaitable[None]]
"""Download an artifact to a path, whole and verified, or raise; a partial download may stay as `<path>.part`."""

PART = ".part"


@dataclass(frozen=True, slots=True)
class _Download:
    task: asyncio.Task[None]
    lease: LeaseRef  # under which it is downloaded


class ArtifactCache:
    def __init__(self, directory: Path, fetch: Fetch, cap_bytes: int = 10 * GIB) -> None:
        self._directory = directory
        self._fetch = fetch
        self._cap = cap_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()  # the least recently used first
        self._parts: OrderedDict[str, int] = OrderedDict()  # partial downloads without a caller
        self._total = 0
        self._users: dict[str, int] = {}
        self._downloads: dict[str, _Download] = {}
        directory.mkdir(parents=True, exist_ok=True)
        found = [(f.stat().st_mtime_ns, f) for f in directory.iterdir()]
        for _, file in sorted(found):
            if len(file.name) == 64:
                self._count(file.name, file.stat().st_size)
            elif file.name.endswith(PART):
                self._count_part(file.name.removesuffix(PART))
        self._unverified = set(self._sizes)
        self._evict()

    @asynccontextmanager
    async def held(self, sha256: str, lease: LeaseRef) -> AsyncIterator[Path]:
        file = self._directory / sha256
        self._users[sha256] = self._users.get(sha256, 0) + 1
        try:
            while sha256 not in self._sizes or sha256 in self._unverified:
                await self._ensure(sha256, lease)
            self._sizes.move_to_end(sha256)
            yield file
        finally:
            self._users[sha256] -= 1
            if not self._users[sha256]:
                del self._users[sha256]
            with suppress(OSError):  # keeps the order of use over a restart
                os.utime(file)
            self._evict()

    async def read(self, sha256: str, lease: LeaseRef) -> bytes:
        async with self.held(sha256, lease) as file:
            return await asyncio.to_thread(file.read_bytes)

    async def _ensure(self, sha256: str, lease: LeaseRef) -> None:
        """Join or start the download; the last cancelled waiter cancels it.

        The file may be missing after it: another caller's download was cancelled, or refused to that caller's lease.
        """
        download = self._downloads.get(sha256)
        if download is None:
            task = asyncio.create_task(self._download(sha256, lease))
            download = self._downloads[sha256] = _Download(task, lease)
            task.add_done_callback(lambda done: self._downloaded(sha256, done))
        caller = asyncio.current_task()
        try:
            await asyncio.shield(download.task)
        except asyncio.CancelledError:
            if caller is None or not caller.cancelling():
                return  # another caller was cancelled just now
            if self._users.get(sha256, 0) <= 1:
                download.task.cancel()
                await asyncio.wait([download.task])
            raise
        except GpoolError:
            if download.lease == lease:
                raise

    def _downloaded(self, sha256: str, done: asyncio.Task[None]) -> None:
        self._downloads.pop(sha256, None)
        self._count_part(sha256)
        if not done.cancelled():
            done.exception()  # marks it as retrieved: no caller may be left

    async def _download(self, sha256: str, lease: LeaseRef) -> None:
        target = self._directory / sha256
        if sha256 in self._unverified:
            found, _ = await asyncio.to_thread(hash_of, target)
            self._unverified.discard(sha256)
            if found == sha256:
                return
            self._total -= self._sizes.pop(sha256)
            target.unlink()
        self._total -= self._parts.pop(sha256, 0)
        await self._fetch(sha256, target, lease)
        self._count(sha256, target.stat().st_size)

    def _count(self, sha256: str, size: int) -> None:
        self._total += size - self._sizes.get(sha256, 0)
        self._sizes[sha256] = size

    def _count_part(self, sha256: str) -> None:
        with suppress(FileNotFoundError):
            size = (self._directory / f"{sha256}{PART}").stat().st_size
            self._total += size - self._parts.get(sha256, 0)
            self._parts[sha256] = size

    def _evict(self) -> None:
        for sha256 in list(self._parts):
            if self._total <= self._cap:
                return
            if sha256 not in self._users:
                self._total -= self._parts.pop(sha256)
                (self._directory / f"{sha256}{PART}").unlink(missing_ok=True)
        for sha256 in list(self._sizes):
            if self._total <= self._cap:
                return
            if sha256 not in self._users:
                self._total -= self._sizes.pop(sha256)
                self._unverified.discard(sha256)
                (self._directory / sha256).unlink(missing_ok=True)
