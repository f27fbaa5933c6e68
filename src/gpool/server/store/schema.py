"""The tables, as SQLAlchemy metadata for migrations, their test and `row_generator`. Operations use SQL text.

A task's row is written three times: submitted, leased, ended. Listings use (user, id). Partial indexes hold queued and
held tasks, so that a million ended rows cost the scheduler nothing; those of teams are separate. Batch results use
(batch, sequence). No foreign keys: operations guard their writes. One file because it is the whole schema.
"""

from __future__ import annotations

from typing import Any

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
"""63 bits in both databases; SQLite's row id must have the type INTEGER."""

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


def _words(name: str) -> Column[str]:
    return Column(name, Text)


def _bytes(name: str, *, nullable: bool = False) -> Column[bytes]:
    return Column(name, LargeBinary, nullable=nullable)


def _note(name: str) -> Column[str]:
    return Column(name, Text, nullable=False, server_default=text("''"))


def _partial(name: str, *columns: Column[Any], where: str) -> Index:
    return Index(name, *columns, sqlite_where=text(where), postgresql_where=text(where))


users = Table(
    "users",
    metadata,
    _id(),
    _text("name"),
    _text("permissions"),
    _int("created_at"),
    _words("password_hash"),
    _maybe("disabled_at"),
    _maybe("deleted_at"),
    UniqueConstraint("name"),
)
"""`deleted_at`: the account is gone; the row stays until the loop `retention` has deleted its tasks."""

api_keys = Table(
    "api_keys",
    metadata,
    _id(),
    _int("user_id"),
    _text("name"),
    _text("hashed"),
    _int("created_at"),
    _words("scopes"),
    _maybe("expires_at"),
    _maybe("ended_at"),
    _maybe("last_used_at"),
    _maybe("team_id"),
    UniqueConstraint("hashed"),
    Index("ix_api_keys_user_id_id", "user_id", "id"),
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
    _words("public_key"),
    UniqueConstraint("owner_id", "name"),
    UniqueConstraint("secret_hash"),
    Index("ix_nodes_public_key", "public_key", unique=True),
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
    _words("flagged"),
    _words("quarantined"),
    _words("unproven"),
    _words("verdict"),
    _maybe("judged_at"),
    _words("measured"),
    UniqueConstraint("node_id", "uuid"),
    Index("ix_gpus_uuid", "uuid"),
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
    _counter("stored_bytes"),
    UniqueConstraint("user_id", "digest"),
)
"""`stored_bytes` (here and below): bytes charged to the owner's storage for the row and its inline data."""

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
    _maybe("team_id"),
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
    _maybe("team_id"),
    _counter("stored_bytes"),
    _maybe("shrunk_at"),
    Index("ix_tasks_spec_id", "spec_id"),
)
"""`shrunk_at`: when arguments, results, log and checkpoint expired; the summary stays."""
_partial("ix_tasks_user_id_id", tasks.c.user_id, tasks.c.id, where="team_id IS NULL")
_partial("ix_tasks_queued", tasks.c.user_id, tasks.c.id, where="status = 'queued'")
_partial("ix_tasks_held", tasks.c.node_id, tasks.c.user_id, where="holding = 1")
_partial("ix_tasks_results", tasks.c.batch_id, tasks.c.sequence, where="sequence IS NOT NULL")
_partial("ix_tasks_team_id_id", tasks.c.team_id, tasks.c.id, where="team_id IS NOT NULL")
_partial(
    "ix_tasks_team_queued",
    tasks.c.team_id,
    tasks.c.status,  # constant; SQLite's planner, which has no statistics, then prefers this index
    tasks.c.id,
    where="team_id IS NOT NULL AND status = 'queued'",
)
_partial(
    "ix_tasks_team_held",
    tasks.c.team_id,
    tasks.c.holding,
    tasks.c.id,
    where="team_id IS NOT NULL AND holding = 1",
)
_partial(
    "ix_tasks_whole", tasks.c.finished_at, where="finished_at IS NOT NULL AND shrunk_at IS NULL"
)
_partial("ix_tasks_shrunk", tasks.c.finished_at, where="shrunk_at IS NOT NULL")

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

