"""Project labels of tasks, charges and totals of use; totals of use by node."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0026"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
KEPT = "kind, id, month, node_id, model, attempts, task_us, gpu_us"


def upgrade() -> None:
    for table in ("specs", "charges"):
        op.add_column(
            table, sa.Column("project", sa.Text(), nullable=False, server_default=sa.text("''"))
        )
    op.create_table(
        "projects",
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("id", BIG, autoincrement=False, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("kind", "id", "name", name="pk_projects"),
    )
    # SQLite cannot change a primary key
    op.execute(f"CREATE TABLE usage_totals_before AS SELECT {KEPT} FROM usage_totals")  # noqa: S608
    op.drop_table("usage_totals")
    op.create_table(
        "usage_totals",
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("id", BIG, autoincrement=False, nullable=False),
        sa.Column("month", BIG, autoincrement=False, nullable=False),
        sa.Column("node_id", BIG, autoincrement=False, nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False, server_default=sa.text("''")),
        sa.Column("attempts", BIG, nullable=False, server_default=sa.text("0")),
        sa.Column("task_us", BIG, nullable=False, server_default=sa.text("0")),
        sa.Column("gpu_us", BIG, nullable=False, server_default=sa.text("0")),
        sa.PrimaryKeyConstraint(
            "kind", "id", "month", "node_id", "model", "project", name="pk_usage_totals"
        ),
    )
    op.execute(
        f"INSERT INTO usage_totals ({KEPT}) SELECT {KEPT} FROM usage_totals_before"  # noqa: S608
    )
    op.drop_table("usage_totals_before")
    op.create_index("ix_usage_totals_node_id", "usage_totals", ["node_id", "month"])
