"""Replicas that stop are marked, so that no node is sent to them; a part of an upload has one writer among replicas;
replicas exchange readings of GPUs and tasks.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    for table, name in (("replicas", "draining"), ("uploads", "writer")):
        op.add_column(table, sa.Column(name, BIG, server_default=sa.text("0"), nullable=False))
    op.create_table(
        "readings",
        sa.Column("replica_id", BIG, autoincrement=False, nullable=False),
        sa.Column("number", BIG, autoincrement=False, nullable=False),
        sa.Column("at", BIG, autoincrement=False, nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("replica_id", "number", name=op.f("pk_readings")),
    )
    op.create_index("ix_readings_at", "readings", ["at"])
