"""Levels of attained run time: tasks that have run little go before tasks that have run long, without predictions.

Levels begin at 0, 0.5, 2, 8, 32 and 128 hours of run time in all attempts; within a level the older goes first. Run
times have heavy tails: a task that has run long will probably run as long again, so stopping it for short ones costs it
little. This holds at every scale, hence factors of four: with one level above 8 hours, a task of ten hours would wait
behind tasks of two weeks. After waiting for `promotion` a task is at level 0: none starves.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

from gpool.core.model import SECOND, Shape, Span

AGES = tuple(Span(1800 * 4**level * SECOND) for level in range(5))
"""Attained run time at which the next level begins."""


def level_of(attained: Span) -> int:
    return bisect_right(AGES, attained)


def attained_at(level: int) -> Span:
    return AGES[level - 1] if level else Span(0)


def risen(level: int, waited: int, promotion: Span) -> int:
    return 0 if waited >= promotion else level


def at_level(shape: Shape, level: int) -> Shape:
    return shape if shape.level == level else replace(shape, level=level)


def plain(shape: Shape) -> Shape:
    """The shape without fields that count only while a task waits."""
    return replace(shape, level=0, avoids=()) if shape.level or shape.avoids else shape
