"""A simulated pool in one process under virtual time, and the planted bugs it must find."""

from __future__ import annotations

from gpool.testing.world.flaws import Flaw, parts_with
from gpool.testing.world.world import WorldOutcome, run

__all__ = ["Flaw", "WorldOutcome", "parts_with", "run"]
