"""The encrypted file of a backup: a stream of records in authenticated chunks, written and read in bounded memory.

    file   = header | chunk | chunk | … | last chunk
    header = "gpool backup 1\\n" | salt (16) | log2 N, r, p of scrypt (1 each)
    chunk  = AES-256-GCM of up to 256 KiB, tag included; nonce = number of the chunk (11 bytes) | 1 for the last, else 0

The key is scrypt of passphrase and salt, so it is used for one file only and a counter is a safe nonce (STREAM, Hoang
et al. 2015, as in age). The header is associated data of every chunk. A chunk that is changed, moved, removed or added
does not decrypt, and a file that ends early has no last chunk.

The plaintext is a sequence of records (msgpack), each after its length (4 bytes): a `BackupManifest`; key files; for each
table a `TableHead` and its `TableRows`; artifacts, each an `ArtifactHead` and its `FileData`; and an `ArchiveEnd`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from gpool.core.errors import Invalid

MAGIC = b"gpool backup 1\n"
SALT_BYTES, TAG_BYTES = 16, 16
HEADER_BYTES = len(MAGIC) + SALT_BYTES + 3
CHUNK_BYTES = 256 * 1024
LENGTH_BYTES = 4
MAX_RECORD_BYTES = 1 << 30
SCRYPT = (17, 8, 1)
"""log2 N, r and p: 128 MiB and about half a second for each guess of the passphrase."""
MAX_SCRYPT = (20, 16, 4)
"""Largest cost that a reader accepts: a forged header cannot take all memory."""
MIN_PASSPHRASE = 12


class BackupManifest(msgspec.Struct, tag="manifest", frozen=True):
    """Facts about the backup. `master_keys`: ids of the keys that encrypt secrets in the tables."""

    version: str  # of gpool
    revision: str  # of the schema
    database: str  # "sqlite" or "postgresql"
    at: int  # of the snapshot, µs
    master_keys: list[str]
    has_master_key: bool  # the master key is among the key files
    has_bucket: bool  # artifacts of the object store are in the archive


class ArchivedKey(msgspec.Struct, tag="key", frozen=True):
    name: str  # in the data directory
    data: bytes


class TableHead(msgspec.Struct, tag="table", frozen=True):
    name: str
    columns: list[str]


class TableRows(msgspec.Struct, tag="rows", frozen=True):
    """Rows of the last `TableHead`."""

    rows: list[list[Any]]


class ArtifactHead(msgspec.Struct, tag="artifact", frozen=True):
    """`key`: name of the file in the artifact folder."""

    key: str
    size: int  # of the stored file


class FileData(msgspec.Struct, tag="data", frozen=True):
    """Next bytes of the last `ArtifactHead`."""

    data: bytes


class ArchiveEnd(msgspec.Struct, tag="end", frozen=True):
    """Counts of the whole archive. `lost`: artifacts whose file was missing when the backup was made."""

    rows: dict[str, int]
    artifacts: int
    lost: list[str]


Record = BackupManifest | ArchivedKey | TableHead | TableRows | ArtifactHead | FileData | ArchiveEnd
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def checked_passphrase(text: str) -> str:
    if len(text) < MIN_PASSPHRASE:
        raise Invalid(
            f"the passphrase has {len(text)} letters; give at least {MIN_PASSPHRASE}, for example five random words"
        )
    return text


class ArchiveWriter:
    """Writes records; only `close` makes the archive complete."""

    def __init__(
        self, file: BinaryIO, passphrase: str, cost: tuple[int, int, int] = SCRYPT
    ) -> None:
        self._file = file
        salt = secrets.token_bytes(SALT_BYTES)
        self._header = MAGIC + salt + bytes(cost)
        self._cipher = _cipher(passphrase, salt, cost)
        self._number = 0
        self._buffer = bytearray()
        self._encoder = msgspec.msgpack.Encoder()
        file.write(self._header)

    def add(self, record: Record) -> None:
        data = self._encoder.encode(record)
        self._buffer += len(data).to_bytes(LENGTH_BYTES, "big") + data
        while len(self._buffer) > CHUNK_BYTES:  # a full one stays: it may be the last
            self._write(bytes(self._buffer[:CHUNK_BYTES]), is_last=False)
            del self._buffer[:CHUNK_BYTES]

    def close(self) -> None:
        """Write the last chunk and flush it to the disk."""
        self._write(bytes(self._buffer), is_last=True)
        self._buffer.clear()
        self._file.flush()
        os.fsync(self._file.fileno())

    def _write(self, plain: bytes, *, is_last: bool) -> None:
        nonce = _nonce(self._number, is_last=is_last)
        self._file.write(self._cipher.encrypt(nonce, plain, self._header))
        self._number += 1


class ArchiveReader:
    """Reads the records of an archive from the file's beginning; `Invalid` names a fault of the file."""

    def __init__(self, file: BinaryIO, passphrase: str) -> None:
        self._file = file
        file.seek(0)
        header = file.read(HEADER_BYTES)
        if len(header) < HEADER_BYTES or not header.startswith(MAGIC):
            raise Invalid(
                "the file is no backup of gpool, or one of a version that this one cannot read"
            )
        cost = header[-3], header[-2], header[-1]
        if any(not 1 <= one <= most for one, most in zip(cost, MAX_SCRYPT, strict=True)):
            raise Invalid("the header of the backup is damaged; use another copy of the file")
        self._header = header
        self._cipher = _cipher(passphrase, header[len(MAGIC) : -3], cost)

    def records(self) -> Iterator[Record]:
        buffer, at = bytearray(), 0
        for chunk in self._chunks():
            buffer += chunk
            while len(buffer) - at >= LENGTH_BYTES:
                size = int.from_bytes(buffer[at : at + LENGTH_BYTES], "big")
                if size > MAX_RECORD_BYTES:
                    raise _damaged("a record is too large")
                if len(buffer) - at - LENGTH_BYTES < size:
                    break
                first = at + LENGTH_BYTES
                at = first + size
                yield _record(bytes(buffer[first:at]))
            del buffer[:at]
            at = 0
        if buffer:
            raise _damaged("a record is incomplete")

    def _chunks(self) -> Iterator[bytes]:
        self._file.seek(HEADER_BYTES)
        number, sealed = 0, self._file.read(CHUNK_BYTES + TAG_BYTES)
        while True:
            following = self._file.read(CHUNK_BYTES + TAG_BYTES)
            yield self._opened(number, sealed, is_last=not following)
            if not following:
                return
            number, sealed = number + 1, following

    def _opened(self, number: int, sealed: bytes, *, is_last: bool) -> bytes:
        try:
            return self._cipher.decrypt(_nonce(number, is_last=is_last), sealed, self._header)
        except (InvalidTag, ValueError):
            pass
        if number == 0 and not (is_last and self._is_first_of_many(sealed)):
            raise Invalid(
                "the backup does not open: the passphrase is wrong, or the beginning of the file was changed"
            )
        if is_last:
            raise _damaged("it ends early, or its end was changed")
        place = HEADER_BYTES + number * (CHUNK_BYTES + TAG_BYTES)
        raise _damaged(f"the {len(sealed)} bytes at {place} were changed")

    def _is_first_of_many(self, sealed: bytes) -> bool:
        try:
            self._cipher.decrypt(_nonce(0, is_last=False), sealed, self._header)
        except (InvalidTag, ValueError):
            return False
        return True


def _record(data: bytes) -> Record:
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise _damaged(f"a record cannot be read ({error})") from error


def _damaged(why: str) -> Invalid:
    return Invalid(
        f"the backup is damaged: {why}; nothing was changed, use another copy of the file"
    )


def _nonce(number: int, *, is_last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([is_last])


def _cipher(passphrase: str, salt: bytes, cost: tuple[int, int, int]) -> AESGCM:
    log_n, r, p = cost
    return AESGCM(Scrypt(salt=salt, length=32, n=1 << log_n, r=r, p=p).derive(passphrase.encode()))
