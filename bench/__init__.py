"""Measurements. Each prints a table and, with `--json FILE`, writes what it measured."""
