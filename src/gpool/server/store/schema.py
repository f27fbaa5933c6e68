"""The tables, as SQLAlchemy metadata for migrations, their test and `row_generator`. Operations use SQL text.

A task's row is written three times: submitted, leased, ended. Listings use (user, id). Partial indexes hold queued and
held tasks, so that a million ended rows cost the scheduler nothing; those of teams are separate. Batch results use
(batch, sequence). No foreign keys: operations guard their writes. One file because tasks, leases and nodes refer to each other; accounts are in `identity_schema`.
"""

from __future__ import annotations

from sqlalchemy import (
    Column,
    Index,
    LargeBinary,
    Table,
    Text,
    UniqueConstraint,
    text,
)

from gpool.server.store.schema_columns import (
    BIG,
    bytes_column,
    counter,
    id_column,
    int_column,
    maybe_int,
    maybe_text,
    metadata,
    note,
    partial_index,
    text_column,
)

users = Table(
    "users",
    metadata,
    id_column(),
    text_column("name"),
    text_column("permissions"),
    int_column("created_at"),
    maybe_text("password_hash"),
    maybe_int("disabled_at"),
    maybe_int("deleted_at"),
    UniqueConstraint("name"),
)
"""`deleted_at`: the account is gone; the row stays until the loop `retention` has deleted its tasks."""

api_keys = Table(
    "api_keys",
    metadata,
    id_column(),
    int_column("user_id"),
    text_column("name"),
    text_column("hashed"),
    int_column("created_at"),
    maybe_text("scopes"),
    maybe_int("expires_at"),
    maybe_int("ended_at"),
    maybe_int("last_used_at"),
    maybe_int("team_id"),
    UniqueConstraint("hashed"),
    Index("ix_api_keys_user_id_id", "user_id", "id"),
)

invites = Table(
    "invites",
    metadata,
    text_column("hashed", primary_key=True),
    int_column("owner_id"),
    int_column("expires_at"),
    int_column("created_at"),
    maybe_int("used_at"),
    maybe_int("node_id"),
)

nodes = Table(
    "nodes",
    metadata,
    id_column(),
    int_column("owner_id"),
    text_column("name"),
    text_column("secret_hash"),
    text_column("offer"),
    text_column("availability"),
    maybe_int("availability_at"),
    maybe_int("last_beat_at"),
    int_column("created_at"),
    maybe_text("public_key"),
    UniqueConstraint("owner_id", "name"),
    UniqueConstraint("secret_hash"),
    Index("ix_nodes_public_key", "public_key", unique=True),
)

gpus = Table(
    "gpus",
    metadata,
    id_column(),
    int_column("node_id"),
    text_column("uuid"),
    int_column("position"),
    Column("available", BIG, nullable=False, server_default=text("1")),
    counter("gone"),
    maybe_text("flagged"),
    maybe_text("quarantined"),
    maybe_text("unproven"),
    maybe_text("verdict"),
    maybe_int("judged_at"),
    maybe_text("measured"),
    UniqueConstraint("node_id", "uuid"),
    Index("ix_gpus_uuid", "uuid"),
)

specs = Table(
    "specs",
    metadata,
    id_column(),
    int_column("user_id"),
    text_column("digest"),
    text_column("body"),
    int_column("retries"),
    int_column("created_at"),
    counter("stored_bytes"),
    note("project"),
    UniqueConstraint("user_id", "digest"),
)
"""`project`: label of the account for its statements; empty: none. `stored_bytes` (here and below): bytes charged to the owner's storage for the row and its inline data."""

batches = Table(
    "batches",
    metadata,
    id_column(),
    int_column("user_id"),
    text_column("name"),
    counter("total"),
    counter("done"),
    counter("closed"),
    int_column("created_at"),
    maybe_int("team_id"),
)

