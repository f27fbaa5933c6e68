"""Loops of the monitoring: the queue survey with the alert rules, and the lag of the event loop."""

from __future__ import annotations

import asyncio

from gpool.core.model import Instant
from gpool.server.alerts.monitor import survey_ages, survey_reasons
from gpool.server.alerts.rules import EVERY_S
from gpool.server.server import Server
from gpool.server.wakeups import Wake

LAG_EVERY_S = 0.5


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
    """Measures how late a timer is called: the time for which other work blocked the event loop."""

    name = "lag"

    def __init__(self, server: Server) -> None:
        self.wake = Wake()
        self.every_s = LAG_EVERY_S
        self._lag = server.metrics.signals.loop_lag
        self._due_s: float | None = None

    async def run_once(self, now: Instant) -> None:  # noqa: ARG002 - a loop's signature
        at_s = asyncio.get_running_loop().time()
        if self._due_s is not None:
            self._lag.observe(max(0.0, at_s - self._due_s))
        self._due_s = at_s + LAG_EVERY_S
