"""Alembic's entry point: online over a connection (SQLite), or offline as SQL text (PostgreSQL)."""

from __future__ import annotations

from alembic import context

from gpool.server.store import identity_schema, schema  # noqa: F401 - they fill the metadata
from gpool.server.store.operations.events import tables  # noqa: F401 - likewise
from gpool.server.store.schema_columns import metadata

given = context.config.attributes
if context.is_offline_mode():
    context.configure(
        dialect_name=given["dialect"], target_metadata=metadata, literal_binds=True, as_sql=True
    )
else:
    context.configure(
        connection=given["connection"], target_metadata=metadata, render_as_batch=True
    )
context.run_migrations()
