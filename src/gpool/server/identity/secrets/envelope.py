"""Secrets at rest: fields sealed by AES-256-GCM under data keys, data keys wrapped by a master key kept elsewhere.

A sealed field is bound to its table, row and column: moved anywhere else it does not open, and says nothing.

    field  = 0x01 | data key id (8) | nonce (12) | ciphertext and tag
    key    = 0x01 | master key id (8) | nonce (12) | ciphertext and tag of the 32 bytes

Nonces are random. Two equal ones under one key would break it, so a key seals at most `MAX_SEALS` fields: with 2^32
random 96-bit nonces a repeat has a chance of 2^-33, the bound of NIST SP 800-38D; we stop at 2^28 (2^-41). The count is exact
because a data key seals for one process only: each makes its own (`begin_key`, committed before its first use) and
opens what all of them sealed. MasterKey keys wrap a few keys a day and are nowhere near.

Rotation, online: `begin_key` starts a new data key, `resealed` moves a field to it (guard the UPDATE by the old bytes);
a new master goes first in its source with the old one behind it, `rewrapped` moves the keys, then the old one goes.
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
from gpool.transfer.private_files import read_private, write_private

VERSION = 1
KEY_BYTES, ID_BYTES, NONCE_BYTES, TAG_BYTES = 32, 8, 12, 16
HEAD_BYTES = 1 + ID_BYTES
OVERHEAD_BYTES = HEAD_BYTES + NONCE_BYTES + TAG_BYTES
MAX_SEALS = 1 << 28
COMMAND_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class FieldLocation:
    """Where a sealed field lies, and nowhere else."""

    table: str
    row: str
    column: str


@dataclass(frozen=True, slots=True)
class MasterKey:
    id: bytes
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class WrappedKey:
    """A data key as the store holds it."""

    id: bytes
    wrapped: bytes
    made_at: Instant


# ---- master keys and where they come from


def master(key: bytes) -> MasterKey:
    if len(key) != KEY_BYTES:
        raise Invalid(f"a master key has {KEY_BYTES} bytes, not {len(key)}")
    return MasterKey(hashlib.sha256(b"gpool master key id\0" + key).digest()[:ID_BYTES], key)


def masters_from_text(text: str, source: str) -> tuple[MasterKey, ...]:
    """One key a line (or between commas), in base64 or hexadecimal; the first wraps, the others only unwrap."""
    words = text.replace(",", " ").split()
    found = tuple(_master_from(word, source) for word in words)
    if not found:
        raise Invalid(f"{source} holds no master key; 32 random bytes in base64 are one")
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
        # Never the value: it may be a key with a letter missing.
        raise Invalid(
            f"{source} holds something that is not a key of {KEY_BYTES} bytes in base64 or hexadecimal"
        )
    return master(raw)


def masters_from_file(path: Path) -> tuple[MasterKey, ...]:
    """The keys in a file that only its owner may read; made, with a fresh key, when it is not there."""
    if not path.exists():
        write_private(path, _line(secrets.token_bytes(KEY_BYTES)), replace=False)
    return masters_from_text(read_private(path).decode("ascii", errors="replace"), str(path))


def add_master_to_file(path: Path) -> tuple[MasterKey, ...]:
    """A fresh key before those that are there: the first half of a master's rotation."""
    before = masters_from_file(path)
    lines = [_line(secrets.token_bytes(KEY_BYTES)), *(_line(each.key) for each in before)]
    write_private(path, b"".join(lines), replace=True)
    return masters_from_file(path)


def drop_old_masters_from_file(path: Path) -> tuple[MasterKey, ...]:
    """Only the first key stays: the last half of a rotation, once everything is wrapped anew and that is committed."""
    write_private(path, _line(masters_from_file(path)[0].key), replace=True)
    return masters_from_file(path)


def masters_from_command(command: Sequence[str]) -> tuple[MasterKey, ...]:
    """What a command (a KMS client) prints."""
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
        said = error.stderr.decode(errors="replace").strip()[-300:]
        raise Invalid(f"{name} gave no master key: exit {error.returncode}: {said}") from error
    except (OSError, IndexError, subprocess.TimeoutExpired) as error:
        raise Invalid(f"{name} gave no master key: {error}") from error
    return masters_from_text(done.stdout.decode("ascii", errors="replace"), name)


def _line(key: bytes) -> bytes:
    return base64.urlsafe_b64encode(key) + b"\n"


# ---- sealing


