"""Sealed logs: the output of an ended task as one compressed file with an index. Depends on no store; does blocking I/O.

    magic | block | block | … | index | length of the index (8 bytes) | magic

A block holds up to `BLOCK_LINES` chunks, compressed. The index gives each block's last cursor, offset and length, so a
page is read by its offset. Files of earlier versions (JSON lines, no index) are read from their beginning.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from gpool.core.errors import NotFound
from gpool.server.store.values import LogLine

MAGIC = b"GPOOLLOG1\n"
BLOCK_LINES = 500
BLOCK_BYTES = 256 * 1024
"""Size of a block before compression; one chunk may exceed it."""
_TAIL = 8 + len(MAGIC)
_Chunk = tuple[int, int, bytes]  # cursor, stream, data
_EPOCH_SHIFT = 32


class LogBlock(msgspec.Struct, frozen=True, array_like=True):
    last_cursor: int
    offset: int
    length: int


_encode = msgspec.msgpack.Encoder().encode
_chunks = msgspec.msgpack.Decoder(list[_Chunk]).decode
_index = msgspec.msgpack.Decoder(list[LogBlock]).decode
_json_line = msgspec.json.Decoder(LogLine).decode


def sealed(lines: Sequence[LogLine]) -> bytes:
    """Contents of the file; `lines` in the order of their cursors."""
    parts, blocks, offset = [MAGIC], [], len(MAGIC)
    for block in _blocks(lines):
        data = zlib.compress(_encode([(line.cursor, line.stream, line.data) for line in block]), 1)
        blocks.append(LogBlock(block[-1].cursor, offset, len(data)))
        parts.append(data)
        offset += len(data)
    index = _encode(blocks)
    return b"".join((*parts, index, len(index).to_bytes(8, "big"), MAGIC))


def _blocks(lines: Sequence[LogLine]) -> Iterator[list[LogLine]]:
    block: list[LogLine] = []
    size = 0
    for line in lines:
        if block and (len(block) >= BLOCK_LINES or size + len(line.data) > BLOCK_BYTES):
            yield block
            block, size = [], 0
        block.append(line)
        size += len(line.data)
    if block:
        yield block


def page(path: Path, after: int, limit: int) -> list[LogLine]:
    """Up to `limit` chunks with a cursor greater than `after`."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise NotFound("the output of this task was deleted; it had expired") from None
    with file:
        if file.read(len(MAGIC)) != MAGIC:
            file.seek(0)
            return _from_json_lines(file, after, limit)
        found: list[LogLine] = []
        for block in _blocks_after(file, after):
            file.seek(block.offset)
            for cursor, stream, data in _chunks(zlib.decompress(file.read(block.length))):
                if cursor > after:
                    found.append(LogLine(cursor, cursor >> _EPOCH_SHIFT, stream, data))
                    if len(found) >= limit:
                        return found
        return found


def _blocks_after(file: BinaryIO, after: int) -> Iterator[LogBlock]:
    size = file.seek(0, os.SEEK_END)
    file.seek(size - _TAIL)
    length = int.from_bytes(file.read(8), "big")
    file.seek(size - _TAIL - length)
    return (block for block in _index(file.read(length)) if block.last_cursor > after)


def _from_json_lines(file: BinaryIO, after: int, limit: int) -> list[LogLine]:
    found: list[LogLine] = []
    for text in file:
        line = _json_line(text)
        if line.cursor > after:
            found.append(line)
            if len(found) >= limit:
                break
    return found
