"""A database made by the first schema, with rows in it, becomes one of this schema and loses nothing, by way of each released one."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from importlib import import_module
from io import StringIO
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import URL, create_engine
from sqlalchemy.pool import NullPool

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.model import Instant, Offer, Permission, Phase
from gpool.core.quotas import QuotaUsage
from gpool.server.store.migrations.upgrade import config
from gpool.server.store.operations import nodes
from gpool.server.store.operations.identity import accounts, audit, teams, users
from gpool.server.store.operations.leases import leases
from gpool.server.store.operations.tasks import artifacts, tasks
from gpool.server.store.rows import digest_of, offer_text, spec_text
from gpool.wire.frames import Reached
from tests.store.store_pool import COMMAND, Database, opened

OFFER = Offer(1000, 1 << 30, 1 << 30)
ROWS = [
    "INSERT INTO users (id, name, permissions, created_at) VALUES (1, 'ann', 'consumer,operator', 5)",
    "INSERT INTO api_keys (id, user_id, name, hashed, created_at) VALUES (2, 1, 'k', 'hashed', 5)",
    "INSERT INTO nodes (id, owner_id, name, secret_hash, offer, availability, created_at) "  # noqa: S608
    f"VALUES (3, 1, 'box', 'secret', '{offer_text(OFFER)}', 'available', 5)",
    "INSERT INTO gpus (id, node_id, uuid, position) VALUES (4, 3, 'G1', 0)",
    "INSERT INTO specs (id, user_id, digest, body, retries, created_at) "  # noqa: S608
    f"VALUES (6, 1, '{digest_of(spec_text(COMMAND))}', '{spec_text(COMMAND)}', 0, 5)",
    "INSERT INTO batches (id, user_id, name, total, closed, created_at) VALUES (7, 1, 'true', 2, 1, 5)",
    "INSERT INTO tasks (id, batch_id, position, spec_id, user_id, status, created_at, queued_at) "
    "VALUES (8, 7, 0, 6, 1, 'queued', 5, 5)",
    "INSERT INTO tasks (id, batch_id, position, spec_id, user_id, status, epoch, created_at, node_id, holding, "
    "allocation_number, allocation, leased_at) "
    "VALUES (9, 7, 1, 6, 1, 'leased', 1, 5, 3, 1, 0, '[1000,1,[[0,1,500]]]', 6)",
    "INSERT INTO artifacts (sha256, size_bytes, touched_at) VALUES ('aa', 100, 5)",
    "INSERT INTO artifacts (sha256, size_bytes, touched_at) VALUES ('bb', 10, 5)",
    "INSERT INTO artifact_refs (sha256, kind, holder, user_id) VALUES ('aa', 'upload', 1, 1)",
    "INSERT INTO artifact_refs (sha256, kind, holder, user_id) VALUES ('aa', 'payload', 8, 1)",
    "INSERT INTO artifact_refs (sha256, kind, holder, user_id) VALUES ('bb', 'lease', 9, 1)",
]


RELEASED = ("0001", "0002")


def sqlite_to(path: Path, version: str) -> None:
    made = config()
    engine = create_engine(URL.create("sqlite", database=str(path)), poolclass=NullPool)
    with engine.begin() as connection:
        made.attributes["connection"] = connection
        command.upgrade(made, version)
    engine.dispose()


def script_between(start: str, end: str) -> str:
    made = config()
    made.output_buffer = StringIO()
    made.attributes["dialect"] = "postgresql"
    command.upgrade(made, f"{start}:{end}", sql=True)
    return made.output_buffer.getvalue()


@pytest.fixture(params=RELEASED)
def release(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(params=["sqlite", "postgresql"])
def old_schema(request: pytest.FixtureRequest, tmp_path: Path, release: str) -> str:
    """The address of a database that began with the first release and came as far as this one."""
    if request.param == "sqlite":
        path = tmp_path / "old.db"
        sqlite_to(path, "0001")
        with closing(sqlite3.connect(path)) as raw:
            for row in ROWS:
                raw.execute(row)
            raw.commit()
        sqlite_to(path, release)
        return f"sqlite:///{path}"
    fresh: Callable[..., str] = request.getfixturevalue("postgres")
    url = fresh("template0")

    async def fill() -> None:
        connection = await import_module("asyncpg").connect(url)
        await connection.execute(script_between("base", "0001"))
        for row in ROWS:
            await connection.execute(row)
        if release != "0001":
            await connection.execute(script_between("0001", release))
        await connection.close()

    asyncio.run(fill())
    return url


@pytest.fixture
def upgraded(old_schema: str) -> Database:
    with opened(old_schema) as database:
        yield database


def test_a_task_that_was_leased_before_the_upgrade_reports_phases_after_it(
    upgraded: Database,
) -> None:
    done = upgraded.write(leases.record([(NodeId(3), [Reached(9, 1, Phase.BUILD)])], Instant(9)))
    assert (done.noted, done.refused) == ((9,), ())
    view = upgraded.read(tasks.task(TaskId(9), None))
    assert (view.note, view.checkpoint) == ("build", None)


def test_a_database_of_an_old_schema_keeps_its_rows_and_takes_new_ones(
    upgraded: Database,
) -> None:
    ann = UserId(1)
    account = upgraded.read(accounts.account(ann))
    assert account.user.permissions == {Permission.CONSUMER, Permission.OPERATOR}
    assert (account.password_hash, account.disabled) == (None, False)
    caller = upgraded.read(users.caller_by_key("hashed", Instant(9)))
    assert (caller.user.id, caller.scopes, caller.teams) == (ann, None, {})
    assert upgraded.read(nodes.credentials_of(NodeId(3))).public_key is None
    assert upgraded.read(nodes.node(NodeId(3))).node.gpus_withheld == frozenset()
    listed = upgraded.read(tasks.tasks(ann, None, 10))
    assert [(view.row.id, view.row.team) for view in listed] == [(9, None), (8, None)]
    assert upgraded.read(tasks.batch(7, ann)).team is None
    assert upgraded.read(teams.usage_of("user", ann)) == QuotaUsage(500, 1, 100)
    assert upgraded.read(artifacts.visible("aa", ann)) == 100
    assert upgraded.read(audit.head()) is None
    upgraded.write(artifacts.add_artifact("aa", 100, ann, None, None, Instant(9)))
    upgraded.write(artifacts.add_artifact("cc", 7, ann, None, None, Instant(9)))
    assert upgraded.read(teams.usage_of("user", ann)).storage_bytes == 107
    upgraded.write(tasks.cancel([TaskId(8)], ann, Instant(9)))
    upgraded.reopen()
    assert upgraded.read(teams.usage_of("user", ann)) == QuotaUsage(500, 0, 107)
