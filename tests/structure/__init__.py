"""Measures of the structure of a source tree, and their limits: `python -m tests.structure`."""