tasks = Table(
    "tasks",
    metadata,
    id_column(),
    int_column("batch_id"),
    int_column("position"),
    int_column("spec_id"),
    int_column("user_id"),
    text_column("status"),
    counter("epoch"),
    int_column("created_at"),
    maybe_int("queued_at"),
    maybe_int("node_id"),
    counter("holding"),
    maybe_int("allocation_number"),
    Column("allocation", Text),
    maybe_int("leased_at"),
    maybe_int("started_at"),
    maybe_int("finished_at"),
    Column("reason", Text),
    maybe_int("exit_code"),
    counter("tries"),
    counter("losses"),
    maybe_int("sequence"),
    Column("error_text", Text),
    note("payload_sha256"),
    note("value_sha256"),
    note("log_sha256"),
    Column("outputs", Text),
    Column("payload", LargeBinary),
    Column("value", LargeBinary),
    maybe_int("team_id"),
    counter("stored_bytes"),
    maybe_int("shrunk_at"),
    maybe_int("max_cost"),
    Column("settlement", Text, nullable=False, server_default=text("'end'")),
    counter("metered"),
    maybe_int("parent_id"),
    Column("progress", Text),
    Index("ix_tasks_spec_id", "spec_id"),
)
"""`shrunk_at`: when arguments, results, log and checkpoint expired; the summary stays. `max_cost`: micro-credits of all
attempts together. `settlement`: `end`, or `verdict`: charges are held until its result is accepted. `metered`: 1 if its
last lease is on an allocation with a meter, 2 if only an earlier one was. `parent_id`: the verified task of which this
is a sibling; users see the parent only. `progress`: `core.specs.progress.stored_text` of what it last reported."""
partial_index("ix_tasks_user_id_id", tasks.c.user_id, tasks.c.id, where="team_id IS NULL")
partial_index("ix_tasks_queued", tasks.c.user_id, tasks.c.id, where="status = 'queued'")
partial_index("ix_tasks_held", tasks.c.node_id, tasks.c.user_id, where="holding = 1")
partial_index("ix_tasks_results", tasks.c.batch_id, tasks.c.sequence, where="sequence IS NOT NULL")
partial_index("ix_tasks_team_id_id", tasks.c.team_id, tasks.c.id, where="team_id IS NOT NULL")
partial_index(
    "ix_tasks_team_queued",
    tasks.c.team_id,
    tasks.c.status,  # constant; SQLite's planner, which has no statistics, then prefers this index
    tasks.c.id,
    where="team_id IS NOT NULL AND status = 'queued'",
)
partial_index(
    "ix_tasks_team_held",
    tasks.c.team_id,
    tasks.c.holding,
    tasks.c.id,
    where="team_id IS NOT NULL AND holding = 1",
)
partial_index(
    "ix_tasks_whole", tasks.c.finished_at, where="finished_at IS NOT NULL AND shrunk_at IS NULL"
)
partial_index(
    "ix_tasks_capped", tasks.c.node_id, where="holding = 1 AND metered = 1 AND max_cost IS NOT NULL"
)
partial_index("ix_tasks_shrunk", tasks.c.finished_at, where="shrunk_at IS NOT NULL")
partial_index("ix_tasks_parent_id", tasks.c.parent_id, where="parent_id IS NOT NULL")

attempts = Table(
    "attempts",
    metadata,
    int_column("task_id", primary_key=True),
    int_column("epoch", primary_key=True),
    int_column("node_id"),
    int_column("leased_at"),
    maybe_int("started_at"),
    int_column("ended_at"),
    text_column("reason"),
    note("detail"),
)

attempt_notes = Table(
    "attempt_notes",
    metadata,
    int_column("task_id", primary_key=True),
    int_column("epoch", primary_key=True),
    text_column("note", primary_key=True),
    int_column("at"),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    int_column("task_id", primary_key=True),
    int_column("epoch"),
    int_column("saved_at"),
    int_column("size_bytes"),
    int_column("files"),
    text_column("manifest"),
    counter("stored_bytes"),
)

log_heads = Table(
    "log_heads",
    metadata,
    int_column("task_id", primary_key=True),
    int_column("size_bytes"),
    counter("truncated"),
    counter("stored_bytes"),
)

log_chunks = Table(
    "log_chunks",
    metadata,
    int_column("task_id", primary_key=True),
    int_column("cursor", primary_key=True),
    int_column("stream"),
    Column("data", LargeBinary, nullable=False),
)

artifacts = Table(
    "artifacts",
    metadata,
    text_column("sha256", primary_key=True),
    int_column("size_bytes"),
    int_column("touched_at"),
    note("object"),
    bytes_column("key_sealed", nullable=True),
)
"""`object`: key of the stored bytes, in the object store if it contains `/`; empty: in the folder, under the hash. It
never changes while the row exists. `key_sealed`: key of the encrypted bytes, sealed for an account; NULL: plain bytes.
"""

