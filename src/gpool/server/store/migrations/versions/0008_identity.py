"""Purpose of wallet nonces; invitations of users to teams."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _int(name: str) -> sa.Column[int]:
    return sa.Column(name, BIG, autoincrement=False, nullable=False)


def upgrade() -> None:
    op.add_column(
        "sign_in_nonces",
        sa.Column("purpose", sa.Text(), server_default=sa.text("''"), nullable=False),
    )
    op.create_table(
        "team_invitations",
        _int("team_id"),
        sa.Column("invitee", sa.Text(), nullable=False),
        sa.Column("user_id", BIG, nullable=True),
        sa.Column("role", sa.Text(), nullable=False),
        _int("made_by"),
        _int("created_at"),
        _int("expires_at"),
        sa.PrimaryKeyConstraint("team_id", "invitee", name=op.f("pk_team_invitations")),
    )
    op.create_index("ix_team_invitations_user_id", "team_invitations", ["user_id"])
