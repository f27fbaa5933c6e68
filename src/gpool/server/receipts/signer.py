"""Receipt keys of the pool: their history in the store, and the newest private half, sealed. Replaced by operators only.

Nothing is cached: a replica that kept a key would sign with it after another one has replaced it.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from gpool.core.model import SECOND, Instant
from gpool.server.identity.envelope import FieldLocation
from gpool.server.identity.sealer import Sealer
from gpool.server.store.generated_rows import ReceiptKeysRecord
from gpool.server.store.operations.identity import receipt_keys
from gpool.server.store.protocol import Operation, Store
from gpool.wallet.receipt_keys import KeyEntry, KeyHistory, ReceiptKey


@dataclass(frozen=True, slots=True)
class ReceiptKeyRotation:
    """Next history, and the operation that stores it (`Conflict` if another request was first)."""

    history: KeyHistory
    operation: Operation[None]


@dataclass(frozen=True, slots=True)
class CurrentReceiptKey:
    """`pool`: name of the pool in receipts. `from_ms`: the key signs nothing that is older."""

    pool: str
    key: ReceiptKey
    from_ms: int


class ReceiptSigner:
    def __init__(self, store: Store, sealer: Sealer, pool: str) -> None:
        """`pool`: name of the pool in receipts, equal on every replica."""
        self._store, self._sealer, self.pool = store, sealer, pool

    async def history(self) -> KeyHistory | None:
        """None before the first key."""
        return self._history(await self._store.read(receipt_keys.receipt_keys()))

    async def current(self) -> CurrentReceiptKey | None:
        """The key that signs now; None before the first one."""
        rows = await self._store.read(receipt_keys.receipt_keys())
        if not rows:
            return None
        return CurrentReceiptKey(self.pool, await self._opened(rows[-1]), rows[-1].from_ms)

    async def rotation(self, now: Instant) -> ReceiptKeyRotation:
        """Prepare a new key, endorsed by the current one; the first key endorses itself."""
        rows = await self._store.read(receipt_keys.receipt_keys())
        history, seed = self._history(rows), secrets.token_bytes(32)
        new = ReceiptKey(seed)
        now_ms = now * 1000 // SECOND
        if history is None:
            history = KeyHistory.starting(self.pool, new, now_ms)
        else:
            # a clock that was set back must not reorder keys
            from_ms = max(now_ms, history.keys[-1].from_ms + 1)
            history = history.rotated(await self._opened(rows[-1]), new, from_ms)
        entry = history.keys[-1]
        sealed = await self._sealer.seal(_place(new.id), seed)
        record = ReceiptKeysRecord(new.id, sealed, entry.public, entry.from_ms, entry.endorsement)
        known = [row.id for row in rows]
        return ReceiptKeyRotation(history, receipt_keys.put_receipt_key(record, known))

    def _history(self, rows: tuple[ReceiptKeysRecord, ...]) -> KeyHistory | None:
        entries = tuple(KeyEntry(row.public, row.from_ms, row.endorsement) for row in rows)
        return KeyHistory(self.pool, entries) if entries else None

    async def _opened(self, row: ReceiptKeysRecord) -> ReceiptKey:
        assert row.sealed is not None, "the newest receipt key has its private half"
        return ReceiptKey(await self._sealer.open(_place(row.id), row.sealed))


def _place(id_: str) -> FieldLocation:
    return FieldLocation("receipt_keys", id_, "sealed")
