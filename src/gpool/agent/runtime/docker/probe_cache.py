"""What has to be tried out to be known, and may change: asked at once the first time, and later anew, behind whoever wants to know."""

from __future__ import annotations

import threading
from collections.abc import Callable

ANEW_AFTER_S = 600.0
SOONER_S = 60.0
"""Where it did not work: its owner may be mending it."""


class ProbeCache:
    """`why_not` is quick but for the first time. `begin` has something done by another thread; it may refuse by `RuntimeError`."""

    def __init__(
        self,
        ask: Callable[[], str],
        begin: Callable[[Callable[[], None]], object],
        clock: Callable[[], float],
    ) -> None:
        self._ask, self._begin, self._clock = ask, begin, clock
        self._lock = threading.Lock()
        self._found: tuple[float, str] | None = None
        self._asking = False

    def why_not(self) -> str:
        """What the last try said; empty: it works."""
        with self._lock:
            if self._found is None:
                self._found = (self._clock(), self._ask())
                return self._found[1]
            at, why = self._found
            is_old = self._clock() >= at + (SOONER_S if why else ANEW_AFTER_S)
            if not is_old or self._asking:
                return why
            self._asking = True
        try:
            self._begin(self._ask_anew)
        except RuntimeError:  # whoever would is gone, and so is whoever wants to know
            self._asking = False
        return why

    def _ask_anew(self) -> None:
        try:
            why = self._ask()
            self._found = (self._clock(), why)
        finally:
            self._asking = False
