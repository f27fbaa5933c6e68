"""Drivers of the store: SQLite and PostgreSQL, their group commit and the lock against a second server."""
