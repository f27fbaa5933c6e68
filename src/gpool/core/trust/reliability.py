"""Reliability of a node from its history: losses, backoff, verified and measured GPUs. Pure arithmetic.

**Losses.** The record is the node's connected time and its losses with leases, both decaying with `HALF_LIFE`. The mean
time between losses is estimated as if the node had also been observed for `PRIOR` with one loss: the MTBF of a new node.

**Backoff.** A node that returns every lease unstarted would get the same again at once. After `FREE` returns more than
completions it gets a backoff that doubles each time; a node to blame for failed starts (`core.retries`) from the first
time. Example: 9 returns without a completion: 1 s, 10: 2 s, 11: 4 s, up to 600 s.

Results are rounded to coarse steps, so that values seldom change and similar nodes are equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import log2

from gpool.core.model import SECOND, Instant, Merit, Span

_HOUR = 3600 * 1_000_000
_NONE, _NEVER = Span(0), Instant(0)
PRIOR = Merit().mtbf
HALF_LIFE = Span(14 * 24 * _HOUR)
LOSS = 1000
"""Weight of one loss: losses decay, so they are counted in thousandths."""


@dataclass(frozen=True, slots=True)
class ReliabilityRecord:
    up: Span = _NONE
    losses_milli: int = 0
    at: Instant = _NEVER

    def later(self, at: Instant, up: Span = _NONE, losses: int = 0) -> ReliabilityRecord:
        passed = max(0, at - self.at)
        kept = 0.5 ** (passed / HALF_LIFE)
        return ReliabilityRecord(
            Span(round(self.up * kept) + up),
            round(self.losses_milli * kept) + LOSS * losses,
            Instant(max(at, self.at)),
        )

    @property
    def mtbf(self) -> Span:
        """Rounded to powers of two of an hour."""
        mean = LOSS * (self.up + PRIOR) / (self.losses_milli + LOSS)
        return Span(_HOUR << min(16, max(0, round(log2(mean / _HOUR)))))


FREE = 8
LONGEST_BACKOFF = Span(600 * SECOND)
SHORTEST_BACKOFF = Span(2 * SECOND)


def backoff_after(times: int) -> Span:
    """`times`: returns less completions."""
    if times <= FREE:
        return _NONE
    return Span(min(LONGEST_BACKOFF, SECOND << min(times - FREE - 1, 20)))


def backoff_for_fault(times: int) -> Span:
    """Backoff of a node to blame for failed starts; `times`: faults less completions."""
    if times <= 0:
        return _NONE
    return Span(min(LONGEST_BACKOFF, SHORTEST_BACKOFF << min(times - 1, 20)))


def gigaflops_of(measured: Iterable[int]) -> int:
    """The slowest GPU's rate, rounded down to half an octave; 0 if one was not measured."""
    slowest = min(measured, default=0)
    if slowest <= 0:
        return 0
    return round(2 ** (int(2 * log2(slowest)) / 2))
