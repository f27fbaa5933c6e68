"""Webhooks of users, teams and the pool: created, changed, tested, rotated; the log of their deliveries."""

from __future__ import annotations

from typing import cast

from gpool.core.errors import NotFound
from gpool.core.ids import UserId, decode, encode
from gpool.core.model import SECOND, Instant, Permission
from gpool.core.permissions import POOL as THE_POOL
from gpool.core.permissions import Action, ObjectKind, TeamId, Thing, missing
from gpool.core.specs.events import ALL, EventKind, kinds_text
from gpool.server.actions.audit import audited, entry, note
from gpool.server.actions.events.streams import EventQuery, holder_of_query
from gpool.server.events.delivery import opened, place_of, post_event
from gpool.server.events.webhooks import (
    DestinationSecrets,
    new_secret,
    public_key,
    shown_secret,
)
from gpool.server.identity.authorization import permit
from gpool.server.outbound import checked
from gpool.server.server import Once, Server
from gpool.server.store.generated_rows import DestinationsRecord
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations.events import deliveries, destinations
from gpool.server.store.operations.events.destinations import MAIL, OFF, ON
from gpool.server.store.operations.events.outbox import POOL, EventHolder
from gpool.wire.documents import instant_to_datetime
from gpool.wire.events import (
    DeliveryDocument,
    DeliveryPage,
    DeliveryStatus,
    PingEventData,
    PoolEvent,
    ReplayDocument,
    ReplayRequest,
    RotationRequest,
    WebhookChange,
    WebhookDocument,
    WebhookForm,
    WebhookPage,
    WebhookRequest,
    WebhookSecretDocument,
)

LAST = (1 << 63) - 1


async def create(
    server: Server, who: Caller, to: EventQuery, wanted: WebhookRequest, once: Once | None
) -> WebhookSecretDocument:
    """Create a webhook; its secret is in this answer only. The URL is checked now and at each delivery."""
    holder = await holder_of_query(server, who, to, Action.WEBHOOK_CREATE)
    kinds = kinds_text(wanted.kinds)
    await checked(wanted.url, server.settings.webhook_allowed)
    id_ = server.ids.next()
    held = DestinationSecrets(wanted.url, new_secret())
    sealed = await server.sealer.seal(place_of(id_), held.encoded())
    row = new_destination(id_, holder, wanted.form, kinds, sealed, ON, server.now)
    fact = entry(server.now, who, "webhook.create", encode("webhook", id_), kinds=kinds)
    operation = audited(destinations.add_destination(row), [fact])
    answered = await server.write_once(who.user, once, operation, lambda _: b"%d" % id_)
    await server.events.subscribers.refresh(server.store, server.now)
    return await _with_secret(server, int(answered.body))


async def _with_secret(server: Server, id_: int) -> WebhookSecretDocument:
    """The webhook with its secret, for the caller who has just created or rotated it, also by a repeated request."""
    row = await server.store.read(destinations.destination(id_))
    if row is None:
        raise NotFound(f"no webhook {encode('webhook', id_)}: it was deleted meanwhile")
    held = await opened(server, row)
    assert held.current is not None
    return WebhookSecretDocument(
        **_document(row, held).model_dump(), secret=shown_secret(held.current)
    )


def new_destination(
    id_: int,
    holder: EventHolder,
    form: str,
    kinds: str,
    sealed: bytes,
    status: str,
    at: Instant,
    code_hash: str | None = None,
) -> DestinationsRecord:
    return DestinationsRecord(
        id=id_,
        holder_kind=holder[0],
        holder_id=holder[1],
        form=form,
        kinds=kinds,
        sealed=sealed,
        status=status,
        why="",
        created_at=at,
        changed_at=at,
        sent_at=None,
        code_hash=code_hash,
        code_tries=0,
    )


async def webhooks(server: Server, who: Caller, of: EventQuery) -> WebhookPage:
    holder = await holder_of_query(server, who, of, Action.WEBHOOKS_LIST)
    rows = await server.store.read(destinations.destinations_of(holder, is_mail=False))
    return WebhookPage(items=[_document(row, await opened(server, row)) for row in rows])


async def change(
    server: Server, who: Caller, id_: int, wanted: WebhookChange, once: Once | None
) -> WebhookDocument:
    row = await _found(server, who, id_, Action.WEBHOOK_CHANGE)
    held = await opened(server, row)
    if wanted.url is not None:
        await checked(wanted.url, server.settings.webhook_allowed)
        held = DestinationSecrets(wanted.url, held.current, held.previous, held.previous_until)
        row = row._replace(sealed=await server.sealer.seal(place_of(id_), held.encoded()))
    if wanted.kinds is not None:
        row = row._replace(kinds=kinds_text(wanted.kinds))
    if wanted.enabled is not None:
        row = row._replace(status=ON if wanted.enabled else OFF, why="")
    await _write(server, who, row._replace(changed_at=server.now), "webhook.change", once)
    return _document(row, held)


async def rotate(
    server: Server, who: Caller, id_: int, wanted: RotationRequest, once: Once | None
) -> WebhookSecretDocument:
    """Replace secret and key; for `overlap_s` the old ones sign too."""
    row = await _found(server, who, id_, Action.WEBHOOK_CHANGE)
    held = await opened(server, row)
    held = held.rotated(Instant(server.now + wanted.overlap_s * SECOND))
    row = row._replace(
        sealed=await server.sealer.seal(place_of(id_), held.encoded()), changed_at=server.now
    )
    await _write(server, who, row, "webhook.rotate", once)
    return await _with_secret(server, id_)


