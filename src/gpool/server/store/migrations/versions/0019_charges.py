"""Charges: meters of allocations, charges of leases, totals of use, the cap of a task's cost."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
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


def text(name: str, *, nullable: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=nullable)


def partial(name: str, table: str, columns: list[str], where: str) -> None:
    op.create_index(
        name, table, columns, sqlite_where=sa.text(where), postgresql_where=sa.text(where)
    )


def upgrade() -> None:
    op.add_column("tasks", number("max_cost", nullable=True))
    op.add_column(
        "tasks",
        sa.Column("settlement", sa.Text(), nullable=False, server_default=sa.text("'end'")),
    )
    op.add_column("tasks", number("metered", default="0"))
    partial(
        "ix_tasks_capped",
        "tasks",
        ["node_id"],
        "holding = 1 AND metered = 1 AND max_cost IS NOT NULL",
    )
    op.create_table(
        "usage_totals",
        text("kind"),
        number("id"),
        number("month"),
        number("node_id"),
        text("model"),
        number("attempts", default="0"),
        number("task_us", default="0"),
        number("gpu_us", default="0"),
        sa.PrimaryKeyConstraint("kind", "id", "month", "node_id", "model", name="pk_usage_totals"),
    )
    op.create_table(
        "meters",
        number("task_id"),
        number("epoch"),
        number("rank"),
        number("node_id"),
        number("number"),
        number("payer_id"),
        number("pending_id"),
        number("owner_id"),
        number("rate"),
        number("minimum"),
        number("fee_ppm", default="0"),
        text("gpus"),
        number("until"),
        number("charged_us", default="0"),
        number("charged", default="0"),
        number("posted", default="0"),
        number("reserved"),
        number("roll", default="0"),
        number("leases", default="0"),
        number("renew_at"),
        number("closed_at", nullable=True),
        sa.PrimaryKeyConstraint("task_id", "epoch", "rank", name="pk_meters"),
    )
    op.create_index("ix_meters_renew_at", "meters", ["renew_at"])
    partial("ix_meters_open", "meters", ["node_id", "number"], "closed_at IS NULL")
    partial("ix_meters_closed", "meters", ["closed_at"], "closed_at IS NOT NULL")
    op.create_table(
        "charges",
        number("task_id"),
        number("epoch"),
        number("node_id"),
        number("payer_id"),
        number("owner_id"),
        number("started_at", nullable=True),
        number("ended_at"),
        number("charged_us", default="0"),
        number("microcredits", default="0"),
        number("fee", default="0"),
        number("rate"),
        number("minimum"),
        text("reason"),
        text("gpus"),
        text("reserve_id"),
        text("transfer_id", nullable=True),
        text("state"),
        number("vests_at", nullable=True),
        sa.PrimaryKeyConstraint("task_id", "epoch", "node_id", name="pk_charges"),
    )
    partial("ix_charges_open", "charges", ["reserve_id"], "state IN ('metered', 'held')")
