"""The first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "api_keys",
        sa.Column("id", BIG, autoincrement=False, nullable=False),
        sa.Column("user_id", BIG, autoincrement=False, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("hashed", sa.Text(), nullable=False),
        sa.Column("created_at", BIG, autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("hashed", name=op.f("uq_api_keys_hashed")),
    )
    op.create_table(
        "artifact_refs",
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("holder", BIG, autoincrement=False, nullable=False),
        sa.Column("user_id", BIG, autoincrement=False, nullable=False),
        sa.Column("epoch", BIG, server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("sha256", "kind", "holder", name=op.f("pk_artifact_refs")),
    )
    op.create_table(
        "artifacts",
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("size_bytes", BIG, autoincrement=False, nullable=False),
        sa.Column("touched_at", BIG, autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("sha256", name=op.f("pk_artifacts")),
    )
    op.create_table(
        "attempts",
        sa.Column("task_id", BIG, autoincrement=False, nullable=False),
        sa.Column("epoch", BIG, autoincrement=False, nullable=False),
        sa.Column("node_id", BIG, autoincrement=False, nullable=False),
        sa.Column("leased_at", BIG, autoincrement=False, nullable=False),
        sa.Column("started_at", BIG, nullable=True),
        sa.Column("ended_at", BIG, autoincrement=False, nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.PrimaryKeyConstraint("task_id", "epoch", name=op.f("pk_attempts")),
    )
    op.create_table(
        "batches",
        sa.Column("id", BIG, autoincrement=False, nullable=False),
        sa.Column("user_id", BIG, autoincrement=False, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("total", BIG, server_default=sa.text("0"), nullable=False),
        sa.Column("done", BIG, server_default=sa.text("0"), nullable=False),
        sa.Column("closed", BIG, server_default=sa.text("0"), nullable=False),
        sa.Column("created_at", BIG, autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batches")),
    )
    op.create_table(
        "gpus",
        sa.Column("id", BIG, autoincrement=False, nullable=False),
        sa.Column("node_id", BIG, autoincrement=False, nullable=False),
        sa.Column("uuid", sa.Text(), nullable=False),
        sa.Column("position", BIG, autoincrement=False, nullable=False),
        sa.Column("available", BIG, server_default=sa.text("1"), nullable=False),
        sa.Column("gone", BIG, server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gpus")),
        sa.UniqueConstraint("node_id", "uuid", name=op.f("uq_gpus_node_id_uuid")),
    )
    op.create_table(
        "idempotency",
        sa.Column("user_id", BIG, autoincrement=False, nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("answer", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", BIG, autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("user_id", "key", name=op.f("pk_idempotency")),
    )
    op.create_index("ix_idempotency_created_at", "idempotency", ["created_at"], unique=False)
    op.create_table(
        "invites",
        sa.Column("hashed", sa.Text(), nullable=False),
        sa.Column("owner_id", BIG, autoincrement=False, nullable=False),
        sa.Column("expires_at", BIG, autoincrement=False, nullable=False),
        sa.Column("created_at", BIG, autoincrement=False, nullable=False),
        sa.Column("used_at", BIG, nullable=True),
        sa.Column("node_id", BIG, nullable=True),
        sa.PrimaryKeyConstraint("hashed", name=op.f("pk_invites")),
    )
    op.create_table(
        "log_chunks",
        sa.Column("task_id", BIG, autoincrement=False, nullable=False),
        sa.Column("cursor", BIG, autoincrement=False, nullable=False),
        sa.Column("stream", BIG, autoincrement=False, nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("task_id", "cursor", name=op.f("pk_log_chunks")),
    )
    op.create_table(
        "log_heads",
        sa.Column("task_id", BIG, autoincrement=False, nullable=False),
        sa.Column("size_bytes", BIG, autoincrement=False, nullable=False),
        sa.Column("truncated", BIG, server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("task_id", name=op.f("pk_log_heads")),
    )
    op.create_table(
        "nodes",
        sa.Column("id", BIG, autoincrement=False, nullable=False),
        sa.Column("owner_id", BIG, autoincrement=False, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("secret_hash", sa.Text(), nullable=False),
        sa.Column("offer", sa.Text(), nullable=False),
        sa.Column("availability", sa.Text(), nullable=False),
        sa.Column("availability_at", BIG, nullable=True),
        sa.Column("last_beat_at", BIG, nullable=True),
        sa.Column("created_at", BIG, autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_nodes")),
        sa.UniqueConstraint("owner_id", "name", name=op.f("uq_nodes_owner_id_name")),
        sa.UniqueConstraint("secret_hash", name=op.f("uq_nodes_secret_hash")),
    )
    op.create_table(
        "scheduler_term",
        sa.Column("id", BIG, autoincrement=False, nullable=False),
        sa.Column("term", BIG, autoincrement=False, nullable=False),
        sa.Column("taken_at", BIG, autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_scheduler_term")),
    )
    op.create_table(
        "specs",
        sa.Column("id", BIG, autoincrement=False, nullable=False),
        sa.Column("user_id", BIG, autoincrement=False, nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("retries", BIG, autoincrement=False, nullable=False),
        sa.Column("created_at", BIG, autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_specs")),
        sa.UniqueConstraint("user_id", "digest", name=op.f("uq_specs_user_id_digest")),
    )
    op.create_table(
        "tasks",
        sa.Column("id", BIG, autoincrement=False, nullable=False),
        sa.Column("batch_id", BIG, autoincrement=False, nullable=False),
        sa.Column("position", BIG, autoincrement=False, nullable=False),
        sa.Column("spec_id", BIG, autoincrement=False, nullable=False),
        sa.Column("user_id", BIG, autoincrement=False, nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("epoch", BIG, server_default=sa.text("0"), nullable=False),
        sa.Column("created_at", BIG, autoincrement=False, nullable=False),
        sa.Column("queued_at", BIG, nullable=True),
        sa.Column("node_id", BIG, nullable=True),
        sa.Column("holding", BIG, server_default=sa.text("0"), nullable=False),
        sa.Column("allocation_number", BIG, nullable=True),
        sa.Column("allocation", sa.Text(), nullable=True),
        sa.Column("leased_at", BIG, nullable=True),
        sa.Column("started_at", BIG, nullable=True),
        sa.Column("finished_at", BIG, nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("exit_code", BIG, nullable=True),
        sa.Column("tries", BIG, server_default=sa.text("0"), nullable=False),
        sa.Column("losses", BIG, server_default=sa.text("0"), nullable=False),
        sa.Column("sequence", BIG, nullable=True),
        sa.Column("error_text", sa.Text(), nullable=True),
        sa.Column("payload_sha256", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("value_sha256", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("log_sha256", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("outputs", sa.Text(), nullable=True),
        sa.Column("payload", sa.LargeBinary(), nullable=True),
        sa.Column("value", sa.LargeBinary(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tasks")),
    )
    op.create_index(
        "ix_tasks_held",
        "tasks",
        ["node_id"],
        unique=False,
        sqlite_where=sa.text("holding = 1"),
        postgresql_where=sa.text("holding = 1"),
    )
    op.create_index(
        "ix_tasks_queued",
        "tasks",
        ["user_id", "id"],
        unique=False,
        sqlite_where=sa.text("status = 'queued'"),
        postgresql_where=sa.text("status = 'queued'"),
    )
    op.create_index(
        "ix_tasks_results",
        "tasks",
        ["batch_id", "sequence"],
        unique=False,
        sqlite_where=sa.text("sequence IS NOT NULL"),
        postgresql_where=sa.text("sequence IS NOT NULL"),
    )
    op.create_index("ix_tasks_user_id_id", "tasks", ["user_id", "id"], unique=False)
    op.create_table(
        "users",
        sa.Column("id", BIG, autoincrement=False, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("permissions", sa.Text(), nullable=False),
        sa.Column("created_at", BIG, autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_users")),
        sa.UniqueConstraint("name", name=op.f("uq_users_name")),
    )
