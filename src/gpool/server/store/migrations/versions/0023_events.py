"""Events and notices: outbox, numbered events, destinations, deliveries, readers, conditions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0021"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
SUBSCRIBERS = 4
"""Name of both tables in the change feed, as in migration 0013."""


def number(name: str, *, nullable: bool = False, default: str | None = None) -> sa.Column[int]:
    return sa.Column(
        name,
        BIG,
        autoincrement=False,
        nullable=nullable,
        server_default=None if default is None else sa.text(default),
    )


def text(name: str, *, nullable: bool = False, default: str | None = None) -> sa.Column[str]:
    return sa.Column(
        name,
        sa.Text(),
        nullable=nullable,
        server_default=None if default is None else sa.text(default),
    )


def pending(name: str, columns: list[str]) -> None:
    where = sa.text("status = 'pending'")
    op.create_index(name, "deliveries", columns, sqlite_where=where, postgresql_where=where)


def upgrade() -> None:
    op.create_table(
        "outbox",
        sa.Column("id", BIG, autoincrement=True, nullable=False),
        number("at"),
        text("kind"),
        text("holder_kind"),
        number("holder_id"),
        number("subject"),
        number("epoch", default="0"),
        text("data", default="''"),
        sa.PrimaryKeyConstraint("id", name="pk_outbox"),
    )
    op.create_table(
        "events",
        number("number"),
        number("at"),
        text("kind"),
        text("holder_kind"),
        number("holder_id"),
        number("subject"),
        text("data"),
        sa.PrimaryKeyConstraint("number", name="pk_events"),
    )
    op.create_index("ix_events_holder", "events", ["holder_kind", "holder_id", "number"])
    op.create_table(
        "destinations",
        number("id"),
        text("holder_kind"),
        number("holder_id"),
        text("form"),
        text("kinds"),
        sa.Column("sealed", sa.LargeBinary(), nullable=False),
        text("status"),
        text("why", default="''"),
        number("created_at"),
        number("changed_at"),
        number("sent_at", nullable=True),
        text("code_hash", nullable=True),
        number("code_tries", default="0"),
        sa.PrimaryKeyConstraint("id", name="pk_destinations"),
    )
    op.create_index("ix_destinations_holder", "destinations", ["holder_kind", "holder_id", "id"])
    op.create_table(
        "deliveries",
        number("destination_id"),
        number("number"),
        number("subject"),
        text("status"),
        number("attempts", default="0"),
        number("next_at"),
        number("tried_at", nullable=True),
        number("response", nullable=True),
        text("error", default="''"),
        sa.PrimaryKeyConstraint("destination_id", "number", name="pk_deliveries"),
    )
    pending("ix_deliveries_due", ["next_at"])
    pending("ix_deliveries_order", ["destination_id", "subject", "number"])
    op.create_table(
        "event_readers",
        text("holder_kind"),
        number("holder_id"),
        number("expires_at"),
        sa.PrimaryKeyConstraint("holder_kind", "holder_id", name="pk_event_readers"),
    )
    op.create_table(
        "conditions",
        text("kind"),
        text("object"),
        number("since"),
        text("data"),
        sa.PrimaryKeyConstraint("kind", "object", name="pk_conditions"),
    )
    if op.get_context().dialect.name == "postgresql":
        for table, words in (
            ("event_readers", "INSERT OR UPDATE OR DELETE"),
            ("destinations", "INSERT OR UPDATE OF status OR DELETE"),
        ):
            op.execute(
                f"CREATE TRIGGER gpool_{table}_changed AFTER {words} ON {table} "
                f"FOR EACH STATEMENT EXECUTE FUNCTION gpool_changed_whole('{SUBSCRIBERS}')"
            )
