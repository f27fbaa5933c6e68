"""Sealed logs: the output of an ended task as one compressed file with an index. Reads ranges; depends on no store.

    magic | block | block | … | index | length of the index (8 bytes) | magic

A block holds up to `BLOCK_LINES` chunks, compressed. The index gives each block's last cursor, offset and length, so a
page is read by its offset. Files of earlier versions (JSON lines, no index) are read from their beginning.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence

import msgspec

from gpool.core.errors import NotFound
from gpool.server.store.values import LogLine

MAGIC = b"GPOOLLOG1\n"
BLOCK_LINES = 500
BLOCK_BYTES = 256 * 1024
"""Size of a block before compression; one chunk may exceed it."""
WHOLE_BYTES = 128 * 1024
"""A file up to this size is read by one request."""
_TAIL = 8 + len(MAGIC)
_Chunk = tuple[int, int, bytes]  # cursor, stream, data
_EPOCH_SHIFT = 32
ReadRange = Callable[[int, int], Awaitable[bytes]]
"""Returns the bytes of the file from an offset, by number; raises `NotFound` if the file is gone."""


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


async def page(read: ReadRange, size: int, after: int, limit: int) -> list[LogLine]:
    """Up to `limit` chunks with a cursor greater than `after`, of a file of `size` bytes."""
    try:
        if size <= WHOLE_BYTES:
            read = _slices_of(await read(0, size))
        head = await read(0, len(MAGIC))
        if head != MAGIC:
            return await asyncio.to_thread(_from_json_lines, await read(0, size), after, limit)
        found: list[LogLine] = []
        for block in await _blocks_after(read, size, after):
            data = await read(block.offset, block.length)
            for cursor, stream, text in _chunks(await asyncio.to_thread(zlib.decompress, data)):
                if cursor > after:
                    found.append(LogLine(cursor, cursor >> _EPOCH_SHIFT, stream, text))
                    if len(found) >= limit:
                        return found
        return found
    except NotFound:
        raise expired() from None


def expired() -> NotFound:
    return NotFound("the output of this task was deleted; it had expired")


def _slices_of(content: bytes) -> ReadRange:
    async def read(first: int, length: int) -> bytes:
        return content[first : first + length]

    return read


async def _blocks_after(read: ReadRange, size: int, after: int) -> Iterator[LogBlock]:
    tail = await read(size - _TAIL, 8)
    length = int.from_bytes(tail, "big")
    index = _index(await read(size - _TAIL - length, length))
    return (block for block in index if block.last_cursor > after)


def _from_json_lines(content: bytes, after: int, limit: int) -> list[LogLine]:
    found: list[LogLine] = []
    for text in content.splitlines():
        line = _json_line(text)
        if line.cursor > after:
            found.append(line)
            if len(found) >= limit:
                break
    return found
