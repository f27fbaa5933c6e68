"""The server's one clock and its id source. Everything else takes `now` as an argument."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from gpool.core.model import Instant

COUNTER_BITS = 22
"""Below the millisecond in an id: room for four million ids a millisecond."""


class Clock(Protocol):
    def now(self) -> Instant: ...


@runtime_checkable
class MonotonicClock(Protocol):
    """A clock that also tells how time passes, whatever is done to the time of day."""

    def passed(self) -> Instant:
        """Since some moment. Never faster than time goes, so what waits for it may end late and never early."""
        ...


class SystemClock:
    """UTC that never steps back within one process: a corrected host clock must not reorder what was written.

    Nor does it stand still where the host's was set back, perhaps by hours: leases would never end, and lost nodes never be
    noticed. It goes on, a tenth slower, until the host's has caught up; leases then end late, never early.
    """

    def __init__(
        self,
        wall_ns: Callable[[], int] = time.time_ns,
        ticks_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._wall_ns, self._ticks_ns = wall_ns, ticks_ns
        self._last_ns = 0
        self._ticked_ns = ticks_ns()

    def now(self) -> Instant:
        ticks = self._ticks_ns()
        passed, self._ticked_ns = ticks - self._ticked_ns, ticks
        on = self._last_ns + passed * 9 // 10 if self._last_ns else 0
        self._last_ns = max(on, self._wall_ns())
        return Instant(self._last_ns // 1000)

    def passed(self) -> Instant:
        """By the monotonic clock, which stands still while the machine sleeps: then nobody could have been heard."""
        return Instant(self._ticks_ns() // 1000)


class Ids:
    """Increasing 63-bit ids: the millisecond, then a counter that starts somewhere random each time.

    The random start keeps replicas apart that make ids in the same millisecond.
    """

    def __init__(self, clock: Clock, dice: random.Random) -> None:
        self._clock = clock
        self._dice = dice
        self._last = 0

    def next(self) -> int:
        return self.take(1)[0]

    def take(self, count: int) -> range:
        floor = self._clock.now() // 1000 << COUNTER_BITS
        if self._last < floor:
            self._last = floor | self._dice.getrandbits(COUNTER_BITS - 1)
        first = self._last + 1
        self._last += count
        return range(first, first + count)


def system_ids(clock: Clock) -> Ids:
    """Ids are no secrets: one look at the system's dice is enough to keep replicas apart."""
    return Ids(clock, random.Random(random.SystemRandom().getrandbits(256)))
