"""Levels by attained age: what has run little goes before what has run long, so that short tasks need not be known as such.

A task begins at level 0 and sinks when it has run for 0.5, 2, 8, 32 and 128 hours in all its attempts together. Inside a level
the older comes first. Run times of real pools have heavy tails: whatever has run for long will most likely run as long again,
and stopping it for many short ones costs it little. That holds at every scale, so the levels go on by factors of four: were
there one level for all that ran longer than 8 hours, a task of ten hours would wait behind those of two weeks. A task that
has waited for `promotion` in all is at level 0 again whatever it ran, so that none starves, whatever arrives. Nothing here knows
what runs; it is arithmetic.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

from gpool.core.model import SECOND, Shape, Span

AGES = tuple(Span(1800 * 4**level * SECOND) for level in range(5))
"""The attained age at which the next level begins."""


def level_of(attained: Span) -> int:
    return bisect_right(AGES, attained)


def attained_at(level: int) -> Span:
    """The least that a task of this level has run."""
    return AGES[level - 1] if level else Span(0)


def risen(level: int, waited: int, promotion: Span) -> int:
    """The level of a task that has waited for so long."""
    return 0 if waited >= promotion else level


def at_level(shape: Shape, level: int) -> Shape:
    return shape if shape.level == level else replace(shape, level=level)


def plain(shape: Shape) -> Shape:
    """As those that come for the first time, without what only counts while it waits."""
    return replace(shape, level=0, avoids=()) if shape.level or shape.avoids else shape
