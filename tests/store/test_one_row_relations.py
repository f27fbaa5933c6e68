"""Relations of one row, wide ones and plain inserts, which SQLite gets as parameters or tables instead of JSON."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from gpool.core.model import TaskStatus
from gpool.server.store.drivers.sqlite_connection import Connection
from gpool.server.store.protocol import Relation, Row, Statement
from gpool.server.store.rows import insert

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


WIDE = tuple((f"c{number}", "text" if number % 2 else "int") for number in range(8))


def wide(first: int) -> Row:
    return (first, *("x" if number % 2 else number for number in range(1, 8)))


@pytest.mark.parametrize("first", [7, -1, 2**63 - 1, 2**63])
def test_a_wide_relation_reads_alike_from_a_table_and_as_json(
    connection: Connection, tmp_path: Path, first: int
) -> None:
    """A reader's connection has no temporary tables; integers past 64 bits are bound as JSON."""
    rows = [wide(first), wide(8)]
    statement = Statement(
        "SELECT r.c0, r.c7 FROM {rows} AS r ORDER BY r.c2, r.c0", {}, {"rows": Relation(WIDE, rows)}
    )
    reader = Connection(str(tmp_path / "db.sqlite"), writes=False)
    assert connection.execute(statement) == reader.execute(statement)
    assert connection.execute(statement) == reader.execute(statement), "the table was emptied"
    reader.close()


class _Thing(NamedTuple):
    id: int
    name: str
    data: bytes | None


def test_rows_are_inserted_as_they_are(connection: Connection) -> None:
    connection.execute(
        Statement("CREATE TABLE things (id INTEGER PRIMARY KEY, name TEXT, data BLOB)")
    )
    rows = [_Thing(1, "a", None), _Thing(2, "b", b"\0")]
    connection.execute(insert("things", _Thing, rows))
    again = insert(
        "things", _Thing, [_Thing(2, "c", None), _Thing(3, "d", None)], "ON CONFLICT DO NOTHING"
    )
    connection.execute(again)
    found = connection.execute(Statement("SELECT id, name, data FROM things ORDER BY id"))
    assert found == [*rows, (3, "d", None)]
    spelled = Statement(again.sql, again.parameters, again.relations)
    connection.execute(spelled)
    assert connection.execute(Statement("SELECT COUNT(*) FROM things")) == [(3,)]
