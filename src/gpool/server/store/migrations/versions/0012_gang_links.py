"""Transport between a gang's members, chosen when it is leased."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "gangs", sa.Column("link", sa.Text(), server_default=sa.text("''"), nullable=False)
    )
