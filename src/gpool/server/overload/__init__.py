"""Admission of requests while the server has more work than it can do in time."""
