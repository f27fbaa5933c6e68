"""Replicas, the connections and used proofs of nodes, and the change feed, which triggers write on PostgreSQL."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

NAMED = {
    "tasks": ("id", "INSERT UPDATE DELETE"),
    "batches": ("id", "UPDATE DELETE"),
    "members": ("task_id", "UPDATE"),
    "attempt_notes": ("task_id", "INSERT"),
    "checkpoints": ("task_id", "INSERT UPDATE"),
    "log_heads": ("task_id", "INSERT UPDATE"),
    "nodes": ("id", "INSERT DELETE"),
    "gpus": ("node_id", "INSERT UPDATE DELETE"),
    "node_connections": ("node_id", "INSERT UPDATE DELETE"),
}
"""By table: the column whose values the feed names, and the statements that do."""

RULES, QUOTAS, ACCOUNTS = 1, 2, 3
WHOLE = (
    ("rules", "INSERT OR UPDATE OR DELETE", RULES),
    ("quotas", "INSERT OR UPDATE OR DELETE", QUOTAS),
    ("users", "UPDATE OF permissions, disabled_at, deleted_at OR DELETE", ACCOUNTS),
    ("api_keys", "UPDATE OF ended_at OR DELETE", ACCOUNTS),
    ("sessions", "UPDATE OF ended_at", ACCOUNTS),
    ("memberships", "INSERT OR UPDATE OR DELETE", ACCOUNTS),
    ("teams", "UPDATE OR DELETE", ACCOUNTS),
)
"""Tables that readers of the feed read whole, or whose caches they drop."""

NAME_CHANGES = """
CREATE FUNCTION gpool_name_changes(packed bytea) RETURNS void LANGUAGE sql AS $$
    INSERT INTO changes (xid, at, replica_id, ids) VALUES (
        CAST(CAST(pg_current_xact_id() AS text) AS bigint),
        CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint),
        CAST(COALESCE(NULLIF(current_setting('gpool.replica', true), ''), '0') AS bigint),
        packed
    ) ON CONFLICT (xid) DO UPDATE SET ids = changes.ids || excluded.ids
$$
"""

NAME_WHOLE = """
CREATE FUNCTION gpool_changed_whole() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM gpool_name_changes(int8send(CAST(TG_ARGV[0] AS bigint)));
    RETURN NULL;
END $$
"""


def _named(function: str, rows: str) -> str:
    return f"""
CREATE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE packed bytea;
BEGIN
    SELECT string_agg(int8send(c.id), CAST('' AS bytea)) INTO packed FROM (SELECT DISTINCT {rows}) AS c;
    IF packed IS NOT NULL THEN
        PERFORM gpool_name_changes(packed);
    END IF;
    RETURN NULL;
END $$
"""  # noqa: S608 - the names are constants


def _trigger(table: str, word: str, transition: str, function: str) -> str:
    name = f"gpool_{table}_{word.lower()}"
    return (
        f"CREATE TRIGGER {name} AFTER {word} ON {table} REFERENCING {transition} "
        f"FOR EACH STATEMENT EXECUTE FUNCTION {function}()"
    )


def _write_feed() -> None:
    op.execute(NAME_CHANGES)
    op.execute(NAME_WHOLE)
    for table, (column, words) in NAMED.items():
        function = f"gpool_changed_{table}"
        op.execute(_named(function, f"{column} AS id FROM changed_rows"))
        for word in words.split():
            kind = "OLD" if word == "DELETE" else "NEW"
            op.execute(_trigger(table, word, f"{kind} TABLE AS changed_rows", function))
    # heartbeats change nodes too; they are not named
    differs = (
        "n.id FROM changed_rows n JOIN old_rows o ON o.id = n.id WHERE (n.owner_id, n.name, n.offer, n.availability) "
        "IS DISTINCT FROM (o.owner_id, o.name, o.offer, o.availability)"
    )
    op.execute(_named("gpool_changed_offers", differs))
    both = "OLD TABLE AS old_rows NEW TABLE AS changed_rows"
    op.execute(_trigger("nodes", "UPDATE", both, "gpool_changed_offers"))
    for table, words, id_ in WHOLE:
        op.execute(
            f"CREATE TRIGGER gpool_{table}_changed AFTER {words} ON {table} "
            f"FOR EACH STATEMENT EXECUTE FUNCTION gpool_changed_whole('{id_}')"
        )


def upgrade() -> None:
    op.create_table(
        "replicas",
        sa.Column("id", BIG, autoincrement=False, nullable=False),
        sa.Column("slot", BIG, autoincrement=False, nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("started_at", BIG, autoincrement=False, nullable=False),
        sa.Column("heard_at", BIG, autoincrement=False, nullable=False),
        sa.Column("lock_pid", BIG, nullable=True),
        sa.Column("term", BIG, server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_replicas")),
        sa.UniqueConstraint("slot", name=op.f("uq_replicas_slot")),
    )
    op.create_table(
        "node_connections",
        sa.Column("node_id", BIG, autoincrement=False, nullable=False),
        sa.Column("replica_id", BIG, nullable=True),
        sa.Column("boot", sa.Text(), nullable=False),
        sa.Column("beat", BIG, autoincrement=False, nullable=False),
        sa.Column("connected_at", BIG, autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("node_id", name=op.f("pk_node_connections")),
    )
    op.create_index("ix_node_connections_replica_id", "node_connections", ["replica_id"])
    op.create_table(
        "changes",
        sa.Column("xid", BIG, autoincrement=False, nullable=False),
        sa.Column("at", BIG, autoincrement=False, nullable=False),
        sa.Column("replica_id", BIG, autoincrement=False, nullable=False),
        sa.Column("ids", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("xid", name=op.f("pk_changes")),
    )
    op.create_index("ix_changes_at", "changes", ["at"])
    op.create_table(
        "used_proofs",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("nonce", sa.Text(), nullable=False),
        sa.Column("expires_at", BIG, autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("key", "nonce", name=op.f("pk_used_proofs")),
    )
    op.create_index("ix_used_proofs_expires_at", "used_proofs", ["expires_at"])
    op.create_table(
        "server_secrets",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_server_secrets")),
    )
    if op.get_context().dialect.name == "postgresql":
        _write_feed()
