"""Envelope encryption of secrets at rest. No I/O except for the sources of master keys.

A secret field is encrypted with AES-256-GCM under a data key; a data key is stored wrapped (encrypted) under a master
key, which is kept outside the store. A copy of the database without the master key reveals nothing.

    field = 0x01 | data key id (8) | nonce (12) | ciphertext and tag
    key   = 0x01 | master key id (8) | nonce (12) | ciphertext and tag of the 32 key bytes

A field is bound to its table, row and column (associated data): copied anywhere else it does not decrypt.

Nonces are random; two equal ones under one key would break it. 2^32 random 96-bit nonces repeat with probability
2^-33, the bound of NIST SP 800-38D; a data key seals at most `MAX_SEALS` = 2^28 fields (2^-41). The count is exact:
each process seals with its own data key (`begin_key`, committed before its first use) and opens those of all. Master
keys wrap a few keys a day.

Rotation while serving. Data key: `begin_key`, then `resealed` for every field, each UPDATE guarded by the old bytes.
Master key: put the new one first in its source, keep the old one second, `rewrapped` for every data key, remove the
old one. Example: with 1,000,000 fields under one data key, a new master key costs one wrap, a new data key 1,000,000
updates. `sealer` runs both.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from gpool.core.errors import InternalFault, Invalid
from gpool.core.model import Instant, Span
from gpool.transfer.keys import read_private, write_private

VERSION = 1
KEY_BYTES, ID_BYTES, NONCE_BYTES, TAG_BYTES = 32, 8, 12, 16
HEAD_BYTES = 1 + ID_BYTES
OVERHEAD_BYTES = HEAD_BYTES + NONCE_BYTES + TAG_BYTES
MAX_SEALS = 1 << 28
COMMAND_TIMEOUT_S = 30.0
NEVER = Instant(0)
"""Creation of a key whose age does not matter."""


@dataclass(frozen=True, slots=True)
class FieldLocation:
    table: str
    row: str
    column: str


@dataclass(frozen=True, slots=True)
class MasterKey:
    id: bytes
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class WrappedKey:
    id: bytes
    wrapped: bytes
    made_at: Instant


# ---- sources of master keys


def master(key: bytes) -> MasterKey:
    if len(key) != KEY_BYTES:
        raise Invalid(f"a master key has {KEY_BYTES} bytes, not {len(key)}")
    return MasterKey(hashlib.sha256(b"gpool master key id\0" + key).digest()[:ID_BYTES], key)


def masters_from_text(text: str, source: str) -> tuple[MasterKey, ...]:
    """Parse keys in base64 or hexadecimal, separated by white space or commas; the first wraps, all unwrap."""
    words = text.replace(",", " ").split()
    found = tuple(_master_from(word, source) for word in words)
    if not found:
        raise Invalid(f"{source} holds no master key; put 32 random bytes in base64 there")
    return found


def _master_from(word: str, source: str) -> MasterKey:
    raw = b""
    with suppress(ValueError, binascii.Error):
        if len(word) == 2 * KEY_BYTES:
            raw = bytes.fromhex(word)
        else:
            plain = word.rstrip("=").replace("-", "+").replace("_", "/")
            raw = base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    if len(raw) != KEY_BYTES:
        # The value is not shown: it may be a key with a letter missing.
        raise Invalid(
            f"{source} holds something that is not a key of {KEY_BYTES} bytes in base64 or hexadecimal"
        )
    return master(raw)


def masters_from_file(path: Path) -> tuple[MasterKey, ...]:
    """Only the owner may read the file; created with a fresh key if missing."""
    if not path.exists():
        write_private(path, _line(secrets.token_bytes(KEY_BYTES)), replace=False)
    return masters_from_text(read_private(path).decode("ascii", errors="replace"), str(path))


def add_master_to_file(path: Path) -> tuple[MasterKey, ...]:
    before = masters_from_file(path)
    lines = [_line(secrets.token_bytes(KEY_BYTES)), *(_line(each.key) for each in before)]
    write_private(path, b"".join(lines), replace=True)
    return masters_from_file(path)


def drop_old_masters_from_file(path: Path) -> tuple[MasterKey, ...]:
    """Finish a master key rotation: keep the first key only. All data keys must be rewrapped and committed before."""
    write_private(path, _line(masters_from_file(path)[0].key), replace=True)
    return masters_from_file(path)


def masters_from_command(command: Sequence[str]) -> tuple[MasterKey, ...]:
    name = command[0] if command else "the empty command"
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            timeout=COMMAND_TIMEOUT_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.CalledProcessError as error:
        text = error.stderr.decode(errors="replace").strip()[-300:]
        raise Invalid(f"{name} printed no master key: exit {error.returncode}: {text}") from error
    except (OSError, IndexError, subprocess.TimeoutExpired) as error:
        raise Invalid(f"{name} printed no master key: {error}") from error
    return masters_from_text(done.stdout.decode("ascii", errors="replace"), name)


def _line(key: bytes) -> bytes:
    return base64.urlsafe_b64encode(key) + b"\n"


# ---- sealing


class Envelope:
    def __init__(self, masters: Sequence[MasterKey], keys: Iterable[WrappedKey] = ()) -> None:
        self._masters = tuple(masters)
        self._ciphers: dict[bytes, AESGCM] = {}
        self._own: bytes | None = None
        self._own_since = Instant(0)
        self._seals = 0
        self.adopt(keys)

    def adopt(self, keys: Iterable[WrappedKey]) -> None:
        for key in keys:
            if key.id not in self._ciphers:
                self._ciphers[key.id] = AESGCM(unwrapped(self._masters, key))

    def use_masters(self, masters: Sequence[MasterKey]) -> None:
        self._masters = tuple(masters)

    def begin_key(self, now: Instant) -> WrappedKey:
        """Create this process's data key; the caller commits it before the first `seal`."""
        raw, id_ = secrets.token_bytes(KEY_BYTES), secrets.token_bytes(ID_BYTES)
        sealed = wrapped(self._masters[0], id_, raw)
        self._ciphers[id_] = AESGCM(raw)
        self._own, self._own_since, self._seals = id_, now, 0
        return WrappedKey(id_, sealed, now)

    def is_worn(self, now: Instant, oldest: Span) -> bool:
        """Whether a new data key is due: none yet, too old, or half of `MAX_SEALS` used."""
        return self._own is None or now - self._own_since >= oldest or self._seals * 2 >= MAX_SEALS

    def seal(self, place: FieldLocation, plain: bytes) -> bytes:
        if self._own is None or self._seals >= MAX_SEALS:
            raise InternalFault("there is no data key to seal with; call `begin_key` first")
        self._seals += 1
        head = bytes([VERSION]) + self._own
        nonce = secrets.token_bytes(NONCE_BYTES)
        return head + nonce + self._ciphers[self._own].encrypt(nonce, plain, _bound(head, place))

    def knows(self, sealed: bytes) -> bool:
        return sealed[1:HEAD_BYTES] in self._ciphers

    def open(self, place: FieldLocation, sealed: bytes) -> bytes:
        """Decrypt; `InternalFault` if the field was changed, moved, or its key is unknown."""
        head, nonce = sealed[:HEAD_BYTES], sealed[HEAD_BYTES : HEAD_BYTES + NONCE_BYTES]
        cipher = self._ciphers.get(head[1:])
        if len(sealed) < OVERHEAD_BYTES or head[0] != VERSION or cipher is None:
            raise _cannot_open(place)
        try:
            return cipher.decrypt(nonce, sealed[HEAD_BYTES + NONCE_BYTES :], _bound(head, place))
        except InvalidTag:
            raise _cannot_open(place) from None

    def resealed(self, place: FieldLocation, sealed: bytes) -> bytes | None:
        if sealed[1:HEAD_BYTES] == self._own:
            return None
        return self.seal(place, self.open(place, sealed))