async def _write(
    server: Server, who: Caller, row: DestinationsRecord, what: str, once: Once | None
) -> None:
    fact = entry(server.now, who, what, encode("webhook", row.id))
    operation = audited(destinations.change_destination(row), [fact])
    await server.write_once(who.user, once, operation, lambda _: b"")
    await server.events.subscribers.refresh(server.store, server.now)


async def delete(server: Server, who: Caller, id_: int, once: Once | None) -> None:
    row = await _found(server, who, id_, Action.WEBHOOK_CHANGE)
    fact = entry(server.now, who, "webhook.delete", encode("webhook", row.id))
    operation = audited(destinations.delete_destination(id_), [fact])
    await server.write_once(who.user, once, operation, lambda _: b"")
    await server.events.subscribers.refresh(server.store, server.now)


async def test(server: Server, who: Caller, id_: int) -> DeliveryDocument:
    """Send a `ping` now; it is sent once and is no delivery of the log."""
    row = await _found(server, who, id_, Action.WEBHOOK_CHANGE)
    await note(server, entry(server.now, who, "webhook.test", encode("webhook", id_)))
    data = PingEventData(webhook=encode("webhook", id_))
    event = PoolEvent(
        id=encode("event", server.ids.next()),
        type=EventKind.PING,
        timestamp=instant_to_datetime(server.now),
        account=_account(row),
        data=data.model_dump(),
    )
    attempt = await post_event(server, row, await opened(server, row), event)
    return DeliveryDocument(
        event=event.id,
        type=event.type,
        status="failed" if attempt.error else "sent",
        attempts=1,
        next_at=None,
        tried_at=event.timestamp,
        response=attempt.response,
        error=attempt.error,
    )


async def log_of(
    server: Server, who: Caller, id_: int, before: int | None, limit: int
) -> DeliveryPage:
    await _found(server, who, id_, Action.WEBHOOK_READ)
    rows = await server.store.read(
        deliveries.delivery_page(id_, LAST if before is None else before, limit)
    )
    items = [
        DeliveryDocument(
            event=encode("event", row.number),
            type=row.kind,
            status=cast("DeliveryStatus", row.status),
            attempts=row.attempts,
            next_at=instant_to_datetime(row.next_at) if row.status == "pending" else None,
            tried_at=None if row.tried_at is None else instant_to_datetime(row.tried_at),
            response=row.response,
            error=row.error,
        )
        for row in rows
    ]
    return DeliveryPage(items=items, next=items[-1].event if len(items) == limit else None)


async def replay(
    server: Server, who: Caller, id_: int, wanted: ReplayRequest, once: Once | None
) -> ReplayDocument:
    """Send one event, or all that failed, again with its id."""
    await _found(server, who, id_, Action.WEBHOOK_CHANGE)
    number = None if wanted.event is None else decode("event", wanted.event)
    since = Instant(0 if wanted.since is None else round(wanted.since.timestamp() * SECOND))
    fact = entry(server.now, who, "webhook.replay", encode("webhook", id_))
    operation = audited(deliveries.replay(id_, number, since, server.now), [fact])
    answered = await server.write_once(who.user, once, operation, lambda sent: b"%d" % sent)
    if number is not None and answered.body == b"0":
        raise NotFound(f"no delivery of {wanted.event} to this webhook; events are kept for days")
    server.events.delivering.call()
    return ReplayDocument(deliveries=int(answered.body))


# ---- one webhook


async def _found(server: Server, who: Caller, id_: int, action: Action) -> DestinationsRecord:
    row = await server.store.read(destinations.destination(id_))
    if row is not None and row.form == MAIL:
        row = None
    name = encode("webhook", id_)
    if row is not None and (row.holder_kind, row.holder_id) == POOL:
        if Permission.OPERATOR not in who.user.permissions:
            permit(who, action, missing(ObjectKind.WEBHOOK), f"webhook {name}")
        permit(who, Action.WEBHOOKS_POOL, THE_POOL)
    else:
        permit(who, action, _thing(row), f"webhook {name}")
    assert row is not None
    return row


def _thing(row: DestinationsRecord | None) -> Thing:
    if row is None:
        return missing(ObjectKind.WEBHOOK)
    if row.holder_kind == "team":
        return Thing(ObjectKind.WEBHOOK, team=TeamId(row.holder_id))
    return Thing(ObjectKind.WEBHOOK, owner=UserId(row.holder_id))


def _account(row: DestinationsRecord) -> str | None:
    return None if row.holder_kind == "pool" else encode(row.holder_kind, row.holder_id)


def _document(row: DestinationsRecord, held: DestinationSecrets) -> WebhookDocument:
    assert held.current is not None
    return WebhookDocument(
        id=encode("webhook", row.id),
        account=_account(row),
        url=held.address,
        form=cast("WebhookForm", row.form),
        kinds=kind_list(row.kinds),
        enabled=row.status == ON,
        why=row.why,
        public_key=public_key(held.current),
        created_at=instant_to_datetime(row.created_at),
    )


def kind_list(kinds: str) -> list[str]:
    return [ALL] if kinds == ALL else kinds.split(",")
