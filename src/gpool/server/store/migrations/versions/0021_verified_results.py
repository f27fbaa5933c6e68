"""Verified results: siblings of tasks, failed checks, standing and passed checks of nodes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def number(name: str, *, nullable: bool = False, default: str | None = None) -> sa.Column[int]:
    return sa.Column(
        name,
        BIG,
        autoincrement=False,
        nullable=nullable,
        server_default=None if default is None else sa.text(default),
    )


def words(name: str, *, nullable: bool = False, default: str | None = None) -> sa.Column[str]:
    given = None if default is None else sa.text(default)
    return sa.Column(name, sa.Text(), nullable=nullable, server_default=given)


def partial(name: str, table: str, columns: list[str], where: str, *, unique: bool = False) -> None:
    op.create_index(
        name,
        table,
        columns,
        unique=unique,
        sqlite_where=sa.text(where),
        postgresql_where=sa.text(where),
    )


def upgrade() -> None:
    op.add_column("tasks", sa.Column("parent_id", BIG, nullable=True))
    partial("ix_tasks_parent_id", "tasks", ["parent_id"], "parent_id IS NOT NULL")
    op.create_table(
        "verifications",
        number("task_id"),
        number("user_id"),
        number("siblings"),
        number("decided_at", nullable=True),
        words("outcome", default="''"),
        number("rerun_id", nullable=True),
        sa.PrimaryKeyConstraint("task_id", name="pk_verifications"),
    )
    partial("ix_verifications_open", "verifications", ["user_id", "task_id"], "decided_at IS NULL")
    partial(
        "ix_verifications_withdrawn",
        "verifications",
        ["task_id"],
        "outcome = 'withdrawn' AND rerun_id IS NULL",
    )
    op.create_table(
        "siblings",
        number("task_id"),
        number("parent_id"),
        number("number"),
        number("node_id"),
        number("owner_id"),
        words("state"),
        words("digest", nullable=True),
        sa.PrimaryKeyConstraint("task_id", name="pk_siblings"),
    )
    op.create_index(
        "ix_siblings_parent_id_number", "siblings", ["parent_id", "number"], unique=True
    )
    partial(
        "ix_siblings_owner", "siblings", ["parent_id", "owner_id"], "state <> 'void'", unique=True
    )
    partial("ix_siblings_unchecked", "siblings", ["node_id"], "state = 'unchecked'")
    op.create_table(
        "failed_checks",
        number("task_id"),
        number("node_id"),
        number("at"),
        words("wanted"),
        words("found"),
        sa.PrimaryKeyConstraint("task_id", name="pk_failed_checks"),
    )
    op.create_index("ix_failed_checks_node_id_at", "failed_checks", ["node_id", "at"])
    op.create_table(
        "standings",
        number("node_id"),
        number("suspicion", default="0"),
        number("as_sibling", default="0"),
        number("offences", default="0"),
        number("banned_until", default="0"),
        number("last_start", nullable=True),
        number("changed_at"),
        sa.PrimaryKeyConstraint("node_id", name="pk_standings"),
    )
    op.create_table(
        "check_records",
        number("node_id"),
        words("model"),
        words("environment"),
        number("passed", default="0"),
        sa.PrimaryKeyConstraint("node_id", "model", "environment", name="pk_check_records"),
    )
