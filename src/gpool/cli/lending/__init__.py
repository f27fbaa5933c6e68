"""Verbs that start server and agent on this machine, and joining a pool."""
