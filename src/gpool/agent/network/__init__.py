"""Sandbox networks: one per sandbox, reaching the public internet or a given list, nothing else."""
