"""The tables, as SQLAlchemy metadata: for migrations and their test only. The operations speak SQL text.

A task's row is written three times on its way (submitted, leased, ended). Listings go by (user, id); what is open is
found by two partial indexes, so a million finished rows cost the scheduling picture nothing; results of a batch go by
(batch, sequence). There are no foreign keys: the operations guard what they write.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)

BIG = BigInteger().with_variant(Integer(), "sqlite")
"""63 bits on both; SQLite's row id only answers to the name INTEGER."""

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)


def _id() -> Column[int]:
    return Column("id", BIG, primary_key=True, autoincrement=False)


def _int(name: str, *, primary_key: bool = False) -> Column[int]:
    return Column(name, BIG, nullable=False, primary_key=primary_key, autoincrement=False)


def _counter(name: str) -> Column[int]:
    return Column(name, BIG, nullable=False, server_default=text("0"))


def _maybe(name: str) -> Column[int]:
    return Column(name, BIG)


def _text(name: str, *, primary_key: bool = False) -> Column[str]:
    return Column(name, Text, nullable=False, primary_key=primary_key)


def _note(name: str) -> Column[str]:
    return Column(name, Text, nullable=False, server_default=text("''"))


users = Table(
    "users",
    metadata,
    _id(),
    _text("name"),
    _text("permissions"),
    _int("created_at"),
    UniqueConstraint("name"),
)

api_keys = Table(
    "api_keys",
    metadata,
    _id(),
    _int("user_id"),
    _text("name"),
    _text("hashed"),
    _int("created_at"),
    UniqueConstraint("hashed"),
)

invites = Table(
    "invites",
    metadata,
    _text("hashed", primary_key=True),
    _int("owner_id"),
    _int("expires_at"),
    _int("created_at"),
    _maybe("used_at"),
    _maybe("node_id"),
)

nodes = Table(
    "nodes",
    metadata,
    _id(),
    _int("owner_id"),
    _text("name"),
    _text("secret_hash"),
    _text("offer"),
    _text("availability"),
    _maybe("availability_at"),
    _maybe("last_beat_at"),
    _int("created_at"),
    UniqueConstraint("owner_id", "name"),
    UniqueConstraint("secret_hash"),
)

gpus = Table(
    "gpus",
    metadata,
    _id(),
    _int("node_id"),
    _text("uuid"),
    _int("position"),
    Column("available", BIG, nullable=False, server_default=text("1")),
    _counter("gone"),
    UniqueConstraint("node_id", "uuid"),
)

specs = Table(
    "specs",
    metadata,
    _id(),
    _int("user_id"),
    _text("digest"),
    _text("body"),
    _int("retries"),
    _int("created_at"),
    UniqueConstraint("user_id", "digest"),
)

batches = Table(
    "batches",
    metadata,
    _id(),
    _int("user_id"),
    _text("name"),
    _counter("total"),
    _counter("done"),
    _counter("closed"),
    _int("created_at"),
)

tasks = Table(
    "tasks",
    metadata,
    _id(),
    _int("batch_id"),
    _int("position"),
    _int("spec_id"),
    _int("user_id"),
    _text("status"),
    _counter("epoch"),
    _int("created_at"),
    _maybe("queued_at"),
    _maybe("node_id"),
    _counter("holding"),
    _maybe("allocation_number"),
    Column("allocation", Text),
    _maybe("leased_at"),
    _maybe("started_at"),
    _maybe("finished_at"),
    Column("reason", Text),
    _maybe("exit_code"),
    _counter("tries"),
    _counter("losses"),
    _maybe("sequence"),
    Column("error_text", Text),
    _note("payload_sha256"),
    _note("value_sha256"),
    _note("log_sha256"),
    Column("outputs", Text),
    Column("payload", LargeBinary),
    Column("value", LargeBinary),
)
Index("ix_tasks_user_id_id", tasks.c.user_id, tasks.c.id)
Index(
    "ix_tasks_queued",
    tasks.c.user_id,
    tasks.c.id,
    sqlite_where=text("status = 'queued'"),
    postgresql_where=text("status = 'queued'"),
)
Index(
    "ix_tasks_held",
    tasks.c.node_id,
    sqlite_where=text("holding = 1"),
    postgresql_where=text("holding = 1"),
)
Index(
    "ix_tasks_results",
    tasks.c.batch_id,
    tasks.c.sequence,
    sqlite_where=text("sequence IS NOT NULL"),
    postgresql_where=text("sequence IS NOT NULL"),
)

attempts = Table(
    "attempts",
    metadata,
    _int("task_id", primary_key=True),
    _int("epoch", primary_key=True),
    _int("node_id"),
    _int("leased_at"),
    _maybe("started_at"),
    _int("ended_at"),
    _text("reason"),
    _note("detail"),
)

log_heads = Table(
    "log_heads",
    metadata,
    _int("task_id", primary_key=True),
    _int("size_bytes"),
    _counter("truncated"),
)

log_chunks = Table(
    "log_chunks",
    metadata,
    _int("task_id", primary_key=True),
    _int("cursor", primary_key=True),
    _int("stream"),
    Column("data", LargeBinary, nullable=False),
)

artifacts = Table(
    "artifacts",
    metadata,
    _text("sha256", primary_key=True),
    _int("size_bytes"),
    _int("touched_at"),
)

artifact_refs = Table(
    "artifact_refs",
    metadata,
    _text("sha256", primary_key=True),
    _text("kind", primary_key=True),
    _int("holder", primary_key=True),
    _int("user_id"),
    _counter("epoch"),
)

idempotency = Table(
    "idempotency",
    metadata,
    _int("user_id", primary_key=True),
    _text("key", primary_key=True),
    _text("fingerprint"),
    Column("answer", LargeBinary, nullable=False),
    _int("created_at"),
    Index("ix_idempotency_created_at", "created_at"),
)

scheduler_term = Table(
    "scheduler_term",
    metadata,
    _id(),
    _int("term"),
    _int("taken_at"),
)
