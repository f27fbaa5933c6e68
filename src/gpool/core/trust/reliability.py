"""What experience says of a node: how often it goes away, whether its GPUs were proven, how fast they are. Arithmetic over what was seen.

**Losses.** A node's record is the time it was there and how often it went away with leases, both worn off by half in
`HALF_LIFE`: what it was like lately counts. The mean time between losses is told as if it had also been watched for `PRIOR`
and had gone away once: a new node counts as one that goes away once in so long, and only a record moves it from there.

**Rests.** A node that gives back what it is given, and carries nothing to its end, would be given the same again at once, for
ever: nobody is at fault, so nothing counts. After `FREE` times more than it carried anything to its end it is left alone, each
time twice as long. One whose fault it is that tasks could not be started (`core.retries`) is left alone from the first time.

What is told is rounded to coarse steps, so that a node seldom changes and nodes that are hardly different are equal.
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
"""One loss; they wear off, so they are counted in thousandths."""


@dataclass(frozen=True, slots=True)
class Record:
    """Up to `at`."""

    up: Span = _NONE
    losses_milli: int = 0
    at: Instant = _NEVER

    def later(self, at: Instant, up: Span = _NONE, losses: int = 0) -> Record:
        """With what was seen since."""
        passed = max(0, at - self.at)
        kept = 0.5 ** (passed / HALF_LIFE)
        return Record(
            Span(round(self.up * kept) + up),
            round(self.losses_milli * kept) + LOSS * losses,
            Instant(max(at, self.at)),
        )

    @property
    def mtbf(self) -> Span:
        """To the nearest of the steps that are a factor of two apart, from an hour up."""
        mean = LOSS * (self.up + PRIOR) / (self.losses_milli + LOSS)
        return Span(_HOUR << min(16, max(0, round(log2(mean / _HOUR)))))


FREE = 8
LONGEST_REST = Span(600 * SECOND)
SHORTEST_REST = Span(2 * SECOND)


def rest_after(times: int) -> Span:
    """How long a node is given nothing, by how much oftener it gave back than carried something to its end."""
    if times <= FREE:
        return _NONE
    return Span(min(LONGEST_REST, SECOND << min(times - FREE - 1, 20)))


def rest_for_fault(times: int) -> Span:
    """The same of a node at fault that tasks could not be started: at once, by how much oftener than it carried something
    to its end."""
    if times <= 0:
        return _NONE
    return Span(min(LONGEST_REST, SHORTEST_REST << min(times - 1, 20)))


def gigaflops_of(measured: Iterable[int]) -> int:
    """Of the slowest, to the nearest half octave below; 0 where one was not measured."""
    slowest = min(measured, default=0)
    if slowest <= 0:
        return 0
    return round(2 ** (int(2 * log2(slowest)) / 2))