class Envelope:
    """Seals under this process's own data key, opens under all it knows. The first master wraps new keys."""

    def __init__(self, masters: Sequence[MasterKey], keys: Iterable[WrappedKey] = ()) -> None:
        self._masters = tuple(masters)
        self._ciphers: dict[bytes, AESGCM] = {}
        self._own: bytes | None = None
        self._own_since = Instant(0)
        self._seals = 0
        self.adopt(keys)

    def adopt(self, keys: Iterable[WrappedKey]) -> None:
        """Keys of other replicas, or of earlier times."""
        for key in keys:
            if key.id not in self._ciphers:
                self._ciphers[key.id] = AESGCM(_unwrapped(self._masters, key))

    def use_masters(self, masters: Sequence[MasterKey]) -> None:
        """After a rotation: the first wraps from now on."""
        self._masters = tuple(masters)

    def begin_key(self, now: Instant) -> WrappedKey:
        """A new data key for this process. Commit it before anything is sealed under it."""
        raw, id_ = secrets.token_bytes(KEY_BYTES), secrets.token_bytes(ID_BYTES)
        wrapped = _wrapped(self._masters[0], id_, raw)
        self._ciphers[id_] = AESGCM(raw)
        self._own, self._own_since, self._seals = id_, now, 0
        return WrappedKey(id_, wrapped, now)

    def is_worn(self, now: Instant, oldest: Span) -> bool:
        """Time for `begin_key`: none yet, too old, or well on its way to the limit."""
        return self._own is None or now - self._own_since >= oldest or self._seals * 2 >= MAX_SEALS

    def seal(self, place: FieldLocation, plain: bytes) -> bytes:
        if self._own is None or self._seals >= MAX_SEALS:
            raise InternalFault("there is no data key to seal under; `begin_key` comes first")
        self._seals += 1
        head = bytes([VERSION]) + self._own
        nonce = secrets.token_bytes(NONCE_BYTES)
        return head + nonce + self._ciphers[self._own].encrypt(nonce, plain, _bound(head, place))

    def knows(self, sealed: bytes) -> bool:
        """Whether its key is here; if not, load the keys again: another replica may have made one."""
        return sealed[1:HEAD_BYTES] in self._ciphers

    def open(self, place: FieldLocation, sealed: bytes) -> bytes:
        """`InternalFault` when it was not sealed here, for this place, or was changed. Never says which."""
        head, nonce = sealed[:HEAD_BYTES], sealed[HEAD_BYTES : HEAD_BYTES + NONCE_BYTES]
        cipher = self._ciphers.get(head[1:])
        if len(sealed) < OVERHEAD_BYTES or head[0] != VERSION or cipher is None:
            raise _shut(place)
        try:
            return cipher.decrypt(nonce, sealed[HEAD_BYTES + NONCE_BYTES :], _bound(head, place))
        except InvalidTag:
            raise _shut(place) from None

    def resealed(self, place: FieldLocation, sealed: bytes) -> bytes | None:
        """The field under this process's key; None when it is already."""
        if sealed[1:HEAD_BYTES] == self._own:
            return None
        return self.seal(place, self.open(place, sealed))


def rewrapped(masters: Sequence[MasterKey], keys: Iterable[WrappedKey]) -> list[WrappedKey]:
    """Those keys that another than the first master wraps, wrapped by the first."""
    first = masters[0]
    return [
        WrappedKey(key.id, _wrapped(first, key.id, _unwrapped(masters, key)), key.made_at)
        for key in keys
        if key.wrapped[1:HEAD_BYTES] != first.id
    ]


def _wrapped(by: MasterKey, id_: bytes, raw: bytes) -> bytes:
    head, nonce = bytes([VERSION]) + by.id, secrets.token_bytes(NONCE_BYTES)
    return head + nonce + AESGCM(by.key).encrypt(nonce, raw, b"gpool data key\0" + head + id_)


def _unwrapped(masters: Sequence[MasterKey], key: WrappedKey) -> bytes:
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
        f"data key {key.id.hex()} is wrapped by the master key {head[1:].hex()}, which is not here; "
        "put it behind the current one where master keys come from"
    )


def _bound(head: bytes, place: FieldLocation) -> bytes:
    """What a field is bound to: lengths first, so that no two places read alike."""
    parts = [text.encode() for text in (place.table, place.row, place.column)]
    return b"gpool field\0" + head + b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def _shut(place: FieldLocation) -> InternalFault:
    return InternalFault(f"a sealed field of {place.table}.{place.column} does not open")
