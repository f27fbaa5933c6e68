"""History of the keys that sign receipts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    big = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "receipt_keys",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=True),
        sa.Column("public", sa.Text(), nullable=False),
        sa.Column("from_ms", big, nullable=False),
        sa.Column("endorsement", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_receipt_keys"),
    )
