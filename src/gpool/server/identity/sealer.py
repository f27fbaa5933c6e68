"""Seals and opens the store's secret fields under a data key of this server's own. Decides nothing about who may."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpool.core.model import SECOND, Instant, Span
from gpool.server.identity import envelope
from gpool.server.identity.envelope import Envelope, Master, Place, WrappedKey
from gpool.server.store.identity_values import DataKey
from gpool.server.store.operations import sealed
from gpool.server.store.protocol import Store

OLDEST = Span(30 * 86_400 * SECOND)
"""A data key seals no longer than this."""


@dataclass(frozen=True, slots=True)
class MasterSource:
    """Where master keys come from: a file of our own."""

    file: Path

    def load(self) -> tuple[Master, ...]:
        return envelope.masters_from_file(self.file)


class Sealer:
    def __init__(self, store: Store, source: MasterSource, now: Callable[[], Instant]) -> None:
        self._store = store
        self._now = now
        self._envelope = Envelope(source.load())
        self._own: bytes | None = None  # committed
        self._turn = asyncio.Lock()

    async def seal(self, place: Place, plain: bytes) -> bytes:
        if self._is_worn():
            async with self._turn:
                if self._is_worn():
                    await self._begin()
        return self._envelope.seal(place, plain)

    async def open(self, place: Place, field: bytes) -> bytes:
        """`InternalFault` when it was not sealed for this place, or was changed."""
        if not self._envelope.knows(field):
            self._adopt(await self._store.read(sealed.data_keys()))
        return self._envelope.open(place, field)

    def _is_worn(self) -> bool:
        return self._own is None or self._envelope.is_worn(self._now(), OLDEST)

    async def _begin(self) -> None:
        """A data key of our own, committed before anything is sealed under it."""
        self._own = None
        made = self._envelope.begin_key(self._now())
        await self._store.write(sealed.put_data_key(DataKey(made.id, made.wrapped, made.made_at)))
        self._own = made.id

    def _adopt(self, keys: Sequence[DataKey]) -> None:
        self._envelope.adopt(WrappedKey(key.id, key.wrapped, key.created_at) for key in keys)
