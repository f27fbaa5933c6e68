"""Reading events: pages, and streams that go on. Whoever reads is a subscriber for a day more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from gpool.core.errors import Invalid
from gpool.core.ids import encode
from gpool.core.model import SECOND, Instant, Span
from gpool.core.permissions import POOL as THE_POOL
from gpool.core.permissions import Action, ObjectKind, TeamId, Thing, missing
from gpool.server.events.webhooks import event_document
from gpool.server.identity.authorization import own, permit
from gpool.server.server import Server
from gpool.server.store.generated_rows import EventsRecord
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations.events import outbox
from gpool.server.store.operations.events.outbox import POOL, EventHolder
from gpool.server.store.operations.identity import teams
from gpool.wire.events import PoolEvent

READS_FOR = Span(86_400 * SECOND)
"""Time after the last read for which events of an account are recorded."""
SILENCE_S = 15.0
"""Pause after which a stream sends a sign of life."""
STREAM_S = 600.0
"""Life of a stream; its reader connects again, and its permission is checked again."""
ROWS = 200


@dataclass(frozen=True, slots=True)
class EventQuery:
    """`team`, `pool`: events of a team, or of the pool, instead of the caller's own. `after`: number of an event."""

    team: TeamId | None = None
    pool: bool = False
    after: int = 0


async def holder_of_query(
    server: Server, who: Caller, wanted: EventQuery, action: Action
) -> EventHolder:
    """The account, after checking the permission."""
    if wanted.team is not None and wanted.pool:
        raise Invalid("'team' and 'pool' name two accounts; send one of them")
    if wanted.pool:
        permit(who, OF_POOL[action], THE_POOL)
        return POOL
    if wanted.team is None:
        permit(who, action, own(who))
        return "user", who.user.id
    team = wanted.team
    known = team in who.teams or await server.store.read(teams.team(team)) is not None
    thing = Thing(ObjectKind.ACCOUNT, team=team) if known else missing(ObjectKind.ACCOUNT)
    permit(who, action, thing, f"team {encode('team', team)}")
    return "team", team


OF_POOL = {
    Action.EVENTS_READ: Action.EVENTS_READ_POOL,
    Action.WEBHOOK_CREATE: Action.WEBHOOKS_POOL,
    Action.WEBHOOKS_LIST: Action.WEBHOOKS_LIST_POOL,
}
"""Action on the pool that corresponds to one on an account."""


async def page(server: Server, who: Caller, wanted: EventQuery, limit: int) -> list[PoolEvent]:
    holder = await holder_of_query(server, who, wanted, Action.EVENTS_READ)
    await subscribe(server, holder)
    return _documents(await server.store.read(outbox.events_after(holder, wanted.after, limit)))


async def follow(server: Server, who: Caller, wanted: EventQuery) -> AsyncIterator[list[PoolEvent]]:
    """Events as they come, for `STREAM_S`; an empty list is a sign of life."""
    holder = await holder_of_query(server, who, wanted, Action.EVENTS_READ)
    await subscribe(server, holder)
    return _follow(server, holder, wanted.after)


async def _follow(
    server: Server, holder: EventHolder, after: int
) -> AsyncIterator[list[PoolEvent]]:
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + STREAM_S
    with server.hub.subscription(holder[1]) as changed, server.events.stream():
        while loop.time() < ends_s:
            rows = await server.store.read(outbox.events_after(holder, after, ROWS))
            if rows:
                after = rows[-1].number
                yield _documents(rows)
            elif not await changed.wait(SILENCE_S):
                await subscribe(server, holder)
                yield []


def _documents(rows: Sequence[EventsRecord]) -> list[PoolEvent]:
    return [event_document(row) for row in rows]


async def subscribe(server: Server, holder: EventHolder) -> None:
    """Record the account's events for `READS_FOR` from now on; written again when half of the time is over."""
    until = server.events.readers.get(holder, Instant(0))
    if until - server.now > READS_FOR // 2 or server.read_only.is_on:
        return
    until = Instant(server.now + READS_FOR)
    await server.write(outbox.put_reader(holder, until))
    server.events.readers[holder] = until
    await server.events.subscribers.refresh(server.store, server.now)
