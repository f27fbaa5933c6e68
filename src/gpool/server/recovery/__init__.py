"""Backup, restore and verification of a pool. Works on the store and the data directory, beside a running server."""
