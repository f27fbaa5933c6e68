"""Drivers: SQLite and PostgreSQL, their group commit, the lock against a second server."""
