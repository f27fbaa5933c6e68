"""The server's clock and id source. All other modules take `now` as an argument."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from gpool.core.errors import InternalFault
from gpool.core.model import Instant

COUNTER_BITS = 22
"""Bits below the millisecond in an id: four million ids per millisecond."""


class Clock(Protocol):
    def now(self) -> Instant: ...


@runtime_checkable
class MonotonicClock(Protocol):
    def passed(self) -> Instant:
        """Elapsed time since an arbitrary start. Never runs fast, so a timeout may end late but never early."""
        ...


class SystemClock:
    """UTC that never steps back within one process, so a corrected host clock does not reorder writes.

    After the host clock is set back it runs at nine tenths of the speed until the host clock has caught up: standing
    still would keep leases from expiring. Example: set back by 1 hour, it is ahead for 10 hours; leases end late.
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
        """Monotonic time, which stops while the machine sleeps: no heartbeat could arrive then."""
        return Instant(self._ticks_ns() // 1000)


SLOT_BITS = 5
"""Bits of the counter that tell replicas apart: 32 replicas, 131,072 ids of each per millisecond."""

WITHIN_SLOT_BITS = COUNTER_BITS - SLOT_BITS


class Ids:
    """Increasing 63-bit ids: milliseconds, then a counter with a random start.

    `slot`: number of the replica, which has a part of the counter for itself; None: the only server has all of it.
    """

    def __init__(
        self, clock: Clock, dice: random.Random, slot: Callable[[], int] | None = None
    ) -> None:
        self._clock = clock
        self._dice = dice
        self._slot = slot
        self._last = 0

    def next(self) -> int:
        return self.take(1)[0]

    def take(self, count: int) -> range:
        if self._slot is not None:
            return self._take_in_slot(count, self._slot())
        floor = self._clock.now() // 1000 << COUNTER_BITS
        if self._last < floor:
            self._last = floor | self._dice.getrandbits(COUNTER_BITS - 1)
        first = self._last + 1
        self._last += count
        return range(first, first + count)

    def _take_in_slot(self, count: int, slot: int) -> range:
        """More ids than a millisecond's part of the slot come from later milliseconds, each time as one range."""
        size = 1 << WITHIN_SLOT_BITS
        if count > size:
            raise InternalFault(f"{count} ids were asked for at once; at most {size} are given")
        floor = (self._clock.now() // 1000 << COUNTER_BITS) | slot << WITHIN_SLOT_BITS
        if self._last < floor:
            self._last = floor | self._dice.getrandbits(WITHIN_SLOT_BITS - 1)
        elif (self._last & size - 1) + count >= size:
            later = (self._last >> COUNTER_BITS) + 1
            self._last = later << COUNTER_BITS | slot << WITHIN_SLOT_BITS
        first = self._last + 1
        self._last += count
        return range(first, first + count)


def system_ids(clock: Clock, slot: Callable[[], int] | None = None) -> Ids:
    """Id source seeded once by the system: ids are not secret."""
    return Ids(clock, random.Random(random.SystemRandom().getrandbits(256)), slot)
