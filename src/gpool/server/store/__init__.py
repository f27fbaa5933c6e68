"""The store: one protocol, SQLite and PostgreSQL behind it from one code. The store is the truth."""
