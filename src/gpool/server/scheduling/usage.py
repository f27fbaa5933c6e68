"""Stores the recent usage of users and teams, so that fair share survives a restart. Nothing waits for the write.

Stored values decay by half each half-life, which readers compute. So only values that differ from their decayed
stored value by more than 2 % are written: a few rows each time, however many tenants there are.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpool.core.model import SECOND, Instant, Span
from gpool.core.scheduler.order.fair_share import HALF_LIFE, UsageValues
from gpool.server.server import Server
from gpool.server.store.operations.operators import rules
from gpool.server.wakeups import Wake

EVERY_S = 5.0
KEPT = Span(86_400 * SECOND)
_ROWS = 500  # in one write
_LEAST = 10_000  # billionths of the pool
_FRACTION = 50


class StoreUsage:
    name = "usage"

    def __init__(self, server: Server) -> None:
        self.wake = Wake()
        self.every_s = EVERY_S
        self._server = server
        self._written: dict[tuple[str, int], tuple[int, Instant]] = {}
        self._swept = Instant(0)

    async def run_once(self, now: Instant) -> None:
        server = self._server
        if server.picture.is_stale:
            return
        found = changed(server.picture.state.used(now), self._written, now)
        rows = list(found.items())
        for first in range(0, len(rows), _ROWS):
            await server.write(rules.put_usage(dict(rows[first : first + _ROWS]), now))
        self._written |= {key: (value, now) for key, value in found.items()}
        if now - self._swept > KEPT:
            self._swept = now
            await server.write(rules.forget_usage(Instant(now - KEPT)))
            self._written = {k: v for k, v in self._written.items() if now - v[1] <= KEPT}


def changed(
    used: Mapping[tuple[str, int], int],
    written: Mapping[tuple[str, int], tuple[int, Instant]],
    now: Instant,
) -> UsageValues:
    found: UsageValues = {}
    for key, value in used.items():
        before, at = written.get(key, (0, now))
        decayed = before * 2.0 ** (-(now - at) / HALF_LIFE)
        if abs(value - decayed) > max(_LEAST, value // _FRACTION):
            found[key] = value
    return found
