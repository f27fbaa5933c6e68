"""The encrypted file: what was added is read; a file that was changed, cut or extended anywhere is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpool.core.errors import Invalid
from gpool.server.recovery import archive
from gpool.server.recovery.archive import (
    CHUNK_BYTES,
    HEADER_BYTES,
    TAG_BYTES,
    ArchiveReader,
    ArchiveWriter,
    FileData,
    TableHead,
    TableRows,
)
from tests.server.recovery.recovery_pool import CHEAP, SECRET, contents

RECORDS = [
    TableHead("t", ["id", "name", "data"]),
    TableRows([[1, "é", b"\x00\xff"], [2**62, None, b""]]),
    FileData(bytes(range(256)) * 3000),
    FileData(b"end"),
]


def written(path: Path, records: list[archive.Record] | None = None) -> Path:
    with path.open("wb") as file:
        writer = ArchiveWriter(file, SECRET, CHEAP)
        for record in RECORDS if records is None else records:
            writer.add(record)
        writer.close()
    return path


def refusal(path: Path, secret: str = SECRET) -> str:
    with pytest.raises(Invalid) as refused:
        contents(path, secret)
    return refused.value.detail


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert contents(written(tmp_path / "a")) == RECORDS


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 20, CHUNK_BYTES, 3 * CHUNK_BYTES + 7])
def test_records_of_any_size_cross_chunks(tmp_path: Path, size: int) -> None:
    records: list[archive.Record] = [FileData(b"x" * size), FileData(b"y" * size)]
    assert contents(written(tmp_path / "a", records)) == records


def test_nothing_of_the_contents_is_readable_in_the_file(tmp_path: Path) -> None:
    found = written(tmp_path / "a", [FileData(b"MARKED SECRET " * 10)]).read_bytes()
    assert b"MARKED" not in found
    assert SECRET.encode() not in found


def test_two_archives_of_the_same_records_differ(tmp_path: Path) -> None:
    first, second = written(tmp_path / "a"), written(tmp_path / "b")
    assert first.read_bytes()[HEADER_BYTES:] != second.read_bytes()[HEADER_BYTES:]


def test_a_wrong_passphrase_is_named_as_such(tmp_path: Path) -> None:
    assert "passphrase is wrong" in refusal(written(tmp_path / "a"), "another passphrase")


def test_another_file_is_no_backup(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"PK\x03\x04" + bytes(100))
    assert "no backup of gpool" in refusal(tmp_path / "a")


def test_a_header_that_asks_for_much_memory_is_refused(tmp_path: Path) -> None:
    whole = bytearray(written(tmp_path / "a").read_bytes())
    whole[HEADER_BYTES - 3] = 40
    (tmp_path / "a").write_bytes(whole)
    assert "header" in refusal(tmp_path / "a")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return written(tmp_path_factory.mktemp("archive") / "a").read_bytes()


def read(data: bytes, folder: Path) -> None:
    (folder / "changed").write_bytes(data)
    contents(folder / "changed")


@settings(max_examples=60)
@given(at=st.integers(0, 10**7), bit=st.integers(0, 7))
def test_a_changed_bit_anywhere_is_found(
    whole: bytes, at: int, bit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    changed = bytearray(whole)
    changed[at % len(whole)] ^= 1 << bit
    with pytest.raises(Invalid):
        read(bytes(changed), tmp_path_factory.getbasetemp())


@settings(max_examples=60)
@given(size=st.integers(0, 10**7))
def test_a_file_that_ends_early_is_refused(
    whole: bytes, size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.raises(Invalid):
        read(whole[: size % len(whole)], tmp_path_factory.getbasetemp())


def test_a_file_cut_between_two_chunks_ends_early(tmp_path: Path, whole: bytes) -> None:
    for chunks in (1, 2):
        (tmp_path / "a").write_bytes(whole[: HEADER_BYTES + chunks * (CHUNK_BYTES + TAG_BYTES)])
        assert "ends early" in refusal(tmp_path / "a")


def test_chunks_cannot_be_swapped_or_appended(tmp_path: Path, whole: bytes) -> None:
    size = CHUNK_BYTES + TAG_BYTES
    head, body = whole[:HEADER_BYTES], whole[HEADER_BYTES:]
    for changed in (body[size : 2 * size] + body[:size] + body[2 * size :], body + body[:size]):
        with pytest.raises(Invalid):
            read(head + changed, tmp_path)
    read(head + body, tmp_path)  # control


def test_a_reader_can_read_twice(tmp_path: Path) -> None:
    with written(tmp_path / "a").open("rb") as file:
        reader = ArchiveReader(file, SECRET)
        assert list(reader.records()) == list(reader.records())


def test_a_short_passphrase_is_refused() -> None:
    with pytest.raises(Invalid, match="5 letters"):
        archive.checked_passphrase("12345")
