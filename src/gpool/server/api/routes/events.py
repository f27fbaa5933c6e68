"""Routes of events: the stream, webhooks with their deliveries, mail notices."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Header, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from gpool.core.ids import decode
from gpool.core.permissions import Action, TeamId
from gpool.server.actions.events import notices, streams, webhooks
from gpool.server.actions.events.streams import EventQuery
from gpool.server.api.callers import server_of, user_of
from gpool.server.api.endpoints import NO_CONTENT, EndpointRouter, SuccessReply, created
from gpool.server.api.messages import (
    Cursor,
    Limit,
    answer,
    document_of,
    no_content,
    once_of,
    stream,
    uncached,
)
from gpool.server.identity.throttle import RouteClass
from gpool.wire.events import (
    DeliveryDocument,
    DeliveryPage,
    EventPage,
    NoticeConfirmation,
    NoticeDocument,
    NoticePage,
    NoticeRequest,
    PoolEvent,
    ReplayDocument,
    ReplayRequest,
    RotationRequest,
    WebhookChange,
    WebhookDocument,
    WebhookPage,
    WebhookRequest,
    WebhookSecretDocument,
)

routes = EndpointRouter("events")

EVENT_STREAM = "text/event-stream"
WEBHOOK = Annotated[str, Path(description="Webhook id, wh-…")]
NOTICE = Annotated[str, Path(description="Id of a mail address, nt-…")]
OfTeam = Annotated[str | None, Query(description="Team id: of this team instead")]
OfPool = Annotated[bool, Query(description="Of the pool instead; operators only")]


def _query(team: str | None, pool: bool, after: int = 0) -> EventQuery:
    return EventQuery(None if team is None else TeamId(decode("team", team)), pool, after)


@routes.get(
    "/v1/events",
    Action.EVENTS_READ,
    Action.EVENTS_READ_POOL,
    rate=RouteClass.STREAM,
    returns=SuccessReply(
        EventPage,
        description="A page; with `Accept: text/event-stream` all kept events and, as they come, new ones "
        "(`id` is the cursor, `event` the type, `data` a `PoolEvent`)",
        media_types=(EVENT_STREAM,),
    ),
    problems=(400,),
)
async def get_events_stream(
    request: Request,
    after: Annotated[str | None, Query(description="Event id after which to continue")] = None,
    limit: Limit = 100,
    team: OfTeam = None,
    pool: OfPool = False,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Read events after a cursor, oldest first. Events are recorded from the first read on."""
    server = server_of(request)
    who = await user_of(request, Action.EVENTS_READ_POOL if pool else Action.EVENTS_READ)
    cursors = [decode("event", each) for each in (after, last_event_id) if each]
    wanted = _query(team, pool, max(cursors, default=0))
    if EVENT_STREAM in request.headers.get("accept", ""):
        return stream(_lines(await streams.follow(server, who, wanted)), EVENT_STREAM)
    items = await streams.page(server, who, wanted, limit)
    return answer(EventPage(items=items, next=items[-1].id if len(items) == limit else None))


async def _lines(pieces: AsyncIterator[list[PoolEvent]]) -> AsyncIterator[bytes]:
    yield b": connected\n\n"
    async for events in pieces:
        if events:
            yield "".join(
                f"id: {event.id}\nevent: {event.type}\ndata: {event.model_dump_json()}\n\n"
                for event in events
            ).encode()
        else:
            yield b": still here\n\n"


# ---- webhooks


@routes.post(
    "/v1/webhooks",
    Action.WEBHOOK_CREATE,
    Action.WEBHOOKS_POOL,
    body=WebhookRequest,
    returns=created(WebhookSecretDocument, "The webhook with its secret, which is shown once"),
)
async def create_webhook(request: Request, team: OfTeam = None, pool: OfPool = False) -> Response:
    """Create a webhook of your account, of a team that you own, or of the pool."""
    who = await user_of(request, Action.WEBHOOKS_POOL if pool else Action.WEBHOOK_CREATE)
    wanted, once = await document_of(request, WebhookRequest)
    server = server_of(request)
    return uncached(await webhooks.create(server, who, _query(team, pool), wanted, once), 201)


@routes.get(
    "/v1/webhooks",
    Action.WEBHOOKS_LIST,
    Action.WEBHOOKS_LIST_POOL,
    returns=WebhookPage,
    problems=(400,),
)
async def list_webhooks(request: Request, team: OfTeam = None, pool: OfPool = False) -> Response:
    """List webhooks."""
    who = await user_of(request, Action.WEBHOOKS_LIST_POOL if pool else Action.WEBHOOKS_LIST)
    return answer(await webhooks.webhooks(server_of(request), who, _query(team, pool)))


