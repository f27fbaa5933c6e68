"""All operations of the store, one package per subject. An operation is a generator of guarded statements on sets of rows.

An operation that refuses (raises a `GpoolError`) does so before its first write. `/*postgresql …*/` in a statement is
a comment to SQLite, whose single writer needs no row locks.
"""