def rewrapped(masters: Sequence[MasterKey], keys: Iterable[WrappedKey]) -> list[WrappedKey]:
    first = masters[0]
    return [
        WrappedKey(key.id, wrapped(first, key.id, unwrapped(masters, key)), key.made_at)
        for key in keys
        if key.wrapped[1:HEAD_BYTES] != first.id
    ]


def wrapped(by: MasterKey, id_: bytes, raw: bytes) -> bytes:
    head, nonce = bytes([VERSION]) + by.id, secrets.token_bytes(NONCE_BYTES)
    return head + nonce + AESGCM(by.key).encrypt(nonce, raw, b"gpool data key\0" + head + id_)


def unwrapped(masters: Sequence[MasterKey], key: WrappedKey) -> bytes:
    head = key.wrapped[:HEAD_BYTES]
    for each in masters:
        if head == bytes([VERSION]) + each.id:
            nonce = key.wrapped[HEAD_BYTES : HEAD_BYTES + NONCE_BYTES]
            rest = key.wrapped[HEAD_BYTES + NONCE_BYTES :]
            try:
                return AESGCM(each.key).decrypt(nonce, rest, b"gpool data key\0" + head + key.id)
            except (InvalidTag, ValueError):
                raise InternalFault(f"data key {key.id.hex()} was changed in the store") from None
    raise Invalid(
        f"data key {key.id.hex()} is wrapped by the master key {head[1:].hex()}, which is missing; "
        "add it after the current one in the source of master keys"
    )


def _bound(head: bytes, place: FieldLocation) -> bytes:
    """Associated data of a field; length prefixes make it unambiguous."""
    parts = [text.encode() for text in (place.table, place.row, place.column)]
    return b"gpool field\0" + head + b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def _cannot_open(place: FieldLocation) -> InternalFault:
    return InternalFault(f"a sealed field of {place.table}.{place.column} does not open")
