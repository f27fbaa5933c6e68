"""Sealed fields in operations: which columns are encrypted for their account, and how operations seal and open them.

A column holds plain and sealed values: those written before encryption was turned on stay as they are. A sealed value
begins with `MARK` and `:`; a plain one that happens to begin with the mark is stored with `MARK` and `=` before it.
The driver answers `CIPHER` with the store's key holder. Operations that neither seal nor find a marked value ask nothing.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from gpool.core.errors import InternalFault
from gpool.server.encryption.ciphers import (
    ID_BYTES,
    AccountKey,
    FieldPlace,
    Nonces,
    does_not_open,
    open_field,
    seal_field,
)
from gpool.server.store.generated_rows import AccountKeysRecord
from gpool.server.store.identity_values import Holder
from gpool.server.store.protocol import Operation, Relation, Statement, operation
from gpool.server.store.rows import columns, of_names, relation_columns, select

Account = tuple[Holder, int]
R = TypeVar("R", bound=NamedTuple)

MARK, TEXT_MARK = b"\x1agpool", "\x1agpool"
SEALED, ESCAPED = b":", b"="
CIPHER = Statement("SELECT 'the key holder of this store'")
KEY = columns(AccountKeysRecord, AccountKeysRecord, "k")
ACCOUNTS = (("kind", "text"), ("id", "int"))
_new = cast("Any", tuple.__new__)


class KeyHolder(Protocol):
    """Account keys in memory (`encryption.account_keys`). Methods are called in the store's threads."""

    @property
    def is_on(self) -> bool: ...
    def of(self, account: Account) -> AccountKey | None: ...
    def by_id(self, id_: bytes) -> AccountKey | None: ...
    def new(self, account: Account) -> AccountKeysRecord: ...
    def adopt(self, rows: Iterable[AccountKeysRecord]) -> dict[Account, AccountKey]: ...


class NoKeys:
    """Key holder of a store that is opened without master keys: seals nothing, opens nothing."""

    is_on = False

    def of(self, account: Account) -> AccountKey | None:  # noqa: ARG002 - the protocol's
        return None

    def by_id(self, id_: bytes) -> AccountKey | None:  # noqa: ARG002 - the protocol's
        return None

    def new(self, account: Account) -> AccountKeysRecord:
        raise InternalFault(f"this store was opened without keys and cannot make one for {account}")

    def adopt(self, rows: Iterable[AccountKeysRecord]) -> dict[Account, AccountKey]:
        names = ", ".join(row.key_id for row in rows)
        raise InternalFault(f"this store was opened without the master key that opens {names}")


class SealedColumnOf(NamedTuple):
    """Encrypted column: the row's field that holds its value, and the fields of the row's key."""

    table: str
    column: str
    field: str
    keys: tuple[str, ...] = ("id",)

    def place(self, row: NamedTuple) -> FieldPlace:
        parts = [getattr(row, name) for name in self.keys]
        first = parts[0]
        key = "/".join([str(part) for part in parts]) if len(parts) > 1 else str(first)
        return FieldPlace(self.table, self.column, key, first if isinstance(first, int) else 0)

    def place_of(self, *parts: int) -> FieldPlace:
        """Place of a value in the row with this key."""
        return FieldPlace(self.table, self.column, "/".join(map(str, parts)), parts[0])


SPEC_BODY = SealedColumnOf("specs", "body", "body")
BODY_OF_TASK = SealedColumnOf("specs", "body", "body", ("spec_id",))
PAYLOAD = SealedColumnOf("tasks", "payload", "payload")
PAYLOAD_OF_TASK = SealedColumnOf("tasks", "payload", "payload", ("task_id",))
VALUE = SealedColumnOf("tasks", "value", "value")
ERROR_TEXT = SealedColumnOf("tasks", "error_text", "error_text")
PROGRESS = SealedColumnOf("tasks", "progress", "progress")
ATTEMPT_DETAIL = SealedColumnOf("attempts", "detail", "detail", ("task_id", "epoch"))
MEMBER_DETAIL = SealedColumnOf("members", "detail", "detail", ("task_id", "rank"))
LOG_DATA = SealedColumnOf("log_chunks", "data", "data", ("task_id", "cursor"))
FILE_KEY = SealedColumnOf("artifacts", "key_sealed", "key_sealed", ("sha256",))


# ---- sealing


class Sealing:
    """Seals fields for the accounts it was made for, or passes plain values (`keys` None: encryption is off)."""

    __slots__ = ("_keys", "_nonces")

    def __init__(self, keys: Mapping[Account, AccountKey] | None) -> None:
        self._keys = keys
        self._nonces = Nonces()

    @property
    def is_on(self) -> bool:
        return self._keys is not None

    def key(self, account: Account) -> AccountKey | None:
        return None if self._keys is None else self._keys[account]

    def data(self, account: Account, place: FieldPlace, plain: bytes) -> bytes:
        if self._keys is None:
            return plain if not plain.startswith(MARK) else MARK + ESCAPED + plain
        return MARK + SEALED + seal_field(self._keys[account], place, plain, self._nonces)

    def text(self, account: Account, place: FieldPlace, plain: str) -> str:
        if self._keys is None:
            return plain if not plain.startswith(TEXT_MARK) else f"{TEXT_MARK}={plain}"
        sealed = seal_field(self._keys[account], place, plain.encode(), self._nonces)
        return f"{TEXT_MARK}:{b64encode(sealed).decode()}"


