"""Names of teams for good: every name belongs to the first team that had it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "team_names",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("team_id", BIG, autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_team_names")),
    )
    op.execute("INSERT INTO team_names (name, team_id) SELECT name, id FROM teams")
