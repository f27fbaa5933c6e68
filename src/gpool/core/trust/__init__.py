"""Verified results: siblings, comparison, quorum, spot checks, vesting. Pure.

Depends on `core.ids` and `core.model` only. Instants, the server's secret and all answers are arguments; functions
return decisions as values. Theory with an example in numbers: `docs/decisions/0049-verified-results.md`.
"""
