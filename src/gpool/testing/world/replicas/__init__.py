"""The World with several replicas of one simulated PostgreSQL: production replicas, a racing leader, planted bugs."""

from __future__ import annotations

from gpool.testing.world.replicas.deployment import run_replicas
from gpool.testing.world.replicas.flaws import PLANTED, ReplicaFlaw

__all__ = ["PLANTED", "ReplicaFlaw", "run_replicas"]
