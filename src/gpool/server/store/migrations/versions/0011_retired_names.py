"""Names of deleted accounts, as hashes: nobody else gets such a name."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "retired_names",
        sa.Column("hashed", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("hashed", name=op.f("pk_retired_names")),
    )
