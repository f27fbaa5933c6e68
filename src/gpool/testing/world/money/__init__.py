"""Prices, payers and limits of cost in the World, and the planted bugs of charging that it must find."""

from __future__ import annotations

from gpool.testing.world.money.deployment import PricedServer, run_priced
from gpool.testing.world.money.flaws import ChargingFlaw

__all__ = ["ChargingFlaw", "PricedServer", "run_priced"]