@routes.patch(
    "/v1/webhooks/{id}", Action.WEBHOOK_CHANGE, body=WebhookChange, returns=WebhookDocument
)
async def change_webhook(request: Request, id: WEBHOOK) -> Response:
    """Change URL or kinds of a webhook, or switch it on or off."""
    who = await user_of(request)
    wanted, once = await document_of(request, WebhookChange)
    number = decode("webhook", id)
    return answer(await webhooks.change(server_of(request), who, number, wanted, once))


@routes.delete("/v1/webhooks/{id}", Action.WEBHOOK_CHANGE, returns=NO_CONTENT)
async def delete_webhook(request: Request, id: WEBHOOK) -> Response:
    """Delete a webhook with the log of its deliveries."""
    who = await user_of(request)
    await webhooks.delete(server_of(request), who, decode("webhook", id), once_of(request))
    return no_content()


@routes.post("/v1/webhooks/{id}/test", Action.WEBHOOK_CHANGE, returns=DeliveryDocument)
async def test_webhook(request: Request, id: WEBHOOK) -> Response:
    """Send a `ping` to a webhook now and answer with the outcome."""
    who = await user_of(request)
    return answer(await webhooks.test(server_of(request), who, decode("webhook", id)))


@routes.post(
    "/v1/webhooks/{id}/rotate",
    Action.WEBHOOK_CHANGE,
    body=RotationRequest,
    returns=WebhookSecretDocument,
)
async def rotate_webhook(request: Request, id: WEBHOOK) -> Response:
    """Replace the secret of a webhook; both sign for a while."""
    who = await user_of(request)
    wanted, once = await document_of(request, RotationRequest)
    number = decode("webhook", id)
    return uncached(await webhooks.rotate(server_of(request), who, number, wanted, once))


@routes.get("/v1/webhooks/{id}/deliveries", Action.WEBHOOK_READ, returns=DeliveryPage)
async def list_deliveries(
    request: Request, id: WEBHOOK, limit: Limit = 50, cursor: Cursor = None
) -> Response:
    """List deliveries of a webhook, newest first."""
    who = await user_of(request)
    before = None if cursor is None else decode("event", cursor)
    number = decode("webhook", id)
    return answer(await webhooks.log_of(server_of(request), who, number, before, limit))


@routes.post(
    "/v1/webhooks/{id}/replay", Action.WEBHOOK_CHANGE, body=ReplayRequest, returns=ReplayDocument
)
async def replay_deliveries(request: Request, id: WEBHOOK) -> Response:
    """Send one event again, or all that failed."""
    who = await user_of(request)
    wanted, once = await document_of(request, ReplayRequest)
    number = decode("webhook", id)
    return answer(await webhooks.replay(server_of(request), who, number, wanted, once))


# ---- mail


@routes.get("/v1/me/notices", Action.NOTICES_READ, returns=NoticePage)
async def list_notices(request: Request) -> Response:
    """List your mail addresses for events."""
    who = await user_of(request)
    return answer(await notices.notices(server_of(request), who))


@routes.post(
    "/v1/me/notices",
    Action.NOTICE_CHANGE,
    rate=RouteClass.SIGN_IN,
    body=NoticeRequest,
    returns=created(NoticeDocument, "A code was sent to the address"),
)
async def add_notice(request: Request) -> Response:
    """Add a mail address; a code is sent there, which confirms it."""
    who = await user_of(request)
    wanted, once = await document_of(request, NoticeRequest)
    return answer(await notices.add(server_of(request), who, wanted, once), 201)


@routes.post(
    "/v1/me/notices/{id}/confirm",
    Action.NOTICE_CHANGE,
    body=NoticeConfirmation,
    returns=NoticeDocument,
)
async def confirm_notice(request: Request, id: NOTICE) -> Response:
    """Confirm a mail address by the code that was sent there."""
    who = await user_of(request)
    wanted, _ = await document_of(request, NoticeConfirmation)
    number = notices.notice_id(id)
    return answer(await notices.confirm(server_of(request), who, number, wanted))


@routes.delete("/v1/me/notices/{id}", Action.NOTICE_CHANGE, returns=NO_CONTENT)
async def delete_notice(request: Request, id: NOTICE) -> Response:
    """Delete a mail address."""
    who = await user_of(request)
    await notices.remove(server_of(request), who, notices.notice_id(id), once_of(request))
    return no_content()
