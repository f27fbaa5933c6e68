"""Relations of one row, which SQLite gets as parameters: the same rows as when they are passed as JSON or a table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpool.core.model import TaskStatus
from gpool.server.store.drivers.sqlite_connection import Connection
from gpool.server.store.protocol import Relation, Row, Statement

SCALARS = (("id", "int"), ("name", "text"))
BLOBS = (*SCALARS, ("data", "blob"))
READ = "SELECT r.id, r.name FROM {rows} AS r WHERE r.id = :id"


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[Connection]:
    opened = Connection(str(tmp_path / "db.sqlite"), writes=True)
    opened.begin()
    yield opened
    opened.close()


@pytest.mark.parametrize(
    "row",
    [
        (7, "a"),
        (7, None),
        (-1, ""),
        (2**63 - 1, "ü"),
        (2**63, "past the columns"),
        (7, TaskStatus.QUEUED),
        (True, "x"),
    ],
)
def test_a_row_alone_reads_as_among_others(connection: Connection, row: Row) -> None:
    def read(rows: list[Row]) -> list[Row]:
        given = {"id": min(row[0], 2**63 - 1)}
        return connection.execute(Statement(READ, given, {"rows": Relation(SCALARS, rows)}))

    assert read([row]) == read([row, (8, "other")])


def test_blobs_and_several_relations_are_bound(connection: Connection) -> None:
    rows = connection.execute(
        Statement(
            "SELECT a.id, a.data, b.id FROM {first} AS a JOIN {second} AS b ON b.name = a.name",
            {},
            {
                "first": Relation(BLOBS, [(1, "x", b"\x00\xff")]),
                "second": Relation(SCALARS, [(2, "x")]),
            },
        )
    )
    assert rows == [(1, b"\x00\xff", 2)]
