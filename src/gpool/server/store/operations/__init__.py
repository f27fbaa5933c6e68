"""Every operation of the store, one module per topic. Each is a generator of guarded, set-based statements.

An operation that refuses (raises a `GpoolError`) does so before its first write.
A `/*postgresql …*/` in a statement is a comment to SQLite, whose one writer needs no row locks.
"""
