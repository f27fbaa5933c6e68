"""Levels by attained age: what has run little goes before what has run long, so that short tasks need not be known as such.

A task begins at level 0 and sinks when it has run for 0.5, 2 and 8 hours in all its attempts together. Inside a level the
older comes first. Run times of real pools have heavy tails: whatever has run for long will most likely run as long again,
and stopping it for many short ones costs it little. A task that waits in vain rises again by one level for each
`promotion` of waiting, so that none starves, whatever arrives. Nothing here knows what runs; it is arithmetic.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

from gpool.core.model import SECOND, Shape, Span

AGES = (Span(1800 * SECOND), Span(7200 * SECOND), Span(28_800 * SECOND))
"""The attained age at which the next level begins."""


def level_of(attained: Span) -> int:
    return bisect_right(AGES, attained)


def attained_at(level: int) -> Span:
    """The least that a task of this level has run."""
    return AGES[level - 1] if level else Span(0)


def risen(level: int, waited: int, promotion: Span) -> int:
    """The level that waiting for so long gives back."""
    return max(0, level - waited // promotion) if level and waited > 0 else level


def at_level(shape: Shape, level: int) -> Shape:
    return shape if shape.level == level else replace(shape, level=level)
