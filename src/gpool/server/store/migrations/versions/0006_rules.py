"""Operators' rules: policy, cordons, reservations. One row each, the value as JSON."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "rules",
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("id", BIG, autoincrement=False, nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.Column("changed_at", BIG, autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("kind", "id", name=op.f("pk_rules")),
    )
