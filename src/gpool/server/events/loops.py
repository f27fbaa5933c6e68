"""Loops of events: numbering, the tail for open streams, conditions, retention. `delivery` has the one that sends.

All but `tail` run in the leader only.
"""

from __future__ import annotations

from gpool.core.model import SECOND, Instant, Span
from gpool.core.specs.events import EventKind
from gpool.server.server import Server
from gpool.server.settings import span
from gpool.server.store.operations.events import conditions, destinations, outbox
from gpool.server.store.operations.events.conditions import (
    ALERT,
    ConditionEvents,
    PoolCondition,
    SurveyTerms,
)
from gpool.server.store.operations.events.outbox import POOL, holders_in
from gpool.server.wakeups import Wake
from gpool.wire.events import AlertEventData

NUMBERED_AT_ONCE = 500
TAIL_ROWS = 1000
EVERY_S = 1.0
TAIL_EVERY_S = 0.5
CONDITIONS_EVERY_S = 5.0
DAY_S = 86_400
LEAST_SILENCE = Span(60 * SECOND)
"""Silence after which a node counts as lost, if its lease time is shorter."""
UNCONFIRMED_FOR = Span(86_400 * SECOND)


class NumberEvents:
    name = "events"

    def __init__(self, server: Server) -> None:
        self.wake = server.events.subscribers.wake
        self.every_s = EVERY_S
        self._server = server

    async def run_once(self, now: Instant) -> None:
        server = self._server
        while await server.store.read(outbox.has_outbox()):
            found = await server.write(
                outbox.number_events(server.picture.term, now, NUMBERED_AT_ONCE)
            )
            if found.deposed:
                server.picture.invalidate()
                return
            server.hub.publish({holder for _, holder in holders_in(found.events)})
            server.events.delivering.call()
            if not found.more:
                return


class TailEvents:
    """Tells the streams of this replica about events that the leader has numbered."""

    name = "tail"

    def __init__(self, server: Server) -> None:
        self.wake = server.events.tailing
        self.every_s = TAIL_EVERY_S
        self._server = server
        self._last: int | None = None

    async def run_once(self, now: Instant) -> None:  # noqa: ARG002 - a loop's signature
        server = self._server
        if not server.events.streams:
            self._last = None
            return
        if self._last is None:
            self._last = await server.store.read(outbox.last_number())
            # streams opened before this read may have missed an event that it counts
            server.hub.publish(tuple(holder for _, holder in server.events.readers))
            return
        rows = await server.store.read(outbox.newest_after(self._last, TAIL_ROWS))
        if rows:
            self._last = rows[-1].number
            server.hub.publish({row.holder_id for row in rows})


class WatchConditions:
    name = "conditions"

    def __init__(self, server: Server) -> None:
        self.wake = server.events.checking
        self.every_s = CONDITIONS_EVERY_S
        self._server = server

    async def run_once(self, now: Instant) -> None:
        server = self._server
        holders = server.events.subscribers.holders
        if not holders:
            return
        silence = max(2 * server.settings.ttl, LEAST_SILENCE)
        terms = SurveyTerms(
            holders, now, Instant(now - silence), server.settings.low_balance_microcredits
        )
        found = await server.store.read(conditions.survey(terms))
        held = [*found.held, *(self._alerts() if POOL in holders else ())]
        names = {(each.kind, each.object) for each in held}
        begun = [each for each in held if (each.kind, each.object) not in found.stored]
        waiting = {each for each in found.stored if each[0] == outbox.OPEN_BATCH}
        ended = (found.stored - names - waiting - found.gone) | found.done
        if not (begun or ended or found.gone):
            return
        changed = conditions.change_conditions(begun, ended, found.gone, server.picture.term, now)
        if await server.write(changed):
            server.events.subscribers.wake.call()

    def _alerts(self) -> list[PoolCondition]:
        found = []
        for alert in self._server.monitor.alerts.firing:
            labels = dict(alert.labels)
            data = AlertEventData(
                alert=alert.rule.name,
                severity=str(alert.rule.severity),
                summary=alert.rule.summary,
                labels=labels,
            )
            name = f"{alert.rule.name}/{','.join(f'{key}={labels[key]}' for key in sorted(labels))}"
            events = ConditionEvents(
                EventKind.ALERT_FIRING,
                EventKind.ALERT_RESOLVED,
                0,
                (POOL,),
                data.model_dump_json(),
            )
            found.append(PoolCondition(ALERT, name, events))
        return found


class ExpireEvents:
    name = "event-retention"

    def __init__(self, server: Server) -> None:
        self.wake = Wake()
        self.every_s = min(server.settings.prune_s, 3600.0)
        self._server = server

    async def run_once(self, now: Instant) -> None:
        server = self._server
        before = Instant(now - span(server.settings.keep_events_days * DAY_S))
        while await server.write(outbox.forget_events(before, NUMBERED_AT_ONCE)):
            pass
        await server.write(destinations.forget_unconfirmed(Instant(now - UNCONFIRMED_FOR)))
        if await server.write(outbox.forget_readers(now)):
            await server.events.subscribers.refresh(server.store, now)
