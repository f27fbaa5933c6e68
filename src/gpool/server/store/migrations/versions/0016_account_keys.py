"""Data keys of accounts, and keys of encrypted artifacts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    big = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "account_keys",
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("id", big, autoincrement=False, nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("wrapped", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("kind", "id", name="pk_account_keys"),
    )
    op.create_index("ix_account_keys_key_id", "account_keys", ["key_id"], unique=True)
    op.add_column("artifacts", sa.Column("key_sealed", sa.LargeBinary(), nullable=True))
