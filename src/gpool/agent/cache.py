"""Artifacts on the node, by their hash: fetched once however many ask, the least used removed past the cap.

A file in use is never removed under its user: `held` counts them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from gpool.core.model import GIB
from gpool.transfer.artifacts import LeaseRef

Fetch = Callable[[str, Path, LeaseRef], Awaitable[None]]
"""Brings an artifact to a path: whole and verified, or raises."""


class ArtifactCache:
    def __init__(self, directory: Path, fetch: Fetch, cap_bytes: int = 10 * GIB) -> None:
        self._directory = directory
        self._fetch = fetch
        self._cap = cap_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()  # the least recently used first
        self._total = 0
        self._users: dict[str, int] = {}
        self._flights: dict[str, asyncio.Task[None]] = {}
        directory.mkdir(parents=True, exist_ok=True)
        found = [(f.stat().st_mtime_ns, f) for f in directory.iterdir() if len(f.name) == 64]
        for _, file in sorted(found):
            self._note(file.name, file.stat().st_size)

    @asynccontextmanager
    async def held(self, sha256: str, lease: LeaseRef) -> AsyncIterator[Path]:
        """The artifact's file, kept for as long as the block lasts."""
        self._users[sha256] = self._users.get(sha256, 0) + 1
        try:
            if sha256 not in self._sizes:
                await self._bring(sha256, lease)
            self._sizes.move_to_end(sha256)
            yield self._directory / sha256
        finally:
            self._users[sha256] -= 1
            if not self._users[sha256]:
                del self._users[sha256]
            self._shrink()

    async def read(self, sha256: str, lease: LeaseRef) -> bytes:
        async with self.held(sha256, lease) as file:
            return await asyncio.to_thread(file.read_bytes)

    async def _bring(self, sha256: str, lease: LeaseRef) -> None:
        """One flight for all who ask; the last one to give up calls it off."""
        flight = self._flights.get(sha256)
        if flight is None:
            flight = asyncio.create_task(self._fly(sha256, lease))
            self._flights[sha256] = flight
            flight.add_done_callback(lambda done: self._landed(sha256, done))
        try:
            await asyncio.shield(flight)
        except asyncio.CancelledError:
            if self._users.get(sha256, 0) <= 1:
                flight.cancel()
            raise

    def _landed(self, sha256: str, done: asyncio.Task[None]) -> None:
        self._flights.pop(sha256, None)
        if not done.cancelled():
            done.exception()  # whoever still waits gets it; nobody may be left

    async def _fly(self, sha256: str, lease: LeaseRef) -> None:
        target = self._directory / sha256
        await self._fetch(sha256, target, lease)
        self._note(sha256, target.stat().st_size)

    def _note(self, sha256: str, size: int) -> None:
        self._total += size - self._sizes.get(sha256, 0)
        self._sizes[sha256] = size

    def _shrink(self) -> None:
        if self._total <= self._cap:
            return
        for sha256 in [s for s in self._sizes if s not in self._users]:
            self._total -= self._sizes.pop(sha256)
            (self._directory / sha256).unlink(missing_ok=True)
            if self._total <= self._cap:
                return
