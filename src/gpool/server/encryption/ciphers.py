"""AES-256-GCM for fields of rows and for files in chunks, and a stream cipher for unfinished uploads. No I/O.

A field is bound to its place: a value copied to another table, column or row does not decrypt. Its key is derived from
the account's key, the column, and the row's id without its last 32 bits; the whole id is associated data. Ids contain
the time, so a derived key is used for about a second, by a few thousand operations: their random nonces differ.

    field = account key id (8) | nonce (12) | ciphertext and tag    key = HMAC-SHA256(account key, column, id >> 32)
    file  = chunk | chunk | …        chunk i of 64 KiB = ciphertext and tag under a random key of the file, nonce i

Deriving a key takes 4 µs, sealing with a derived one 2 µs, so derived keys are cached.

The size of a file is recorded beside its key, so a missing last chunk is noticed: a reader gets too few bytes.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator
from functools import lru_cache
from secrets import token_bytes
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR

from gpool.core.errors import InternalFault

KEY_BYTES, ID_BYTES, NONCE_BYTES, TAG_BYTES = 32, 8, 12, 16
CHUNK_BYTES = 64 * 1024
SEALED_CHUNK_BYTES = CHUNK_BYTES + TAG_BYTES
BLOCK_BYTES = 16
PERIOD_BITS = 32
COUNTER_BYTES = 4


class AccountKey(NamedTuple):
    id: bytes
    key: bytes


class FieldPlace(NamedTuple):
    table: str
    column: str
    row: str  # parts of the primary key, joined by `/`
    id: int = 0  # the row's id, or that of its task; 0: the key is no number


# ---- fields


@lru_cache(maxsize=4096)
def _field_cipher(by: AccountKey, table: str, column: str, period: int) -> AESGCM:
    label = f"gpool account field {table}.{column} {period}"
    return AESGCM(hmac.digest(by.key, label.encode(), "sha256"))


class Nonces:
    """Nonces of one operation: eight random bytes and a counter. Drawing twelve bytes for each field takes longer."""

    __slots__ = ("_count", "_random")

    def __init__(self) -> None:
        self._random = token_bytes(NONCE_BYTES - COUNTER_BYTES)
        self._count = 0

    def next(self) -> bytes:
        self._count += 1
        return self._random + self._count.to_bytes(COUNTER_BYTES, "big")


def seal_field(by: AccountKey, place: FieldPlace, plain: bytes, nonces: Nonces) -> bytes:
    table, column, row, id_ = place
    nonce = nonces.next()
    cipher = _field_cipher(by, table, column, id_ >> PERIOD_BITS)
    return by.id + nonce + cipher.encrypt(nonce, plain, row.encode())


def open_field(by: AccountKey, place: FieldPlace, sealed: bytes) -> bytes:
    """Decrypt; `InternalFault` if the field was changed or belongs elsewhere."""
    table, column, row, id_ = place
    nonce = sealed[ID_BYTES : ID_BYTES + NONCE_BYTES]
    cipher = _field_cipher(by, table, column, id_ >> PERIOD_BITS)
    try:
        return cipher.decrypt(nonce, sealed[ID_BYTES + NONCE_BYTES :], row.encode())
    except (InvalidTag, ValueError):
        raise does_not_open(place) from None


def does_not_open(place: FieldPlace) -> InternalFault:
    return InternalFault(
        f"{place.table}.{place.column} of row {place.row} does not decrypt: it was changed in the store, or its "
        "account's key was destroyed; restore it from a backup"
    )


# ---- files


def new_file_key() -> bytes:
    return token_bytes(KEY_BYTES)


class FileSealer:
    """Encrypts a file piece by piece: bytes go out as soon as a chunk is full."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._number = 0
        self._rest = b""

    def update(self, data: bytes) -> bytes:
        data = self._rest + data
        whole = len(data) - len(data) % CHUNK_BYTES
        self._rest = data[whole:]
        return b"".join(
            self._seal(data[at : at + CHUNK_BYTES]) for at in range(0, whole, CHUNK_BYTES)
        )

    def finish(self) -> bytes:
        last, self._rest = self._rest, b""
        return self._seal(last) if last else b""

    def _seal(self, chunk: bytes) -> bytes:
        nonce = self._number.to_bytes(NONCE_BYTES, "big")
        self._number += 1
        return self._cipher.encrypt(nonce, chunk, None)


class SealedRange(NamedTuple):
    """Range of a sealed file that holds a range of its contents."""

    first: int  # offset in the sealed file
    length: int
    number: int  # of the first chunk
    skipped: int  # bytes of that chunk before the range


def sealed_range(first: int, length: int) -> SealedRange:
    number, skipped = divmod(first, CHUNK_BYTES)
    chunks = -(-(skipped + length) // CHUNK_BYTES)
    return SealedRange(number * SEALED_CHUNK_BYTES, chunks * SEALED_CHUNK_BYTES, number, skipped)


async def opened_range(
    key: bytes, pieces: AsyncIterator[bytes], found: SealedRange, length: int
) -> AsyncIterator[bytes]:
    """Decrypt the pieces of `found`; `InternalFault` if a chunk was changed, moved or belongs to another file."""
    cipher, number, skipped, rest = AESGCM(key), found.number, found.skipped, b""
    async for piece in pieces:
        rest += piece
        whole = len(rest) - len(rest) % SEALED_CHUNK_BYTES
        for at in range(0, whole, SEALED_CHUNK_BYTES):
            plain = _open_chunk(cipher, number, rest[at : at + SEALED_CHUNK_BYTES])
            number += 1
            wanted = plain[skipped : skipped + length]
            skipped, length = 0, length - len(wanted)
            yield wanted
        rest = rest[whole:]
    if rest and length:
        yield _open_chunk(cipher, number, rest)[skipped : skipped + length]


def _open_chunk(cipher: AESGCM, number: int, chunk: bytes) -> bytes:
    try:
        return cipher.decrypt(number.to_bytes(NONCE_BYTES, "big"), chunk, None)
    except (InvalidTag, ValueError):
        raise InternalFault(
            f"chunk {number} of a stored file does not decrypt: the file was changed; restore it from a backup"
        ) from None


# ---- unfinished uploads


class PartCipher:
    """AES-256-CTR at an offset: an unfinished upload has the size of its contents, so that resuming needs no index.

    Changes are noticed at the end, by the artifact's SHA-256. Only the same bytes are ever sent for one offset.
    """

    def __init__(self, key: bytes, offset: int) -> None:
        counter = (offset // BLOCK_BYTES).to_bytes(BLOCK_BYTES, "big")
        self._stream = Cipher(AES256(key), CTR(counter)).encryptor()
        self._stream.update(bytes(offset % BLOCK_BYTES))

    def update(self, data: bytes) -> bytes:
        """Encrypt or decrypt."""
        return self._stream.update(data)

    def finish(self) -> bytes:
        return b""


def part_key(account: AccountKey, uploader: str, sha256: str) -> bytes:
    return hmac.digest(account.key, f"gpool upload {uploader} {sha256}".encode(), "sha256")
