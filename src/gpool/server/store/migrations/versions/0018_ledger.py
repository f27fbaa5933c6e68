"""Ledger: accounts, transfers with entries, pending transfers, sealed blocks, budgets."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def number(name: str, *, nullable: bool = False, default: str | None = None) -> sa.Column[int]:
    return sa.Column(
        name,
        BIG,
        autoincrement=False,
        nullable=nullable,
        server_default=None if default is None else sa.text(default),
    )


def text(name: str, *, nullable: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=nullable)


def partial(name: str, table: str, columns: list[str], where: str, *, unique: bool = False) -> None:
    op.create_index(
        name,
        table,
        columns,
        unique=unique,
        sqlite_where=sa.text(where),
        postgresql_where=sa.text(where),
    )


def upgrade() -> None:
    op.create_table(
        "ledger_accounts",
        number("id"),
        text("kind"),
        number("balance", default="0"),
        number("sequence", default="0"),
        sa.PrimaryKeyConstraint("id", name="pk_ledger_accounts"),
    )
    op.execute("INSERT INTO ledger_accounts (id, kind) VALUES (1, 'treasury'), (2, 'fee')")
    op.create_table(
        "ledger_holders",
        text("kind"),
        number("id"),
        text("purpose"),
        number("account_id"),
        sa.PrimaryKeyConstraint("kind", "id", "purpose", name="pk_ledger_holders"),
    )
    op.create_index("ix_ledger_holders_account_id", "ledger_holders", ["account_id"])
    op.create_table(
        "ledger_transfers",
        text("id"),
        text("kind"),
        number("at"),
        text("digest"),
        text("refers_to", nullable=True),
        number("block", nullable=True),
        number("leaf", nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_ledger_transfers"),
    )
    partial(
        "ix_ledger_transfers_block_leaf",
        "ledger_transfers",
        ["block", "leaf"],
        "block IS NOT NULL",
        unique=True,
    )
    partial("ix_ledger_transfers_unsealed", "ledger_transfers", ["at", "id"], "block IS NULL")
    partial("ix_ledger_transfers_refunds", "ledger_transfers", ["refers_to"], "kind = 'refund'")
    partial(
        "ix_ledger_transfers_resolution",
        "ledger_transfers",
        ["refers_to"],
        "kind IN ('post', 'void', 'expire')",
        unique=True,
    )
    op.create_table(
        "ledger_entries",
        number("account_id"),
        number("sequence"),
        text("transfer_id"),
        number("amount"),
        number("balance"),
        sa.PrimaryKeyConstraint("account_id", "sequence", name="pk_ledger_entries"),
    )
    op.create_index("ix_ledger_entries_transfer_id", "ledger_entries", ["transfer_id"])
    op.create_table(
        "pending_transfers",
        text("id"),
        number("payer_id"),
        number("account_id"),
        number("amount"),
        number("month"),
        number("expires_at"),
        text("resolved_by", nullable=True),
        number("returned", default="0"),
        sa.PrimaryKeyConstraint("id", name="pk_pending_transfers"),
    )
    op.create_index(
        "ix_pending_transfers_payer_id_month", "pending_transfers", ["payer_id", "month"]
    )
    partial(
        "ix_pending_transfers_open",
        "pending_transfers",
        ["expires_at", "id"],
        "resolved_by IS NULL",
    )
    op.create_table(
        "ledger_blocks",
        number("number"),
        text("previous"),
        text("root"),
        number("transfers"),
        number("sealed_at"),
        text("hash"),
        sa.PrimaryKeyConstraint("number", name="pk_ledger_blocks"),
    )
    op.create_table(
        "ledger_spending",
        number("account_id"),
        number("month"),
        number("amount"),
        sa.PrimaryKeyConstraint("account_id", "month", name="pk_ledger_spending"),
    )
    op.create_table(
        "budgets",
        number("account_id"),
        number("cap"),
        number("changed_at"),
        sa.PrimaryKeyConstraint("account_id", name="pk_budgets"),
    )
