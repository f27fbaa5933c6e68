"""The World: a whole pool in one process under virtual time, and the bugs it must be able to find."""

from __future__ import annotations

from gpool.testing.world.flaws import Flaw, parts_with
from gpool.testing.world.world import Outcome, run

__all__ = ["Flaw", "Outcome", "parts_with", "run"]