OFF = Sealing(None)


def sealing(accounts: Collection[Account]) -> Operation[Sealing]:
    """Keys to seal fields of the accounts with; a missing one is made in this transaction."""
    holder = yield from _key_holder()
    if not holder.is_on:
        return OFF
    keys: dict[Account, AccountKey] = {}
    missing: list[Account] = []
    for account in accounts:
        key = holder.of(account)
        if key is None:
            missing.append(account)
        else:
            keys[account] = key
    if missing:
        keys |= yield from _stored(holder, missing)
        new = [holder.new(account) for account in missing if account not in keys]
        if new:
            yield Statement(
                "INSERT INTO account_keys (kind, id, key_id, wrapped) "
                "SELECT n.kind, n.id, n.key_id, n.wrapped FROM {new} AS n WHERE true ON CONFLICT (kind, id) DO NOTHING",
                {},
                {"new": Relation(relation_columns(AccountKeysRecord), sorted(new))},
            )
            keys |= yield from _stored(holder, missing)  # another replica's may have been first
    return Sealing(keys)


def _stored(
    holder: KeyHolder, accounts: Collection[Account]
) -> Operation[dict[Account, AccountKey]]:
    return holder.adopt((yield from account_keys(accounts)))


@operation
def account_keys(accounts: Collection[Account]) -> Operation[list[AccountKeysRecord]]:
    return (
        yield from select(
            AccountKeysRecord,
            f"SELECT {KEY} FROM {{accounts}} AS a JOIN account_keys k ON k.kind = a.kind AND k.id = a.id",  # noqa: S608
            {},
            {"accounts": Relation(ACCOUNTS, sorted(set(accounts)))},
        )
    )


@operation
def ensure_keys(accounts: Collection[Account]) -> Operation[None]:
    """Store a key for each account that has none."""
    yield from sealing(accounts)


def file_key_place(sha256: str) -> FieldPlace:
    return FieldPlace(FILE_KEY.table, FILE_KEY.column, sha256)


def sealed_by(key: AccountKeysRecord) -> bytes:
    """First bytes of every value that this key has sealed."""
    return MARK + SEALED + bytes.fromhex(key.key_id)


def _key_holder() -> Operation[KeyHolder]:
    found = yield CIPHER
    return cast("KeyHolder", found)


# ---- opening


def opened(rows: list[R], *sealed: SealedColumnOf) -> Operation[list[R]]:
    """Open the sealed fields of rows. `InternalFault` for a field that was changed, moved, or lost its key."""
    fields = [
        (number, column, *_parts(value))
        for number, row in enumerate(rows)
        for column in sealed
        if (value := getattr(row, column.field)) and _is_marked(value)
    ]
    if not fields:
        return rows
    holder = yield from _key_holder()
    ids = {part[:ID_BYTES] for _, _, kind, part in fields if kind == SEALED}
    unknown = [id_.hex() for id_ in ids if holder.by_id(id_) is None]
    if unknown:
        found = yield from select(
            AccountKeysRecord,
            f"SELECT {KEY} FROM {{ids}} AS i JOIN account_keys k ON k.key_id = i.name",  # noqa: S608
            {},
            {"ids": of_names(unknown)},
        )
        holder.adopt(found)
    done = list(rows)
    for number, column, kind, part in fields:
        row = done[number]
        plain = part
        if kind == SEALED:
            place, key = column.place(row), holder.by_id(part[:ID_BYTES])
            if key is None:
                raise does_not_open(place)
            plain = open_field(key, place, part)
        at = row._fields.index(column.field)
        fields_ = list(row)
        fields_[at] = plain.decode() if isinstance(row[at], str) else plain
        done[number] = _new(type(row), fields_)  # `_replace` takes as long as the decryption
    return done


def _is_marked(value: bytes | str) -> bool:
    return value.startswith(TEXT_MARK) if isinstance(value, str) else value.startswith(MARK)


def _parts(value: bytes | str) -> tuple[bytes, bytes]:
    """Kind of a marked value, and its bytes after the mark."""
    text = isinstance(value, str)
    whole = value.encode() if isinstance(value, str) else value
    kind, rest = whole[len(MARK) : len(MARK) + 1], whole[len(MARK) + 1 :]
    if kind == SEALED:
        try:
            return SEALED, b64decode(rest) if text else rest
        except ValueError:  # changed in the store: it names no key
            return SEALED, b""
    return ESCAPED, rest if kind == ESCAPED else whole
