"""Notes of running attempts (phases, preemption requests) and each task's newest checkpoint.

Separate tables: a task without notes costs no extra bytes.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "attempt_notes",
        sa.Column("task_id", BIG, autoincrement=False, nullable=False),
        sa.Column("epoch", BIG, autoincrement=False, nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("at", BIG, autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("task_id", "epoch", "note", name=op.f("pk_attempt_notes")),
    )
    op.create_table(
        "checkpoints",
        sa.Column("task_id", BIG, autoincrement=False, nullable=False),
        sa.Column("epoch", BIG, autoincrement=False, nullable=False),
        sa.Column("saved_at", BIG, autoincrement=False, nullable=False),
        sa.Column("size_bytes", BIG, autoincrement=False, nullable=False),
        sa.Column("files", BIG, autoincrement=False, nullable=False),
        sa.Column("manifest", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("task_id", name=op.f("pk_checkpoints")),
    )
