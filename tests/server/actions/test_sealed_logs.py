"""A page of a sealed log is read by its offset, and holds what the database held."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from gpool.core.errors import NotFound
from gpool.server.actions.tasks import sealed_logs
from gpool.server.store.values import LogLine

LINES = [LogLine(1 << 32 | place, 1, 1 + place % 2, b"line %d\n" % place) for place in range(5000)]


def page(path: Path, after: int, limit: int) -> list[LogLine]:
    content = path.read_bytes() if path.exists() else None

    async def read(first: int, length: int) -> bytes:
        if content is None:
            raise NotFound("no such file")
        return content[first : first + length]

    size = 1000 if content is None else len(content)
    return asyncio.run(sealed_logs.page(read, size, after, limit))


@pytest.mark.parametrize("after", [0, 1 << 32, 1 << 32 | 499, 1 << 32 | 2700, 1 << 32 | 4999])
def test_a_page_is_the_same_from_any_cursor(tmp_path: Path, after: int) -> None:
    path = tmp_path / "log"
    path.write_bytes(sealed_logs.sealed(LINES))
    expected = [line for line in LINES if line.cursor > after][:500]
    assert page(path, after, 500) == expected


def test_the_last_line_of_a_large_log_needs_one_block(tmp_path: Path) -> None:
    """Every block but the last is destroyed: a reader that began at the beginning would fail."""
    lines = [LogLine(place, 0, 1, b"%d " % place * 4000) for place in range(1, 2001)]
    sealed = sealed_logs.sealed(lines)
    last = sealed_logs.sealed(lines[-1:])
    path = tmp_path / "log"
    path.write_bytes(sealed)
    assert page(path, lines[-2].cursor, 500) == lines[-1:]
    middle = len(sealed) - 2 * len(last) - 20_000
    damaged = sealed[:10] + b"\0" * (middle - 10) + sealed[middle:]
    path.write_bytes(damaged)
    assert page(path, lines[-2].cursor, 500) == lines[-1:]
    with pytest.raises(Exception, match="decompressing data"):  # the control
        page(path, 0, 500)


def test_a_log_sealed_by_an_earlier_version_is_still_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(msgspec.json.Encoder().encode_lines(LINES))
    assert page(path, LINES[9].cursor, 10) == LINES[10:20]


def test_a_sealed_log_is_no_larger_than_its_rows_were_charged(tmp_path: Path) -> None:
    tiny = [LogLine(place, 0, 1, b"x") for place in range(1, 3000)]
    assert len(sealed_logs.sealed(tiny)) < len(tiny) * 64


def test_a_log_whose_file_is_gone_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="expired"):
        page(tmp_path / "none", 0, 10)


def test_an_empty_log_is_an_empty_page(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(sealed_logs.sealed([]))
    assert page(path, 0, 10) == []
