"""Ciphers of fields, files and unfinished uploads: what decrypts, and what does not."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.errors import InternalFault
from gpool.server.encryption.ciphers import (
    CHUNK_BYTES,
    SEALED_CHUNK_BYTES,
    AccountKey,
    FieldPlace,
    FileSealer,
    Nonces,
    PartCipher,
    new_file_key,
    open_field,
    opened_range,
    seal_field,
    sealed_range,
)

KEY = AccountKey(b"8 bytes.", bytes(range(32)))
PLACE = FieldPlace("tasks", "value", "7")
SIZE = 3 * CHUNK_BYTES + 1000
CONTENT = random.Random(4).randbytes(SIZE)


def sealed(content: bytes, key: bytes, piece: int = 10_000) -> bytes:
    cipher = FileSealer(key)
    parts = [
        cipher.update(content[at : at + piece]) for at in range(0, len(content), max(piece, 1))
    ]
    return b"".join((*parts, cipher.finish()))


def read(file: bytes, key: bytes, first: int, length: int, piece: int = 70_000) -> bytes:
    found = sealed_range(first, length)
    part = file[found.first : found.first + found.length]

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(part), piece):
            yield part[at : at + piece]

    async def joined() -> bytes:
        return b"".join([each async for each in opened_range(key, pieces(), found, length)])

    return asyncio.run(joined())


def test_a_field_opens_in_its_place_and_nowhere_else() -> None:
    field = seal_field(KEY, PLACE, b"content", Nonces())
    assert open_field(KEY, PLACE, field) == b"content"
    assert b"content" not in field
    for other in (
        PLACE._replace(table="specs"),
        PLACE._replace(column="payload"),
        PLACE._replace(row="8"),
        PLACE._replace(id=1 << 40),
    ):
        with pytest.raises(InternalFault, match="does not decrypt"):
            open_field(KEY, other, field)
    with pytest.raises(InternalFault):
        open_field(AccountKey(KEY.id, bytes(32)), PLACE, field)
    for at in range(len(field)):
        changed = bytearray(field)
        changed[at] ^= 1
        if at < len(KEY.id):
            continue  # names the key; the store finds none of that name
        with pytest.raises(InternalFault):
            open_field(KEY, PLACE, bytes(changed))


@given(st.integers(0, SIZE), st.integers(0, SIZE), st.integers(1, SIZE), st.integers(1000, 200_000))
def test_a_range_of_a_sealed_file_is_that_of_its_content(
    first: int, length: int, written: int, got: int
) -> None:
    key = bytes(32)
    file = sealed(CONTENT, key, written)
    length = min(length, SIZE - first)
    if length:
        assert read(file, key, first, length, got) == CONTENT[first : first + length]


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_files_around_the_size_of_a_chunk(size: int) -> None:
    key = new_file_key()
    file = sealed(CONTENT[:size], key)
    chunks = -(-size // CHUNK_BYTES)
    assert len(file) == size + 16 * chunks
    if size:
        assert read(file, key, 0, size) == CONTENT[:size]


def test_chunks_that_were_swapped_changed_or_cut_do_not_decrypt() -> None:
    key = new_file_key()
    file = sealed(CONTENT, key)
    swapped = file[SEALED_CHUNK_BYTES : 2 * SEALED_CHUNK_BYTES] + file[:SEALED_CHUNK_BYTES]
    for wrong in (
        swapped + file[2 * SEALED_CHUNK_BYTES :],
        bytes([file[0] ^ 1]) + file[1:],
        file[: SIZE // 2],
        sealed(CONTENT, new_file_key()),
    ):
        with pytest.raises(InternalFault, match="does not decrypt"):
            read(wrong, key, 0, SIZE)
    # whole chunks cut off: too few bytes, never other ones
    assert read(file[:SEALED_CHUNK_BYTES], key, 0, SIZE) == CONTENT[:CHUNK_BYTES]


@given(st.lists(st.integers(0, 5000), max_size=5))
def test_parts_that_begin_anywhere_decrypt_as_one(lengths: list[int]) -> None:
    key, at, file = bytes(32), 0, b""
    for length in lengths:
        file += PartCipher(key, at).update(CONTENT[at : at + length])
        at += length
    assert PartCipher(key, 0).update(file) == CONTENT[:at]
    assert at < 16 or file != CONTENT[:at]
