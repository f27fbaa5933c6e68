"""Deposits by chain transfers: the cursor and the transfers that were found."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def number(name: str, *, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, BIG, autoincrement=False, nullable=nullable)


def text(name: str, *, default: str | None = None) -> sa.Column[str]:
    return sa.Column(
        name,
        sa.Text(),
        nullable=False,
        server_default=None if default is None else sa.text(default),
    )


def upgrade() -> None:
    op.create_table(
        "deposit_cursors",
        number("chain_id"),
        text("token"),
        text("address"),
        number("block"),
        text("block_hash", default="''"),
        number("changed_at"),
        number("halted_at", nullable=True),
        text("why", default="''"),
        sa.PrimaryKeyConstraint("chain_id", "token", "address", name="pk_deposit_cursors"),
    )
    op.create_table(
        "deposits",
        number("chain_id"),
        text("tx"),
        number("log_index"),
        text("token"),
        text("address"),
        number("block"),
        text("block_hash"),
        text("sender"),
        text("amount"),
        text("status"),
        number("account_id", nullable=True),
        number("changed_at"),
        sa.PrimaryKeyConstraint("chain_id", "tx", "log_index", name="pk_deposits"),
    )
    op.create_index("ix_deposits_account_id", "deposits", ["account_id", "block"])
    where = sa.text("status <> 'credited'")
    op.create_index(
        "ix_deposits_sender", "deposits", ["sender"], sqlite_where=where, postgresql_where=where
    )
