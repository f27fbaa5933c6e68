"""Paths of work signatures: a node signs the works of one report together."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0038"
down_revision = "0037"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("work_signatures", sa.Column("path", sa.LargeBinary(), nullable=True))
