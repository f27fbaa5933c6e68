"""Data keys of accounts: wrapped by the master key, cached in memory. The store keeps them; operations read and write them.

Every user and team whose data is encrypted has one data key, which seals the account's fields and the keys of its
files. It is stored wrapped (encrypted) by the master key, which is kept outside the store.

    master key  ──wraps──▶  key of ada   ──seals──▶  arguments, results, logs of ada; keys of her files
                └─wraps──▶  key of team  ──seals──▶  those of the team

A new master key wraps the account keys again and touches no data. Deleting an account deletes its key: whatever copy
of its rows and files is left without a copy of the key is unreadable. Example: with 1,000 accounts and 10,000,000
tasks, a new master key costs 1,000 wraps.

Sealing uses committed keys only. A key that an operation of this process made may be rolled back with its group; until
`settle` has read it as committed it is used in that transaction and not remembered for the next.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable

from gpool.server.encryption.ciphers import ID_BYTES, KEY_BYTES, AccountKey
from gpool.server.identity import envelope
from gpool.server.identity.envelope import MasterKey, WrappedKey
from gpool.server.store.generated_rows import AccountKeysRecord
from gpool.server.store.sealing import Account

MOST_CACHED = 10_000
"""Keys in memory; all are forgotten when one more is read."""


class AccountKeys:
    """`is_on`: new data is encrypted. Data that is encrypted already is opened in either case."""

    def __init__(self, load: Callable[[], tuple[MasterKey, ...]], *, is_on: bool) -> None:
        self.is_on = is_on
        self._load = load
        self._masters = load() if is_on else ()
        self._committed: dict[Account, AccountKey] = {}
        self._by_id: dict[bytes, AccountKey] = {}
        self._unsure: set[bytes] = set()

    def of(self, account: Account) -> AccountKey | None:
        """Key of the account if it is in memory and committed."""
        return self._committed.get(account)

    def by_id(self, id_: bytes) -> AccountKey | None:
        return self._by_id.get(id_)

    def new(self, account: Account) -> AccountKeysRecord:
        """Create a key, to be stored by the caller's transaction. The master keys are loaded again: they may be new."""
        self._masters = self._load()
        id_, raw = secrets.token_bytes(ID_BYTES), secrets.token_bytes(KEY_BYTES)
        wrapped = envelope.wrapped(self._masters[0], id_, raw)
        self._unsure.add(id_)
        return AccountKeysRecord(account[0], account[1], id_.hex(), wrapped)

    def adopt(self, rows: Iterable[AccountKeysRecord]) -> dict[Account, AccountKey]:
        """Unwrap keys read in a transaction; remember those that another transaction has committed."""
        found: dict[Account, AccountKey] = {}
        for row in rows:
            id_ = bytes.fromhex(row.key_id)
            key = self._by_id.get(id_) or AccountKey(id_, self._unwrapped(id_, bytes(row.wrapped)))
            account: Account = ("team" if row.kind == "team" else "user", row.id)
            found[account] = key
            if len(self._by_id) >= MOST_CACHED:
                self._by_id.clear()
                self._committed.clear()
            self._by_id[id_] = key
            if id_ not in self._unsure:
                self._committed[account] = key
        return found

    def settle(self, rows: Iterable[AccountKeysRecord]) -> None:
        """Adopt keys that were read by a reader, which sees committed rows only."""
        read = list(rows)
        self._unsure.difference_update(bytes.fromhex(row.key_id) for row in read)
        self.adopt(read)

    def forget(self, account: Account) -> None:
        key = self._committed.pop(account, None)
        if key is not None:
            self._by_id.pop(key.id, None)

    def _unwrapped(self, id_: bytes, wrapped: bytes) -> bytes:
        key = WrappedKey(id_, wrapped, envelope.NEVER)
        if not any(wrapped[1 : envelope.HEAD_BYTES] == each.id for each in self._masters):
            self._masters = self._load()  # another replica rotated them, or encryption is off
        return envelope.unwrapped(self._masters, key)