attempt_notes = Table(
    "attempt_notes",
    metadata,
    _int("task_id", primary_key=True),
    _int("epoch", primary_key=True),
    _text("note", primary_key=True),
    _int("at"),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    _int("task_id", primary_key=True),
    _int("epoch"),
    _int("saved_at"),
    _int("size_bytes"),
    _int("files"),
    _text("manifest"),
    _counter("stored_bytes"),
)

log_heads = Table(
    "log_heads",
    metadata,
    _int("task_id", primary_key=True),
    _int("size_bytes"),
    _counter("truncated"),
    _counter("stored_bytes"),
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
    _maybe("team_id"),
    Index("ix_artifact_refs_holder_kind", "holder", "kind"),
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

rules = Table(
    "rules",
    metadata,
    _text("kind", primary_key=True),
    _int("id", primary_key=True),
    _text("value"),
    _int("changed_at"),
)

gangs = Table(
    "gangs",
    metadata,
    _int("task_id", primary_key=True),
    _int("epoch"),
    _bytes("secret_sealed"),
    _counter("logged"),
)
"""Gangs that hold allocations, with the secret that their members share. The task's own row has `holding` and no node.

`logged`: number of chunks of all members in the task's log.
"""

members = Table(
    "members",
    metadata,
    _int("task_id", primary_key=True),
    _int("rank", primary_key=True),
    _int("epoch"),
    _int("node_id"),
    _int("allocation_number"),
    _text("allocation"),
    _note("host"),
    _counter("port"),
    _counter("holding"),
    _maybe("started_at"),
    _maybe("ended_at"),
    _maybe("place"),
    _words("reason"),
    _maybe("exit_code"),
    _note("detail"),
    _counter("duration_us"),
    _words("outputs"),
    _counter("logged"),
    _counter("mid_line"),
)
"""Members of the last lease of each gang, kept after its end for views and for repeated reports.

`host`, `port`: address offered by its node at the grant. `place`: order among the ends of the gang's members.
`logged`: sequence of the next chunk of its output; `mid_line`: streams (bits 1, 2) whose last chunk did not end its line.
"""
_partial("ix_members_held", members.c.node_id, members.c.task_id, where="holding = 1")

usage = Table(
    "usage",
    metadata,
    _text("kind", primary_key=True),
    _int("id", primary_key=True),
    _int("value"),
    _int("at"),
)
"""Decayed usage of users and teams in billionths of the pool at time `at`, kept over a restart."""

node_records = Table(
    "node_records",
    metadata,
    _int("node_id", primary_key=True),
    _counter("up_us"),
    _counter("losses"),
    _int("at"),
)
"""Decayed uptime of each node and losses with leases (in thousandths), at time `at`."""

# ---- login methods

wallets = Table(
    "wallets",
    metadata,
    _text("address", primary_key=True),
    _int("user_id"),
    _int("linked_at"),
    _counter("payout"),
    Index("ix_wallets_user_id", "user_id"),
)

oidc_identities = Table(
    "oidc_identities",
    metadata,
    _text("issuer", primary_key=True),
    _text("subject", primary_key=True),
    _int("user_id"),
    Index("ix_oidc_identities_user_id", "user_id"),
)

sign_in_nonces = Table(
    "sign_in_nonces",
    metadata,
    _text("nonce", primary_key=True),
    _int("expires_at"),
    _note("purpose"),
    Index("ix_sign_in_nonces_expires_at", "expires_at"),
)

user_invites = Table(
    "user_invites",
    metadata,
    _text("hashed", primary_key=True),
    _int("made_by"),
    _text("permissions"),
    _maybe("team_id"),
    _words("role"),
    _int("expires_at"),
    _int("created_at"),
    _maybe("used_at"),
    _maybe("used_by"),
)

signing_keys = Table(
    "signing_keys",
    metadata,
    _text("kid", primary_key=True),
    _bytes("sealed", nullable=True),
    _text("public"),
    _int("created_at"),
    _int("signs_from"),
    _maybe("verifies_until"),
)
"""`sealed` is NULL once the key only verifies."""

sessions = Table(
    "sessions",
    metadata,
    _text("id", primary_key=True),
    _int("user_id"),
    _bytes("seed_sealed"),
    _int("generation"),
    _int("rotated_at"),
    _int("idle_until"),
    _int("created_at"),
    _int("expires_at"),
    _maybe("ended_at"),
    _words("ended_why"),
    _note("label"),
    Index("ix_sessions_idle_until", "idle_until"),
)
_partial("ix_sessions_live", sessions.c.user_id, where="ended_at IS NULL")

# ---- teams and quotas

teams = Table(
    "teams",
    metadata,
    _id(),
    _text("name"),
    _int("created_at"),
    UniqueConstraint("name"),
)

team_names = Table(
    "team_names",
    metadata,
    _text("name", primary_key=True),
    _int("team_id"),
)
"""Every name that a team has or had, of deleted teams too: no other team gets it."""

memberships = Table(
    "memberships",
    metadata,
    _int("team_id", primary_key=True),
    _int("user_id", primary_key=True),
    _text("role"),
    _int("since"),
    Index("ix_memberships_user_id", "user_id"),
)

team_invitations = Table(
    "team_invitations",
    metadata,
    _int("team_id", primary_key=True),
    _text("invitee", primary_key=True),
    _maybe("user_id"),
    _text("role"),
    _int("made_by"),
    _int("created_at"),
    _int("expires_at"),
    Index("ix_team_invitations_user_id", "user_id"),
)
"""Invitations that wait for the invited user's consent. `invitee`: name or id as the owner wrote it; `user_id` is NULL
if no account has it, so that owners cannot tell names that exist from others."""

quotas = Table(
    "quotas",
    metadata,
    _text("kind", primary_key=True),
    _int("id", primary_key=True),
    _maybe("running_gpu_milli"),
    _maybe("queued_tasks"),
    _maybe("storage_bytes"),
    _maybe("guaranteed_gpu_milli"),
)

stored = Table(
    "stored",
    metadata,
    _text("kind", primary_key=True),
    _int("id", primary_key=True),
    _text("sha256", primary_key=True),
    Index("ix_stored_sha256", "sha256"),
)
"""Users and teams that an artifact counts for, once however often they refer to it."""

storage = Table(
    "storage",
    metadata,
    _text("kind", primary_key=True),
    _int("id", primary_key=True),
    _int("shard", primary_key=True),
    _int("size_bytes"),
)
"""Bytes charged to a user or team: the artifacts of `stored`, the rows' `stored_bytes`, and `uploads`; in shards so that
concurrent writers do not wait for each other."""

uploads = Table(
    "uploads",
    metadata,
    _text("uploader", primary_key=True),
    _text("sha256", primary_key=True),
    _int("number", primary_key=True),
    _text("kind"),
    _int("account"),
    _int("size_bytes"),
    _int("at"),
    Index("ix_uploads_at", "at"),
)
"""Room reserved for uploads in progress. `number` 0: an upload in parts, else one request."""

# ---- audit log, secrets, bindings

audit = Table(
    "audit",
    metadata,
    _int("number", primary_key=True),
    _int("at"),
    _text("actor"),
    _text("action"),
    _text("thing"),
    _text("outcome"),
    _text("address"),
    _text("facts"),
    _bytes("hash"),
)

audit_head = Table(
    "audit_head",
    metadata,
    _id(),
    _int("number"),
    _bytes("hash", nullable=True),
)
"""One row, locked by an append, so that numbers have no gaps. No hash while the log is empty."""

data_keys = Table(
    "data_keys",
    metadata,
    _text("id", primary_key=True),
    _bytes("wrapped"),
    _int("created_at"),
    _maybe("retired_at"),
)

task_secrets = Table(
    "task_secrets",
    metadata,
    _int("spec_id", primary_key=True),
    _text("name", primary_key=True),
    _bytes("sealed"),
)

gpu_bindings = Table(
    "gpu_bindings",
    metadata,
    _text("uuid", primary_key=True),
    _int("owner_id"),
    _words("wallet"),
    _int("bound_at"),
    _maybe("settled_at"),
)
