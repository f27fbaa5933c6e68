"""Seals and opens secret fields of the store, and rotates their keys while serving (`envelope` explains the scheme).

A rotation is a state of the store: one transaction retires all data keys; every server that finds a retired key, also
after a crash, moves fields to its own key page by page. Until its `RotateKeys` loop runs, a server may seal with a
retired key, so that key is deleted only after `GRACE` and only if no field uses it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpool.core.errors import Conflict, InternalFault
from gpool.core.ids import SpecId
from gpool.core.model import SECOND, Instant, Span
from gpool.observability.logs import get_logger
from gpool.server.encryption.account_keys import AccountKeys
from gpool.server.encryption.ciphers import AccountKey
from gpool.server.identity import envelope
from gpool.server.identity.envelope import Envelope, FieldLocation, MasterKey, WrappedKey
from gpool.server.store.operations.identity import sealed_fields
from gpool.server.store.protocol import Operation, Store
from gpool.server.store.sealing import Account, account_keys, ensure_keys
from gpool.server.store.values import DataKey, SealedField, SealedSecrets
from gpool.server.wakeups import Wake
from gpool.wire.frames import Secret

log = get_logger(__name__)

OLDEST = Span(30 * 86_400 * SECOND)
"""Longest use of a data key for sealing."""
GRACE = Span(600 * SECOND)
PAGE = 500


@dataclass(frozen=True, slots=True)
class MasterSource:
    file: Path
    text: str = ""
    command: str = ""

    def load(self) -> tuple[MasterKey, ...]:
        if self.command:
            return envelope.masters_from_command(shlex.split(self.command))
        if self.text:
            return envelope.masters_from_text(self.text, "GPOOL_SERVER_MASTER_KEY")
        return envelope.masters_from_file(self.file)

    @property
    def is_ours(self) -> bool:
        return not (self.command or self.text)


@dataclass(frozen=True, slots=True)
class KeyStatus:
    data_keys: int
    retired: int  # of these: to be emptied and deleted
    fields: int
    left: int  # fields still sealed with a retired key
    masters: int  # more than one: a master key rotation is in progress


class Sealer:
    def __init__(
        self,
        store: Store,
        source: MasterSource,
        now: Callable[[], Instant],
        accounts: AccountKeys | None = None,
    ) -> None:
        """`accounts`: the keys of accounts that the store's operations use."""
        self._store = store
        self._source = source
        self._now = now
        self._masters = source.load()
        self._accounts = accounts or AccountKeys(source.load, is_on=False)
        self._marking = _marking(self._masters)
        self._envelope = Envelope(self._masters)
        self._own: bytes | None = None  # id of our data key: committed, not known to be retired
        self._turn = asyncio.Lock()
        self.wake = Wake()

    # ---- fields

    async def seal(self, place: FieldLocation, plain: bytes) -> bytes:
        await self.prepare()
        return self._envelope.seal(place, plain)

    async def prepare(self) -> None:
        """Make sure of a data key; `seal_now` may be called until the next await."""
        if self._is_worn():
            async with self._turn:
                if self._is_worn():
                    await self._begin()

    def seal_now(self, place: FieldLocation, plain: bytes) -> bytes:
        return self._envelope.seal(place, plain)

    async def open(self, place: FieldLocation, field: bytes) -> bytes:
        if not self._envelope.knows(field):
            self._adopt(await self._store.read(sealed_fields.data_keys()))
        return self._envelope.open(place, field)

    async def account_key(self, account: Account) -> AccountKey | None:
        """Data key of the account, stored at its first use; None while data is not encrypted."""
        accounts = self._accounts
        if not accounts.is_on:
            return None
        found = accounts.of(account)
        if found is None:
            await self._store.write(ensure_keys([account]))
            accounts.settle(await self._store.read(account_keys([account])))
            found = accounts.of(account)
        return found

    def forget_account(self, account: Account) -> None:
        """Forget the key of a deleted account."""
        self._accounts.forget(account)

    def opened(self, found: SealedSecrets) -> tuple[Mapping[int, tuple[Secret, ...]], set[SpecId]]:
        """Secrets by spec, and the specs with a secret that does not decrypt."""
        if not found.fields:
            return {}, set()
        self._adopt(found.keys)
        opened: dict[int, tuple[Secret, ...]] = {}
        shut: set[SpecId] = set()
        for spec, fields in found.fields.items():
            try:
                opened[spec] = tuple(
                    Secret(
                        spec, name, self._envelope.open(secret_place(spec, name), field).decode()
                    )
                    for name, field in fields
                )
            except (InternalFault, UnicodeDecodeError):
                shut.add(spec)
        return opened, shut

    def opened_fields(
        self, fields: Sequence[tuple[FieldLocation, bytes]], keys: Sequence[DataKey]
    ) -> list[bytes | None]:
        if not fields:
            return []
        self._adopt(keys)
        found: list[bytes | None] = []
        for place, field in fields:
            try:
                found.append(self._envelope.open(place, field))
            except InternalFault:
                found.append(None)
        return found

    def mark(self, *parts: bytes) -> str:
        """Keyed hash of the parts: equal on every replica, no help in guessing them."""
        made = self._marking.copy()
        for part in parts:
            made.update(len(part).to_bytes(8, "big"))
            made.update(part)
        return made.hexdigest()

    def _is_worn(self) -> bool:
        return self._own is None or self._envelope.is_worn(self._now(), OLDEST)

    async def _begin(self) -> WrappedKey:
        self._own = None
        made = self._envelope.begin_key(self._now())
        await self._store.write(
            sealed_fields.put_data_key(DataKey(made.id, made.wrapped, made.made_at))
        )
        self._own = made.id
        return made

    def _adopt(self, keys: Sequence[DataKey]) -> None:
        wrapped = [WrappedKey(key.id, key.wrapped, key.created_at) for key in keys]
        if any(not self._has_master_of(key) for key in wrapped):
            self._use(self._source.load())  # another replica rotated them
        self._envelope.adopt(wrapped)

    # ---- rotation

    @staticmethod
    def rotation(at: Instant) -> Operation[int]:
        """Operation that retires all data keys and returns their number; call `look_again` after its commit."""
        return sealed_fields.retire_data_keys(at)

    async def retire_worn(self) -> int:
        """Retire data keys that no process seals with any more: each uses its own for at most `OLDEST`."""
        now = self._now()
        before = Instant(now - OLDEST - GRACE)
        return await self._store.write(sealed_fields.retire_data_keys(now, before))

    async def look_again(self) -> tuple[DataKey, ...]:
        keys = await self._store.read(sealed_fields.data_keys())
        self._adopt(keys)
        live = {key.id for key in keys if key.retired_at is None}
        if self._own is not None and self._own not in live:
            self._own = None
        return keys

    async def rekey(self, pause: Callable[[], Awaitable[None]]) -> int:
        """Reseal every field under a retired key, then delete those keys; return the number of fields.

        `pause` is awaited after each page. May be interrupted and restarted at any point.
        """
        retired = {key.id for key in await self.look_again() if key.retired_at is not None}
        moved = 0
        after: SealedField | None = None
        while retired:
            fields = await self._store.read(sealed_fields.sealed_fields(after, PAGE))
            if not fields:
                break
            after = fields[-1]
            old = [field for field in fields if field.sealed[1 : envelope.HEAD_BYTES] in retired]
            if old:
                await self.prepare()
                changes = self._resealed(old)
                moved += await self._store.write(sealed_fields.replace_sealed(changes))
            await pause()
        await self._forget_empty()
        return moved

    def _resealed(self, fields: Sequence[SealedField]) -> list[tuple[SealedField, bytes]]:
        changes = []
        for field in fields:
            place = FieldLocation(field.table, field.row, field.column)
            try:
                new = self._envelope.resealed(place, field.sealed)
            except InternalFault:
                # Changed in the store: nobody can open it, and its data key is kept.
                log.exception(
                    "field does not decrypt", table=field.table, row=field.row, column=field.column
                )
                continue
            if new is not None:
                changes.append((field, new))
        return changes

    async def _forget_empty(self) -> None:
        for key in await self._store.read(sealed_fields.data_keys()):
            if key.retired_at is not None and key.retired_at + GRACE <= self._now():
                with suppress(
                    Conflict
                ):  # a field was sealed with it meanwhile: the next turn moves it
                    await self._store.write(sealed_fields.forget_data_key(key.id))

    # ---- master keys

    async def rotate_master(self) -> int:
        """Add a master key to our file, or load a new first one from the source; return the number of rewrapped keys."""
        if self._source.is_ours and len(await asyncio.to_thread(self._source.load)) == 1:
            await asyncio.to_thread(envelope.add_master_to_file, self._source.file)
        self._use(await asyncio.to_thread(self._source.load))
        return await self.rewrap()

    async def rewrap(self) -> int:
        """Wrap every data key by the first master key, then drop the others from our file. Idempotent."""
        keys = await self._store.read(sealed_fields.data_keys())
        old = {key.id: key.wrapped for key in keys}
        done = 0
        wrapped = [WrappedKey(key.id, key.wrapped, key.created_at) for key in keys]
        for key in envelope.rewrapped(self._masters, wrapped):
            done += await self._store.write(
                sealed_fields.rewrap_data_key(key.id, old[key.id], key.wrapped)
            )
        done += await self._rewrap_accounts()
        if self._source.is_ours and len(self._masters) > 1:
            first = self._masters[0].id
            left = await self._store.read(sealed_fields.data_keys())
            if all(key.wrapped[1 : envelope.HEAD_BYTES] == first for key in left):
                await asyncio.to_thread(envelope.drop_old_masters_from_file, self._source.file)
                self._use(await asyncio.to_thread(self._source.load))
        return done

    async def _rewrap_accounts(self) -> int:
        """Wrap the keys of accounts by the first master key; their data is not touched."""
        done, after = 0, ""
        while rows := await self._store.read(sealed_fields.account_key_page(after, PAGE)):
            after = rows[-1].key_id
            old = {row.key_id: row.wrapped for row in rows}
            keys = [
                WrappedKey(bytes.fromhex(row.key_id), row.wrapped, envelope.NEVER) for row in rows
            ]
            for key in envelope.rewrapped(self._masters, keys):
                name = key.id.hex()
                done += await self._store.write(
                    sealed_fields.rewrap_account_key(name, old[name], key.wrapped)
                )
        return done

    def _has_master_of(self, key: WrappedKey) -> bool:
        return any(key.wrapped[1 : envelope.HEAD_BYTES] == each.id for each in self._masters)

    def _use(self, masters: tuple[MasterKey, ...]) -> None:
        self._masters = masters
        self._marking = _marking(self._masters)
        self._envelope.use_masters(self._masters)

    async def status(self) -> KeyStatus:
        keys = await self._store.read(sealed_fields.data_keys())
        counts = await self._store.read(sealed_fields.sealed_counts())
        retired = {key.id for key in keys if key.retired_at is not None}
        return KeyStatus(
            data_keys=len(keys),
            retired=len(retired),
            fields=sum(counts.values()),
            left=sum(count for key, count in counts.items() if key in retired),
            masters=len(self._masters),
        )


def _marking(masters: Sequence[MasterKey]) -> hmac.HMAC:
    """HMAC by the oldest master key: marks change at the end of a rotation, not during it."""
    return hmac.new(masters[-1].key, b"gpool marks 1\0", hashlib.sha256)


def secret_place(spec: int, name: str) -> FieldLocation:
    return FieldLocation("task_secrets", f"{spec}/{name}", "sealed")
