"""Reason of a GPU's quarantine: set by its agent or by hand, cleared by its owner or an operator."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("gpus", sa.Column("quarantined", sa.Text(), nullable=True))
