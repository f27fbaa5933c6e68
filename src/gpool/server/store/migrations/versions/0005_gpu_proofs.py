"""Measurements and verification results of GPUs, and the reason for withholding one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("gpus", sa.Column("unproven", sa.Text(), nullable=True))
    op.add_column("gpus", sa.Column("verdict", sa.Text(), nullable=True))
    op.add_column("gpus", sa.Column("judged_at", BIG, autoincrement=False, nullable=True))
    op.add_column("gpus", sa.Column("measured", sa.Text(), nullable=True))
