"""All operations of the store, by subject: generators of guarded statements on sets of rows.

An operation refuses (raises a `GpoolError`) before its first write. `/*postgresql …*/` in a statement is a comment to
SQLite, whose single writer needs no row locks.
"""
