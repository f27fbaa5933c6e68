"""Keys of artifacts and of uploads in progress in an object store."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table, name in (("artifacts", "object"), ("uploads", "object"), ("uploads", "upload_id")):
        op.add_column(
            table, sa.Column(name, sa.Text(), server_default=sa.text("''"), nullable=False)
        )
