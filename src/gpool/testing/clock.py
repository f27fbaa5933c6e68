"""A clock that stands still until it is told to move."""

from __future__ import annotations

from gpool.core.model import Instant

MORNING = Instant(1_800_000_000_000_000)


class FakeClock:
    """Keeps the promise of `gpool.server.clock.Clock`: never steps back."""

    def __init__(self, at: Instant = MORNING) -> None:
        self._at = at

    def now(self) -> Instant:
        return self._at

    def advance(self, seconds: float) -> Instant:
        if seconds < 0:
            raise ValueError(f"a clock does not go back by {-seconds} s")
        self._at = Instant(self._at + round(seconds * 1_000_000))
        return self._at
