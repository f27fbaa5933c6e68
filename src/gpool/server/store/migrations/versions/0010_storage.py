"""Storage accounting, deletion and retention: charged bytes, reserved uploads, shrunk tasks, deleted accounts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _int(name: str) -> sa.Column[int]:
    return sa.Column(name, BIG, autoincrement=False, nullable=False)


def _maybe(name: str) -> sa.Column[int]:
    return sa.Column(name, BIG, nullable=True)


def _counter(name: str) -> sa.Column[int]:
    return sa.Column(name, BIG, server_default=sa.text("0"), nullable=False)


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=False)


def _partial(name: str, where: str) -> None:
    op.create_index(
        name,
        "tasks",
        ["finished_at"],
        sqlite_where=sa.text(where),
        postgresql_where=sa.text(where),
    )


def upgrade() -> None:
    op.add_column("users", _maybe("deleted_at"))
    for table in ("specs", "tasks", "checkpoints", "log_heads"):
        op.add_column(table, _counter("stored_bytes"))
    op.add_column("tasks", _maybe("shrunk_at"))
    op.create_index("ix_tasks_spec_id", "tasks", ["spec_id"])
    _partial("ix_tasks_whole", "finished_at IS NOT NULL AND shrunk_at IS NULL")
    _partial("ix_tasks_shrunk", "shrunk_at IS NOT NULL")
    op.create_index("ix_artifact_refs_holder_kind", "artifact_refs", ["holder", "kind"])
    op.create_table(
        "uploads",
        _text("uploader"),
        _text("sha256"),
        _int("number"),
        _text("kind"),
        _int("account"),
        _int("size_bytes"),
        _int("at"),
        sa.PrimaryKeyConstraint("uploader", "sha256", "number", name=op.f("pk_uploads")),
    )
    op.create_index("ix_uploads_at", "uploads", ["at"])
