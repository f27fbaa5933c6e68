"""The migrated schema is the one the metadata describes, on both databases; hot statements use the indexes they are meant to."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from importlib import import_module
from pathlib import Path

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable

from gpool.core.errors import Invalid
from gpool.core.ids import NodeId
from gpool.core.model import Instant, TaskStatus
from gpool.server.store import (
    generated_rows,
    open_inline,
    open_store,
)
from gpool.server.store.drivers.opening import migrate_sqlite, sqlite_version
from gpool.server.store.drivers.sqlite_connection import compiled, in_tables
from gpool.server.store.migrations import newest_migration
from gpool.server.store.migrations.upgrade import config, postgres_script
from gpool.server.store.operations.identity import teams
from gpool.server.store.operations.leases import leases
from gpool.server.store.operations.money import limits, meters
from gpool.server.store.operations.tasks import storage, submissions, tasks
from gpool.server.store.protocol import Operation, Statement
from gpool.server.store.row_generator import generated
from gpool.server.store.schema_columns import metadata
from gpool.server.store.sealing import CIPHER, NoKeys
from gpool.wire.frames import Started
from tests.store.store_pool import Pool, returned


def described_by(path: Path) -> dict[str, object]:
    """Tables by their columns and constraints, in order: a column that was added later is written down elsewhere."""
    found: dict[str, object] = {}
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute(
            "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL AND name <> 'alembic_version'"
        ).fetchall()
        for kind, name, sql in rows:
            if kind == "table":
                columns = connection.execute(f"PRAGMA table_xinfo({name})").fetchall()
                constraints = sorted(re.findall(r"CONSTRAINT \w+ [A-Z ]+\([^)]*\)", sql))
                found[name] = (columns, constraints)
            else:
                found[name] = re.sub(r"\s+", " ", sql)
    return found


def test_the_metadata_and_the_migrations_agree_on_sqlite(tmp_path: Path) -> None:
    migrate_sqlite(tmp_path / "migrated.db")
    engine = create_engine(f"sqlite:///{tmp_path}/made.db")
    metadata.create_all(engine)
    engine.dispose()
    assert described_by(tmp_path / "migrated.db") == described_by(tmp_path / "made.db")


def test_the_metadata_and_the_migrations_agree_on_postgresql(
    postgres: Callable[..., str],
) -> None:
    asyncpg = import_module("asyncpg")
    dialect = postgresql.dialect()
    statements = [
        str(made.compile(dialect=dialect))
        for table in metadata.sorted_tables
        for made in (CreateTable(table), *(CreateIndex(index) for index in table.indexes))
    ]

    async def described(url: str, *made: str) -> list[tuple]:
        connection = await asyncpg.connect(url)
        for statement in made:
            await connection.execute(statement)
        columns = await connection.fetch(
            "SELECT table_name, column_name, ordinal_position, data_type, is_nullable, column_default "
            "FROM information_schema.columns WHERE table_schema = 'public' "
            "AND table_name <> 'alembic_version' ORDER BY 1, 3"
        )
        indexes = await connection.fetch(
            "SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = 'public' "
            "AND tablename <> 'alembic_version' ORDER BY 1, 2"
        )
        await connection.close()
        return [tuple(row) for row in (*columns, *indexes)]

    migrated = asyncio.run(described(postgres()))
    made = asyncio.run(described(postgres("template0"), *statements))
    assert migrated == made
    assert len(made) > 100


def test_the_newest_migration_is_the_one_the_store_looks_for(tmp_path: Path) -> None:
    newest = newest_migration()
    assert ScriptDirectory.from_config(config()).get_current_head() == newest
    migrate_sqlite(tmp_path / "x.db")
    assert sqlite_version(tmp_path / "x.db") == newest
    assert postgres_script(newest).strip() == ""


def test_the_row_types_are_those_of_the_schema() -> None:
    assert Path(generated_rows.__file__).read_text() == generated()


def test_opening_again_keeps_what_is_there(pool: Pool) -> None:
    (task,) = pool.submit()
    pool.database.reopen()
    assert pool.view(task).row.id == task


def test_replicas_that_open_an_empty_database_at_once_migrate_it_once(
    postgres: Callable[..., str],
) -> None:
    url = postgres("template0")

    async def open_all() -> list[int]:
        stores = await asyncio.gather(*(open_store(url) for _ in range(3)))
        terms = [await store.write(leases.take_term(Instant(1))) for store in stores]
        for store in stores:
            await store.close()
        return terms

    assert asyncio.run(open_all()) == [1, 2, 3]


def test_an_unknown_address_is_refused() -> None:
    with pytest.raises(Invalid, match="sqlite:///PATH"):
        asyncio.run(open_store("mysql://x"))


def statements_of(operation: Operation, *answers: list) -> list[Statement]:
    """What the operation asks when the database answers so (and with nothing, after that)."""
    asked = []
    rows = iter(answers)
    try:
        statement = next(operation)
        while True:
            if statement is CIPHER:
                statement = operation.send(NoKeys())
                continue
            asked.append(statement)
            statement = operation.send(next(rows, []))
    except StopIteration:
        return asked


def test_no_hot_statement_scans_the_tasks(tmp_path: Path, pool: Pool) -> None:
    (task,) = pool.submission().tasks
    node = NodeId(7)
    place = pool.place(node, [task.id])
    held = (task.id, 1, 1, 1, 1, "leased", 1, None, 0, 0, None, node, None)
    held += (0, "[1000,1,[]]", None, None, "end", 0)
    metered = (*held[:-3], 9, "end", 1)
    meter = (1, 1, 0, 7, 0, 1, 2, 3, 1, 1, 0, "[]", 1, 0, 0, 0, 1, 0, 1, 1, None)
    charging = (1, 1, 0, 7, 0, 1, 2, 3, 3600 * 10**6, 0, 0, "[]", 1, 0, 0, 0, 10**9, 0, 1, 1, None)
    hot = [
        *statements_of(submissions.submit([pool.submission()])),
        *statements_of(storage.usage_of([("user", pool.ann)])),
        *statements_of(leases.apply_plan([place], 1, Instant(1)), [(1,)], [(node,)]),
        *statements_of(leases.record([(node, [Started(task.id, 1)])], Instant(1)), [held]),
        *statements_of(leases.record([(node, [returned(task.id)])], Instant(1)), [held], [(1, 1)]),
        *statements_of(leases.record([(node, [Started(task.id, 1)])], Instant(1))),
        *statements_of(
            leases.record([(node, [returned(task.id)])], Instant(5000)),
            [metered],
            [charging],
            [],  # spent
            [],  # projects
            [(1, 1)],
        ),
        *statements_of(meters.extend(Instant(1), 10), [meter]),
        *statements_of(limits.capped_leases()),
        *statements_of(limits.cost_of(task.id)),
        *statements_of(meters.has_unheld()),
        *statements_of(leases.expire(node, Instant(1)), [held]),
        *statements_of(leases.held(node)),
        *statements_of(
            tasks.cancel([task.id], None, Instant(1)),
            [],
            [(task.id, 1, 1, 1, "queued", None, None)],
            [(1, 1)],
        ),
        *statements_of(tasks.task(task.id, None)),
        *statements_of(tasks.tasks(pool.ann, None, 10)),
        *statements_of(tasks.tasks(pool.ann, None, 10, [TaskStatus.QUEUED, TaskStatus.RUNNING])),
        *statements_of(tasks.tasks(None, None, 10, [TaskStatus.QUEUED, TaskStatus.LEASED])),
        *statements_of(tasks.tasks(pool.ann, None, 10, (), [7, 8])),
        *statements_of(tasks.tasks(None, None, 10, [TaskStatus.SUCCEEDED], [7])),
        *statements_of(
            tasks.tasks(pool.ann, None, 10, [TaskStatus.QUEUED, TaskStatus.LEASED], [7])
        ),
        *statements_of(teams.usage_of("user", pool.ann), [], [(0,)], [(0,)]),
        *statements_of(teams.usage_of("team", 7), [], [(0,)], [(0,)]),
        *statements_of(tasks.batch_results(1, 0, 10)),
        *statements_of(tasks.batch_tasks(1)),
        *statements_of(leases.picture()),
    ]
    assert len(hot) > 20
    store = open_inline(tmp_path / "plans.db")
    store.close()
    with closing(sqlite3.connect(tmp_path / "plans.db")) as connection:
        assert any("INSERT INTO charges" in statement.sql for statement in hot)
        for statement in hot:
            plan = plan_of(connection, statement)
            assert not [
                step
                for step in plan
                if re.match(r"SCAN (t|tasks)\b(?!.*ix_tasks_((team_)?(held|queued)|capped))", step)
            ], (
                statement.sql,
                plan,
            )
            if "FROM {" in statement.sql and "tasks" in statement.sql.split("{")[0]:
                assert not [step for step in plan if "ix_tasks" in step], (statement.sql, plan)


def test_what_is_open_is_read_from_its_own_index(tmp_path: Path, pool: Pool) -> None:
    """With a million finished tasks, nothing but these plans keeps a listing or a quota cheap."""
    is_open = [TaskStatus.QUEUED, TaskStatus.LEASED]
    migrate_sqlite(tmp_path / "plans.db")
    with closing(sqlite3.connect(tmp_path / "plans.db")) as connection:
        for operation in (
            tasks.tasks(pool.ann, None, 10, is_open),
            tasks.tasks(None, None, 10, is_open, [7]),
            tasks.tasks(pool.ann, None, 10, is_open, [7, 8]),
            teams.usage_of("user", pool.ann),
            teams.usage_of("team", 7),
        ):
            plans = [
                step
                for statement in statements_of(operation, [], [(0,)], [(0,)])
                for step in plan_of(connection, statement)
                if re.search(r"\b(t|tasks) USING\b", step) and "PRIMARY KEY" not in step
            ]
            assert plans
            assert all(re.search(r"ix_tasks_(team_)?(held|queued)\b", step) for step in plans)


def plan_of(connection: sqlite3.Connection, statement: Statement) -> list[str]:
    signature = tuple((name, relation.columns) for name, relation in statement.relations.items())
    parameters = dict(statement.parameters)
    tables = in_tables(statement.relations, wide=True)
    sql = compiled(statement.sql, signature, tables)
    for name, relation in statement.relations.items():
        parameters[f"relation_{name}"] = "[]"
        if name in tables:
            table = re.search(rf"temp\.(relation_{name}_\w+)", sql)[1]
            columns = ", ".join(column for column, _ in relation.columns)
            connection.execute(f"CREATE TEMP TABLE IF NOT EXISTS {table} ({columns})")
    return [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}", parameters)]
