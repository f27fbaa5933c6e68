"""Vesting of earnings, audits, and consequences when a node is caught. Pure.

An earning is unsettled from the delivery of its result until `SpotPolicy.window` has passed. Until then the money stays
in the pool's hands, and the result can be withdrawn: it is the stake that makes spot checks deter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from gpool.core.ids import TaskId
from gpool.core.model import Instant, Span
from gpool.core.trust.randomness import DrawPurpose, draw


@dataclass(frozen=True, slots=True)
class Unsettled:
    """A delivered result whose earning has not vested. `can_rerun`: its inputs are still stored."""

    task: TaskId
    price: int
    delivered: Instant
    is_checked: bool = False
    can_rerun: bool = True


@dataclass(frozen=True, slots=True)
class Consequences:
    """`forfeited`: earnings returned to the consumers. The results in `reruns` and `refunds` are withdrawn.

    Results that a check has found right stay delivered; the node is not paid for them either.
    """

    forfeited: int
    reruns: tuple[TaskId, ...]
    refunds: tuple[TaskId, ...]


def has_vested(delivered: Instant, window: Span, now: Instant) -> bool:
    return now >= delivered + window


def stake(unsettled: Iterable[Unsettled]) -> int:
    """Sum of the earnings that a node loses if it is caught now."""
    return sum(one.price for one in unsettled)


def audit_order(secret: bytes, unsettled: Iterable[Unsettled]) -> list[TaskId]:
    """Return the unchecked results in the order in which an audit checks them, until the node is cleared or caught."""
    tasks = (one.task for one in unsettled if not one.is_checked)
    return sorted(tasks, key=lambda task: (draw(secret, DrawPurpose.AUDIT, (task,)), task))


def consequences(unsettled: Collection[Unsettled]) -> Consequences:
    """Return what happens to the unsettled results of a caught node."""
    doubtful = [one for one in unsettled if not one.is_checked]
    return Consequences(
        stake(unsettled),
        tuple(one.task for one in doubtful if one.can_rerun),
        tuple(one.task for one in doubtful if not one.can_rerun),
    )