artifact_refs = Table(
    "artifact_refs",
    metadata,
    text_column("sha256", primary_key=True),
    text_column("kind", primary_key=True),
    int_column("holder", primary_key=True),
    int_column("user_id"),
    counter("epoch"),
    maybe_int("team_id"),
    Index("ix_artifact_refs_holder_kind", "holder", "kind"),
)

idempotency = Table(
    "idempotency",
    metadata,
    int_column("user_id", primary_key=True),
    text_column("key", primary_key=True),
    text_column("fingerprint"),
    Column("answer", LargeBinary, nullable=False),
    int_column("created_at"),
    Index("ix_idempotency_created_at", "created_at"),
)

scheduler_term = Table(
    "scheduler_term",
    metadata,
    id_column(),
    int_column("term"),
    int_column("taken_at"),
)

rules = Table(
    "rules",
    metadata,
    text_column("kind", primary_key=True),
    int_column("id", primary_key=True),
    text_column("value"),
    int_column("changed_at"),
)

gangs = Table(
    "gangs",
    metadata,
    int_column("task_id", primary_key=True),
    int_column("epoch"),
    bytes_column("secret_sealed"),
    counter("logged"),
    note("link"),
)
"""Gangs that hold allocations, with the secret that their members share. The task's own row has `holding` and no node.

`logged`: number of chunks of all members in the task's log. `link`: a `GangLink`; empty in rows of older servers: relay.
"""

members = Table(
    "members",
    metadata,
    int_column("task_id", primary_key=True),
    int_column("rank", primary_key=True),
    int_column("epoch"),
    int_column("node_id"),
    int_column("allocation_number"),
    text_column("allocation"),
    note("host"),
    counter("port"),
    counter("holding"),
    maybe_int("started_at"),
    maybe_int("ended_at"),
    maybe_int("place"),
    maybe_text("reason"),
    maybe_int("exit_code"),
    note("detail"),
    counter("duration_us"),
    maybe_text("outputs"),
    counter("logged"),
    counter("mid_line"),
)
"""Members of the last lease of each gang, kept after its end for views and for repeated reports.

`host`, `port`: address offered by its node at the grant. `place`: order among the ends of the gang's members.
`logged`: sequence of the next chunk of its output; `mid_line`: streams (bits 1, 2) whose last chunk did not end its line.
"""
partial_index("ix_members_held", members.c.node_id, members.c.task_id, where="holding = 1")

usage = Table(
    "usage",
    metadata,
    text_column("kind", primary_key=True),
    int_column("id", primary_key=True),
    int_column("value"),
    int_column("at"),
)
"""Decayed usage of users and teams in billionths of the pool at time `at`, kept over a restart."""

node_records = Table(
    "node_records",
    metadata,
    int_column("node_id", primary_key=True),
    counter("up_us"),
    counter("losses"),
    int_column("at"),
)
"""Decayed uptime of each node and losses with leases (in thousandths), at time `at`."""

replicas = Table(
    "replicas",
    metadata,
    id_column(),
    int_column("slot"),
    text_column("address"),
    text_column("version"),
    int_column("started_at"),
    int_column("heard_at"),
    maybe_int("lock_pid"),
    counter("term"),
    counter("draining"),
    UniqueConstraint("slot"),
)
"""Server processes on a PostgreSQL database. `heard_at`: by the database's clock; `lock_pid`: database session of its
leadership lock; `term`: taken by a leader, else 0; `slot`: its part of the counter in ids; `draining`: 1 if it stops
and no node should connect to it."""

node_connections = Table(
    "node_connections",
    metadata,
    int_column("node_id", primary_key=True),
    maybe_int("replica_id"),
    text_column("boot"),
    int_column("beat"),
    int_column("connected_at"),
    Index("ix_node_connections_replica_id", "replica_id"),
)
"""The replica that has each node's connection (NULL: none), and the newest `Hello`. Not written on SQLite."""

changes = Table(
    "changes",
    metadata,
    int_column("xid", primary_key=True),
    int_column("at"),
    int_column("replica_id"),
    bytes_column("ids"),
    Index("ix_changes_at", "at"),
)
"""Change feed: ids (8 bytes each) that a transaction changed, written by triggers of PostgreSQL. Not written on SQLite."""

readings = Table(
    "readings",
    metadata,
    int_column("replica_id", primary_key=True),
    int_column("number", primary_key=True),
    int_column("at"),
    bytes_column("body"),
    Index("ix_readings_at", "at"),
)
"""Readings of GPUs and tasks that a replica heard in a few seconds, for the other ones. Not written on SQLite."""

