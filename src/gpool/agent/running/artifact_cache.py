"""Artifacts on the node, by their hash: fetched once however many ask, the least used removed past the cap.

A file in use is never removed under its user: `held` counts them. What an earlier agent left is proved by its hash before
anybody gets it, and a fetch that it did not end goes on where it stopped; such parts are the first to go.
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
from gpool.transfer.artifacts import LeaseRef, hash_of

Fetch = Callable[[str, Path, LeaseRef], Awaitable[None]]
"""Brings an artifact to a path: whole and verified, or raises; what came so far may stay beside it as `<path>.part`."""

PART = ".part"


@dataclass(frozen=True, slots=True)
class _Flight:
    task: asyncio.Task[None]
    lease: LeaseRef  # under which it is fetched


class ArtifactCache:
    def __init__(self, directory: Path, fetch: Fetch, cap_bytes: int = 10 * GIB) -> None:
        self._directory = directory
        self._fetch = fetch
        self._cap = cap_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()  # the least recently used first
        self._parts: OrderedDict[str, int] = OrderedDict()  # of fetches nobody waits for
        self._total = 0
        self._users: dict[str, int] = {}
        self._flights: dict[str, _Flight] = {}
        directory.mkdir(parents=True, exist_ok=True)
        found = [(f.stat().st_mtime_ns, f) for f in directory.iterdir()]
        for _, file in sorted(found):
            if len(file.name) == 64:
                self._note(file.name, file.stat().st_size)
            elif file.name.endswith(PART):
                self._note_part(file.name.removesuffix(PART))
        self._unproved = set(self._sizes)
        self._shrink()

    @asynccontextmanager
    async def held(self, sha256: str, lease: LeaseRef) -> AsyncIterator[Path]:
        """The artifact's file, kept for as long as the block lasts."""
        file = self._directory / sha256
        self._users[sha256] = self._users.get(sha256, 0) + 1
        try:
            while sha256 not in self._sizes or sha256 in self._unproved:
                await self._bring(sha256, lease)
            self._sizes.move_to_end(sha256)
            yield file
        finally:
            self._users[sha256] -= 1
            if not self._users[sha256]:
                del self._users[sha256]
            with suppress(OSError):  # what was used last is known after a restart
                os.utime(file)
            self._shrink()

    async def read(self, sha256: str, lease: LeaseRef) -> bytes:
        async with self.held(sha256, lease) as file:
            return await asyncio.to_thread(file.read_bytes)

    async def _bring(self, sha256: str, lease: LeaseRef) -> None:
        """One flight for all who ask; the last one to give up calls it off.

        Returns without it when another's flight came to nothing: that was called off, or refused to another lease.
        """
        flight = self._flights.get(sha256)
        if flight is None:
            task = asyncio.create_task(self._fly(sha256, lease))
            flight = self._flights[sha256] = _Flight(task, lease)
            task.add_done_callback(lambda done: self._landed(sha256, done))
        asking = asyncio.current_task()
        try:
            await asyncio.shield(flight.task)
        except asyncio.CancelledError:
            if asking is None or not asking.cancelling():
                return  # not we: its last asker gave up as we came
            if self._users.get(sha256, 0) <= 1:
                flight.task.cancel()
                await asyncio.wait([flight.task])
            raise
        except GpoolError:
            if flight.lease == lease:
                raise

    def _landed(self, sha256: str, done: asyncio.Task[None]) -> None:
        self._flights.pop(sha256, None)
        self._note_part(sha256)
        if not done.cancelled():
            done.exception()  # whoever still waits gets it; nobody may be left

    async def _fly(self, sha256: str, lease: LeaseRef) -> None:
        target = self._directory / sha256
        if sha256 in self._unproved:
            found, _ = await asyncio.to_thread(hash_of, target)
            self._unproved.discard(sha256)
            if found == sha256:
                return
            self._total -= self._sizes.pop(sha256)
            target.unlink()
        self._total -= self._parts.pop(sha256, 0)
        await self._fetch(sha256, target, lease)
        self._note(sha256, target.stat().st_size)

    def _note(self, sha256: str, size: int) -> None:
        self._total += size - self._sizes.get(sha256, 0)
        self._sizes[sha256] = size

    def _note_part(self, sha256: str) -> None:
        """What an unfinished fetch left, if it left anything."""
        with suppress(FileNotFoundError):
            size = (self._directory / f"{sha256}{PART}").stat().st_size
            self._total += size - self._parts.get(sha256, 0)
            self._parts[sha256] = size

    def _shrink(self) -> None:
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
                self._unproved.discard(sha256)
                (self._directory / sha256).unlink(missing_ok=True)
