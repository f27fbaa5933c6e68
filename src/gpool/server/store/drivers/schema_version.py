"""Which schema a database has, read without SQLAlchemy: a restart with nothing to migrate does not import it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from importlib import import_module
from pathlib import Path

HEAD = "0007"
"""The newest migration; a test compares it with the scripts."""


def sqlite_version(path: Path) -> str | None:
    with closing(sqlite3.connect(path)) as connection:
        try:
            row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        except sqlite3.OperationalError:  # no such table: an empty database
            return None
        return None if row is None else str(row[0])


def migrate_sqlite(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if sqlite_version(path) != HEAD:
        import_module("gpool.server.store.migrations.upgrade").upgrade_sqlite(path)
