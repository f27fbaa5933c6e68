"""Receipts on the server: the keys that sign them."""
