"""Spot checks: which results of `verify="spot"` are checked, from the reliability of node, GPU model, environment. Pure.

A result is checked with the largest of three probabilities:

- *reliability*: 1 during probation, then `decay` / (passed checks)^2, at least `floor`. Checks are counted for each GPU
  model and environment of a node: a further one begins with a short probation, since a node may fail with one only;
- *deterrence*: `price` / `stake`. A node that is caught loses its stake, the earnings that have not vested. The gain
  of one false result is at most its price, so that lying loses on average even where the next check is the only risk;
- *suspicion*: 1 while a failed check is unexplained (`core.trust.standing`).

Example: 8 passed checks, stake 8, price 1: reliability 22 %, deterrence 12.5 %, so 22 %. With 38 passed checks, after
about 1,300 results, and a stake of 500: 1 %; an expensive result of price 20: 4 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import SECOND, Instant, Span
from gpool.core.trust.randomness import PPM, DrawPurpose, draw, happens
from gpool.core.trust.standing import Standing

_SPACING = Span(6 * 3600 * SECOND)
_WINDOW = Span(96 * 3600 * SECOND)


class ReliabilityKey(NamedTuple):
    """Unit for which passed checks are counted."""

    node: NodeId
    model: str
    environment: str


class PassedChecks(NamedTuple):
    """Passed checks of one key, and of all keys of the same node."""

    own: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class SpotPolicy:
    """Parameters of spot checks; the defaults are those measured by `bench.verification`."""

    probation: int = 8
    """Passed checks until results of a key are delivered unchecked."""
    short_probation: int = 2
    """The same for a further GPU model or environment of a node that has completed a probation."""
    spacing: Span = _SPACING
    """Time between two tasks of a node on its first probation: the price of a new identity is time."""
    decay: int = 14
    floor_ppm: int = 10_000
    window: Span = _WINDOW
    """Time from the delivery of a result until its earnings vest."""


DEFAULT_SPOT = SpotPolicy()


def passed_checks(counts: Mapping[ReliabilityKey, int], key: ReliabilityKey) -> PassedChecks:
    """Select a key's counts from those of all keys of its node."""
    return PassedChecks(counts.get(key, 0), sum(counts.values()))


def after_failure(policy: SpotPolicy, passed: int) -> int:
    """Return a key's count after a failed check, applied to all keys of the node: the rate rises again."""
    return min(passed, policy.probation)


def may_start(policy: SpotPolicy, standing: Standing, passed: PassedChecks, now: Instant) -> bool:
    """Return whether a node may get a spot-checked task now: not while banned, spaced out during its first probation."""
    if now < standing.banned_until:
        return False
    is_known = passed.total >= policy.probation
    return is_known or standing.last_start is None or now >= standing.last_start + policy.spacing


def check_rate(
    policy: SpotPolicy, standing: Standing, passed: PassedChecks, price: int, stake: int
) -> int:
    """Probability, in millionths, that a result is checked; `price` and `stake` in the same unit."""
    if passed.total < policy.probation or passed.own < policy.short_probation:
        return PPM
    if standing.is_suspect or price >= stake:
        return PPM
    return max(policy.floor_ppm, PPM * policy.decay // passed.total**2, PPM * price // stake)


def is_chosen(secret: bytes, task: TaskId, epoch: int, committed: bytes, rate_ppm: int) -> bool:
    """Return whether a result is checked. It is drawn when the node has committed, so that no answer depends on it."""
    return rate_ppm >= PPM or happens(
        draw(secret, DrawPurpose.SPOT, (task, epoch), committed), rate_ppm
    )
