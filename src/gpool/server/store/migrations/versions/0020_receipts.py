"""Receipts, vesting earnings, rewards, payouts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def number(name: str, *, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, BIG, autoincrement=False, nullable=nullable)


def text(name: str, *, nullable: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=nullable)


def body(name: str) -> sa.Column[bytes]:
    return sa.Column(name, sa.LargeBinary(), nullable=False)


def partial(name: str, table: str, columns: list[str], where: str) -> None:
    op.create_index(
        name, table, columns, sqlite_where=sa.text(where), postgresql_where=sa.text(where)
    )


def upgrade() -> None:
    op.drop_index("ix_ledger_transfers_refunds", table_name="ledger_transfers")
    partial(
        "ix_ledger_transfers_returns",
        "ledger_transfers",
        ["refers_to"],
        "kind IN ('refund', 'forfeit')",
    )
    partial(
        "ix_charges_vesting", "charges", ["vests_at"], "state = 'posted' AND vests_at IS NOT NULL"
    )
    partial(
        "ix_charges_unreceipted", "charges", ["ended_at"], "state = 'posted' AND vests_at IS NULL"
    )
    op.create_index("ix_charges_owner_id", "charges", ["owner_id", "ended_at"])
    op.create_index("ix_charges_payer_id", "charges", ["payer_id", "ended_at"])
    op.create_index("ix_charges_node_id", "charges", ["node_id", "ended_at"])
    op.create_table(
        "work_signatures",
        number("task_id"),
        number("epoch"),
        number("node_id"),
        text("node_key"),
        body("signature"),
        text("result"),
        text("gpus"),
        number("at"),
        sa.PrimaryKeyConstraint("task_id", "epoch", "node_id", name="pk_work_signatures"),
    )
    op.create_index("ix_work_signatures_at", "work_signatures", ["at"])
    op.create_table(
        "receipts",
        number("id"),
        number("task_id"),
        number("epoch"),
        number("node_id"),
        number("payer_id"),
        number("owner_id"),
        number("month"),
        number("issued_at"),
        body("body"),
        sa.PrimaryKeyConstraint("id", name="pk_receipts"),
        sa.UniqueConstraint("task_id", "epoch", "node_id", name="uq_receipts_lease"),
    )
    op.create_index("ix_receipts_payer_id", "receipts", ["payer_id", "id"])
    op.create_index("ix_receipts_owner_id", "receipts", ["owner_id", "id"])
    op.create_index("ix_receipts_month", "receipts", ["month", "id"])
    op.create_table(
        "wallet_changes",
        number("user_id"),
        number("number"),
        number("at"),
        text("address", nullable=True),
        sa.PrimaryKeyConstraint("user_id", "number", name="pk_wallet_changes"),
    )
    op.execute(
        "INSERT INTO wallet_changes (user_id, number, at, address) "
        "SELECT user_id, 1, linked_at, address FROM wallets WHERE payout = 1"
    )
    op.create_table(
        "rewards",
        number("month"),
        number("account_id"),
        number("weight"),
        number("microcredits"),
        number("at"),
        sa.PrimaryKeyConstraint("month", "account_id", name="pk_rewards"),
    )
    op.create_table(
        "payouts",
        number("number"),
        number("month"),
        number("closed_at"),
        number("accounts"),
        text("total_due"),
        text("root", nullable=True),
        text("receipts_root"),
        body("body"),
        sa.PrimaryKeyConstraint("number", name="pk_payouts"),
    )
    op.create_index("uq_payouts_month", "payouts", ["month"], unique=True)
    op.create_table(
        "payout_lines",
        number("number"),
        number("account_id"),
        text("payee"),
        number("microcredits"),
        sa.PrimaryKeyConstraint("number", "account_id", name="pk_payout_lines"),
    )
    op.create_index("ix_payout_lines_account_id", "payout_lines", ["account_id", "number"])
