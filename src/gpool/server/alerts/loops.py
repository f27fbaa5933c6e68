"""Loops of the monitoring: the queue survey with the alert rules, and the delays of the event loop and the store."""

from __future__ import annotations

import asyncio
from time import monotonic

from gpool.core.model import Instant
from gpool.server.alerts.monitor import survey_ages, survey_reasons
from gpool.server.alerts.rules import EVERY_S
from gpool.server.overload.admission import TICK_S, LoadSample
from gpool.server.server import Server
from gpool.server.wakeups import Wake


class MonitorPool:
    name = "monitor"

    def __init__(self, server: Server) -> None:
        self.wake = Wake()
        self.every_s = float(EVERY_S)
        self._server = server

    async def run_once(self, now: Instant) -> None:
        server, picture = self._server, self._server.picture
        survey = server.monitor.survey
        if not picture.is_stale:
            survey_ages(survey, picture.state, now)
            for _ in survey_reasons(
                survey, picture.state, picture.policy.current, len(picture.rejected)
            ):
                await asyncio.sleep(0)  # let requests run
        server.monitor.evaluate(server.metrics.registry, now, server.nodes.lease_time(now))


class LagLoop:
    """Measures how late a timer is called: the time for which other work blocked the event loop; tells the admission
    of requests this and the delays of the store.
    """

    name = "lag"

    def __init__(self, server: Server) -> None:
        self.wake = Wake()
        self.every_s = TICK_S
        self._signals, self._admission = server.metrics.signals, server.admission
        self._readers = server.settings.store_readers
        self._due_s: float | None = None

    async def run_once(self, now: Instant) -> None:  # noqa: ARG002 - a loop's signature
        signals, at_s = self._signals, monotonic()  # not the loop's time, which stands in a turn
        lag_s = 0.0 if self._due_s is None else max(0.0, at_s - self._due_s)
        if self._due_s is not None:
            signals.loop_lag.observe(lag_s)
        store = signals.store
        sample = LoadSample(lag_s, store.write_age_s, store.read_wait_s(self._readers))
        self._admission.tick(sample, at_s)
        signals.http.pressure.set(self._admission.pressure)
        self._due_s = at_s + TICK_S
