"""Login methods, sessions, teams, quotas, audit log, secrets, node keys and GPU bindings.

Old rows get empty new columns; old artifacts count for the accounts that refer to them.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    new_tables()
    new_columns()
    old_rows()


def new_tables() -> None:
    op.create_table(
        "audit",
        sa.Column("number", BIG, autoincrement=False, nullable=False),
        sa.Column("at", BIG, autoincrement=False, nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("thing", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("facts", sa.Text(), nullable=False),
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_audit")),
    )
    op.create_table(
        "audit_head",
        sa.Column("id", BIG, autoincrement=False, nullable=False),
        sa.Column("number", BIG, autoincrement=False, nullable=False),
        sa.Column("hash", sa.LargeBinary(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_head")),
    )
    op.create_table(
        "data_keys",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("wrapped", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", BIG, autoincrement=False, nullable=False),
        sa.Column("retired_at", BIG, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_data_keys")),
    )
    op.create_table(
        "gpu_bindings",
        sa.Column("uuid", sa.Text(), nullable=False),
        sa.Column("owner_id", BIG, autoincrement=False, nullable=False),
        sa.Column("wallet", sa.Text(), nullable=True),
        sa.Column("bound_at", BIG, autoincrement=False, nullable=False),
        sa.Column("settled_at", BIG, nullable=True),
        sa.PrimaryKeyConstraint("uuid", name=op.f("pk_gpu_bindings")),
    )
    op.create_table(
        "memberships",
        sa.Column("team_id", BIG, autoincrement=False, nullable=False),
        sa.Column("user_id", BIG, autoincrement=False, nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("since", BIG, autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("team_id", "user_id", name=op.f("pk_memberships")),
    )
    op.create_index("ix_memberships_user_id", "memberships", ["user_id"], unique=False)
    op.create_table(
        "oidc_identities",
        sa.Column("issuer", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("user_id", BIG, autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("issuer", "subject", name=op.f("pk_oidc_identities")),
    )
    op.create_index("ix_oidc_identities_user_id", "oidc_identities", ["user_id"], unique=False)
    op.create_table(
        "quotas",
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("id", BIG, autoincrement=False, nullable=False),
        sa.Column("running_gpu_milli", BIG, nullable=True),
        sa.Column("queued_tasks", BIG, nullable=True),
        sa.Column("storage_bytes", BIG, nullable=True),
        sa.PrimaryKeyConstraint("kind", "id", name=op.f("pk_quotas")),
    )
    op.create_table(
        "sessions",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("user_id", BIG, autoincrement=False, nullable=False),
        sa.Column("seed_sealed", sa.LargeBinary(), nullable=False),
        sa.Column("generation", BIG, autoincrement=False, nullable=False),
        sa.Column("rotated_at", BIG, autoincrement=False, nullable=False),
        sa.Column("idle_until", BIG, autoincrement=False, nullable=False),
        sa.Column("created_at", BIG, autoincrement=False, nullable=False),
        sa.Column("expires_at", BIG, autoincrement=False, nullable=False),
        sa.Column("ended_at", BIG, nullable=True),
        sa.Column("ended_why", sa.Text(), nullable=True),
        sa.Column("label", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sessions")),
    )
    op.create_index("ix_sessions_idle_until", "sessions", ["idle_until"], unique=False)
    op.create_index(
        "ix_sessions_live",
        "sessions",
        ["user_id"],
        unique=False,
        sqlite_where=sa.text("ended_at IS NULL"),
        postgresql_where=sa.text("ended_at IS NULL"),
    )
    op.create_table(
        "sign_in_nonces",
        sa.Column("nonce", sa.Text(), nullable=False),
        sa.Column("expires_at", BIG, autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("nonce", name=op.f("pk_sign_in_nonces")),
    )
    op.create_index("ix_sign_in_nonces_expires_at", "sign_in_nonces", ["expires_at"], unique=False)
    op.create_table(
        "signing_keys",
        sa.Column("kid", sa.Text(), nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=True),
        sa.Column("public", sa.Text(), nullable=False),
        sa.Column("created_at", BIG, autoincrement=False, nullable=False),
        sa.Column("signs_from", BIG, autoincrement=False, nullable=False),
        sa.Column("verifies_until", BIG, nullable=True),
        sa.PrimaryKeyConstraint("kid", name=op.f("pk_signing_keys")),
    )
    op.create_table(
        "storage",
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("id", BIG, autoincrement=False, nullable=False),
        sa.Column("shard", BIG, autoincrement=False, nullable=False),
        sa.Column("size_bytes", BIG, autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("kind", "id", "shard", name=op.f("pk_storage")),
    )
    op.create_table(
        "stored",
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("id", BIG, autoincrement=False, nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("kind", "id", "sha256", name=op.f("pk_stored")),
    )
    op.create_index("ix_stored_sha256", "stored", ["sha256"], unique=False)
    op.create_table(
        "task_secrets",
        sa.Column("spec_id", BIG, autoincrement=False, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("spec_id", "name", name=op.f("pk_task_secrets")),
    )
    op.create_table(
        "teams",
        sa.Column("id", BIG, autoincrement=False, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_at", BIG, autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_teams")),
        sa.UniqueConstraint("name", name=op.f("uq_teams_name")),
    )
    op.create_table(
        "user_invites",
        sa.Column("hashed", sa.Text(), nullable=False),
        sa.Column("made_by", BIG, autoincrement=False, nullable=False),
        sa.Column("permissions", sa.Text(), nullable=False),
        sa.Column("team_id", BIG, nullable=True),
        sa.Column("role", sa.Text(), nullable=True),
        sa.Column("expires_at", BIG, autoincrement=False, nullable=False),
        sa.Column("created_at", BIG, autoincrement=False, nullable=False),
        sa.Column("used_at", BIG, nullable=True),
        sa.Column("used_by", BIG, nullable=True),
        sa.PrimaryKeyConstraint("hashed", name=op.f("pk_user_invites")),
    )
    op.create_table(
        "wallets",
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("user_id", BIG, autoincrement=False, nullable=False),
        sa.Column("linked_at", BIG, autoincrement=False, nullable=False),
        sa.Column("payout", BIG, server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("address", name=op.f("pk_wallets")),
    )
    op.create_index("ix_wallets_user_id", "wallets", ["user_id"], unique=False)


def new_columns() -> None:
    op.add_column("api_keys", sa.Column("scopes", sa.Text(), nullable=True))
    op.add_column("api_keys", sa.Column("expires_at", BIG, nullable=True))
    op.add_column("api_keys", sa.Column("ended_at", BIG, nullable=True))
    op.add_column("api_keys", sa.Column("last_used_at", BIG, nullable=True))
    op.add_column("api_keys", sa.Column("team_id", BIG, nullable=True))
    op.create_index("ix_api_keys_user_id_id", "api_keys", ["user_id", "id"], unique=False)
    op.add_column("artifact_refs", sa.Column("team_id", BIG, nullable=True))
    op.add_column("batches", sa.Column("team_id", BIG, nullable=True))
    op.add_column("gpus", sa.Column("flagged", sa.Text(), nullable=True))
    op.create_index("ix_gpus_uuid", "gpus", ["uuid"], unique=False)
    op.add_column("nodes", sa.Column("public_key", sa.Text(), nullable=True))
    op.create_index("ix_nodes_public_key", "nodes", ["public_key"], unique=True)
    op.add_column("tasks", sa.Column("team_id", BIG, nullable=True))
    op.drop_index("ix_tasks_held", "tasks")
    op.create_index(
        "ix_tasks_held",
        "tasks",
        ["node_id", "user_id"],
        unique=False,
        sqlite_where=sa.text("holding = 1"),
        postgresql_where=sa.text("holding = 1"),
    )
    op.create_index(
        "ix_tasks_team_held",
        "tasks",
        ["team_id", "holding", "id"],
        unique=False,
        sqlite_where=sa.text("team_id IS NOT NULL AND holding = 1"),
        postgresql_where=sa.text("team_id IS NOT NULL AND holding = 1"),
    )
    op.create_index(
        "ix_tasks_team_id_id",
        "tasks",
        ["team_id", "id"],
        unique=False,
        sqlite_where=sa.text("team_id IS NOT NULL"),
        postgresql_where=sa.text("team_id IS NOT NULL"),
    )
    op.create_index(
        "ix_tasks_team_queued",
        "tasks",
        ["team_id", "status", "id"],
        unique=False,
        sqlite_where=sa.text("team_id IS NOT NULL AND status = 'queued'"),
        postgresql_where=sa.text("team_id IS NOT NULL AND status = 'queued'"),
    )
    op.add_column("users", sa.Column("password_hash", sa.Text(), nullable=True))
    op.add_column("users", sa.Column("disabled_at", BIG, nullable=True))
    op.drop_index("ix_tasks_user_id_id", "tasks")
    op.create_index(
        "ix_tasks_user_id_id",
        "tasks",
        ["user_id", "id"],
        unique=False,
        sqlite_where=sa.text("team_id IS NULL"),
        postgresql_where=sa.text("team_id IS NULL"),
    )


def old_rows() -> None:
    op.execute("INSERT INTO audit_head (id, number) VALUES (1, 0)")
    op.execute(
        "INSERT INTO stored (kind, id, sha256) SELECT DISTINCT 'user', r.user_id, r.sha256 FROM artifact_refs r "
        "JOIN artifacts a ON a.sha256 = r.sha256 WHERE r.kind <> 'lease'"
    )
    op.execute(
        "INSERT INTO storage (kind, id, shard, size_bytes) SELECT s.kind, s.id, 0, SUM(a.size_bytes) "
        "FROM stored s JOIN artifacts a ON a.sha256 = s.sha256 GROUP BY s.kind, s.id"
    )
