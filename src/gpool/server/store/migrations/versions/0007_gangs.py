"""Gangs and members; recent usage and guarantees of accounts; reliability of nodes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _int(name: str) -> sa.Column[int]:
    return sa.Column(name, BIG, autoincrement=False, nullable=False)


def _maybe(name: str) -> sa.Column[int]:
    return sa.Column(name, BIG, nullable=True)


def _counter(name: str) -> sa.Column[int]:
    return sa.Column(name, BIG, server_default=sa.text("0"), nullable=False)


def _note(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), server_default=sa.text("''"), nullable=False)


def upgrade() -> None:
    op.create_table(
        "gangs",
        _int("task_id"),
        _int("epoch"),
        sa.Column("secret_sealed", sa.LargeBinary(), nullable=False),
        _counter("logged"),
        sa.PrimaryKeyConstraint("task_id", name=op.f("pk_gangs")),
    )
    op.create_table(
        "members",
        _int("task_id"),
        _int("rank"),
        _int("epoch"),
        _int("node_id"),
        _int("allocation_number"),
        sa.Column("allocation", sa.Text(), nullable=False),
        _note("host"),
        _counter("port"),
        _counter("holding"),
        _maybe("started_at"),
        _maybe("ended_at"),
        _maybe("place"),
        sa.Column("reason", sa.Text(), nullable=True),
        _maybe("exit_code"),
        _note("detail"),
        _counter("duration_us"),
        sa.Column("outputs", sa.Text(), nullable=True),
        _counter("logged"),
        _counter("mid_line"),
        sa.PrimaryKeyConstraint("task_id", "rank", name=op.f("pk_members")),
    )
    op.create_index(
        "ix_members_held",
        "members",
        ["node_id", "task_id"],
        sqlite_where=sa.text("holding = 1"),
        postgresql_where=sa.text("holding = 1"),
    )
    op.create_table(
        "usage",
        sa.Column("kind", sa.Text(), nullable=False),
        _int("id"),
        _int("value"),
        _int("at"),
        sa.PrimaryKeyConstraint("kind", "id", name=op.f("pk_usage")),
    )
    op.create_table(
        "node_records",
        _int("node_id"),
        _counter("up_us"),
        _counter("losses"),
        _int("at"),
        sa.PrimaryKeyConstraint("node_id", name=op.f("pk_node_records")),
    )
    op.add_column("quotas", _maybe("guaranteed_gpu_milli"))
