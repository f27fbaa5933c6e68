"""Sandbox networks, one per sandbox."""
