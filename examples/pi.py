"""Map a function over many inputs; values arrive in order while later calls still run."""

from __future__ import annotations

import random

import gpool

SAMPLES = 20_000


@gpool.task(timeout="5m", retries=1)
def hits(seed: int) -> int:
    """Number of random points, drawn with this seed, inside the quarter circle."""
    draw = random.Random(seed)
    return sum(draw.random() ** 2 + draw.random() ** 2 <= 1 for _ in range(SAMPLES))


if __name__ == "__main__":
    inside = total = 0
    for found in hits.map(range(50)):
        inside += found
        total += SAMPLES
    print(f"pi is about {4 * inside / total:.3f}")