used_proofs = Table(
    "used_proofs",
    metadata,
    text_column("key", primary_key=True),
    text_column("nonce", primary_key=True),
    int_column("expires_at"),
    Index("ix_used_proofs_expires_at", "expires_at"),
)
"""Proofs of nodes' requests that a replica has accepted, so that no other one accepts them. Not written on SQLite."""

server_secrets = Table(
    "server_secrets",
    metadata,
    text_column("name", primary_key=True),
    bytes_column("sealed"),
)
"""Secrets that all replicas share, encrypted: `root`, from which names and keys of nodes' tokens derive. Not on SQLite."""

# ---- the ledger

ledger_accounts = Table(
    "ledger_accounts",
    metadata,
    id_column(),
    text_column("kind"),
    counter("balance"),
    counter("sequence"),
)
"""Accounts in micro-credits. `sequence`: of the last entry. Ids are opaque: `ledger_holders` maps them to people."""

ledger_holders = Table(
    "ledger_holders",
    metadata,
    text_column("kind", primary_key=True),
    int_column("id", primary_key=True),
    text_column("purpose", primary_key=True),
    int_column("account_id"),
    Index("ix_ledger_holders_account_id", "account_id"),
)
"""The user or team of an account; deleted with it. `purpose`: kind of the account."""

ledger_transfers = Table(
    "ledger_transfers",
    metadata,
    text_column("id", primary_key=True),
    text_column("kind"),
    int_column("at"),
    text_column("digest"),
    maybe_text("refers_to"),
    maybe_int("block"),
    maybe_int("leaf"),
)
"""`digest`: of the request. `refers_to`: pending transfer that it resolves, or charge that it refunds. `block`, `leaf`:
its place in the sealed blocks; NULL until the loop `ledger` has sealed it."""
Index(
    "ix_ledger_transfers_block_leaf",
    ledger_transfers.c.block,
    ledger_transfers.c.leaf,
    unique=True,
    sqlite_where=text("block IS NOT NULL"),
    postgresql_where=text("block IS NOT NULL"),
)
partial_index(
    "ix_ledger_transfers_unsealed",
    ledger_transfers.c.at,
    ledger_transfers.c.id,
    where="block IS NULL",
)
partial_index(
    "ix_ledger_transfers_returns",
    ledger_transfers.c.refers_to,
    where="kind IN ('refund', 'forfeit')",
)
Index(
    "ix_ledger_transfers_resolution",
    ledger_transfers.c.refers_to,
    unique=True,  # a pending transfer is resolved at most once
    sqlite_where=text("kind IN ('post', 'void', 'expire')"),
    postgresql_where=text("kind IN ('post', 'void', 'expire')"),
)

ledger_entries = Table(
    "ledger_entries",
    metadata,
    int_column("account_id", primary_key=True),
    int_column("sequence", primary_key=True),
    text_column("transfer_id"),
    int_column("amount"),
    int_column("balance"),
    Index("ix_ledger_entries_transfer_id", "transfer_id"),
)
"""Append-only. `balance`: of the account after the entry."""

pending_transfers = Table(
    "pending_transfers",
    metadata,
    text_column("id", primary_key=True),
    int_column("payer_id"),
    int_column("account_id"),
    int_column("amount"),
    int_column("month"),
    int_column("expires_at"),
    maybe_text("resolved_by"),
    counter("returned"),
    Index("ix_pending_transfers_payer_id_month", "payer_id", "month"),
)
"""Funds set aside. `resolved_by`: the transfer that posted, voided or expired it; NULL: open."""
partial_index(
    "ix_pending_transfers_open",
    pending_transfers.c.expires_at,
    pending_transfers.c.id,
    where="resolved_by IS NULL",
)

ledger_blocks = Table(
    "ledger_blocks",
    metadata,
    int_column("number", primary_key=True),
    text_column("previous"),
    text_column("root"),
    int_column("transfers"),
    int_column("sealed_at"),
    text_column("hash"),
)

ledger_spending = Table(
    "ledger_spending",
    metadata,
    int_column("account_id", primary_key=True),
    int_column("month", primary_key=True),
    int_column("amount"),
)
"""Set aside by each payer in a month (year x 12 + month - 1), less what returned."""

budgets = Table(
    "budgets",
    metadata,
    int_column("account_id", primary_key=True),
    int_column("cap"),
    int_column("changed_at"),
)
"""Cap of a payer's spending in each month."""
