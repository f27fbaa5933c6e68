"""Durable state of the server in SQLite or PostgreSQL, with operations written once for both."""

from __future__ import annotations

from gpool.server.store.drivers.opening import open_inline, open_store
from gpool.server.store.drivers.sqlite import InlineStore, SqliteStore
from gpool.server.store.protocol import operation

__all__ = ["InlineStore", "SqliteStore", "open_inline", "open_store", "operation"]
