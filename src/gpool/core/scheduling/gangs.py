"""Places for a task that needs several nodes at once: all of them or none. It takes nothing.

The nodes are different ones, each with all that the requirements ask for, found one after another as for single tasks.
"""

from __future__ import annotations

from collections.abc import Collection

from gpool.core.ids import NodeId
from gpool.core.model import Shape
from gpool.core.scheduling.engine import Engine
from gpool.core.scheduling.placement import Fit

Found = list[tuple[NodeId, Fit]]


def places(engine: Engine, shape: Shape, choice: int, barred: Collection[NodeId]) -> Found:
    """As many nodes as the shape needs, or the fewer that have room now."""
    found: Found = []
    excluded = set(barred)
    while len(found) < shape.requirements.nodes:
        best = engine.best(shape, choice, excluded)
        if best is None:
            break
        found.append(best)
        excluded.add(best[0])
    return found
