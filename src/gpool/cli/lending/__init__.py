"""Verbs that start server and agent here; joining a pool."""
