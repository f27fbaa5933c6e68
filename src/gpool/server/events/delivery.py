"""The loop that sends events to webhooks and mail addresses, in the leader only.

Each destination with due deliveries has one worker, so a receiver that does not answer delays no other one. A worker
claims a few deliveries, sends them, records the outcomes, and ends when none is due.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from gpool.core.errors import GpoolError, Invalid, Unreachable
from gpool.core.ids import encode
from gpool.core.model import Instant, Span
from gpool.core.specs.events import next_attempt
from gpool.observability.logs import get_logger
from gpool.server.events.mail import event_mail
from gpool.server.events.webhooks import (
    DestinationSecrets,
    asked_pause,
    event_document,
    webhook_request,
)
from gpool.server.identity.envelope import FieldLocation
from gpool.server.outbound import post_checked, send_mail
from gpool.server.server import Server
from gpool.server.settings import span
from gpool.server.store.generated_rows import DestinationsRecord
from gpool.server.store.operations.events import deliveries, destinations
from gpool.server.store.operations.events.deliveries import (
    FAILED,
    PENDING,
    SENT,
    ClaimedDelivery,
    SettledDelivery,
)
from gpool.server.store.operations.events.destinations import MAIL, ON
from gpool.wire.events import PoolEvent

log = get_logger(__name__)

EVERY_S = 1.0
WORKERS = 64
"""Destinations served at once."""
CLAIMED = 16
"""Deliveries to one webhook in one claim, each of another task: two writes for all of them."""
TOGETHER = 4
"""Of these, requests at once. The slowest claim takes less time than `deliveries.CLAIM`."""
IN_ONE_MAIL = 100
GONE = 410
ERROR_LETTERS = 300


class DeliveryAttempt:
    """Outcome of one attempt. `error` empty: delivered."""

    __slots__ = ("asked", "error", "is_gone", "response")

    def __init__(
        self,
        error: str = "",
        response: int | None = None,
        asked: Span | None = None,
        *,
        is_gone: bool = False,
    ) -> None:
        self.error, self.response, self.asked = error[:ERROR_LETTERS], response, asked
        self.is_gone = is_gone


class DeliverNotices:
    name = "notices"

    def __init__(self, server: Server) -> None:
        self.wake = server.events.delivering
        self.every_s = EVERY_S
        self._server = server
        self._random = random.Random()
        self._serving: set[int] = set()

    async def run_once(self, now: Instant) -> None:
        server = self._server
        if not await server.store.read(deliveries.has_due(now)):
            return
        for id_ in await server.store.read(deliveries.due_destinations(now, 2 * WORKERS)):
            if id_ in self._serving or len(self._serving) >= WORKERS:
                continue
            self._serving.add(id_)
            worker = asyncio.create_task(self._serve(id_), name=f"gpool-notices-{id_}")
            server.events.workers.add(worker)
            worker.add_done_callback(server.events.workers.discard)

    async def _serve(self, id_: int) -> None:
        try:
            while await self._send_due(id_):
                pass
        except GpoolError as error:  # the store cannot be reached: the claim ends by itself
            log.warning("deliveries wait", destination=id_, error=error.detail)
        finally:
            self._serving.discard(id_)

    async def _send_due(self, id_: int) -> bool:
        """Send one group; False if nothing is due."""
        server = self._server
        row = await server.store.read(destinations.destination(id_))
        if row is None or row.status != ON or not server.replica.leads:
            return False
        is_mail = row.form == MAIL
        if is_mail and row.sent_at is not None:
            pause = span(server.settings.mail_every_s)
            if server.now - row.sent_at < pause:
                return False
        most = IN_ONE_MAIL if is_mail else CLAIMED
        claimed = await server.write(
            deliveries.claim(id_, server.picture.term, server.now, most, is_digest=is_mail)
        )
        if not claimed:
            return False
        held = await opened(server, row)
        if is_mail:
            attempts = [await self._mail(row, held, claimed)] * len(claimed)
        else:
            attempts = await self._post(row, held, claimed)
        await self._settle(row, claimed, attempts)
        return True

    async def _post(
        self,
        row: DestinationsRecord,
        held: DestinationSecrets,
        claimed: Sequence[ClaimedDelivery],
    ) -> list[DeliveryAttempt]:
        turns = asyncio.Semaphore(TOGETHER)

        async def one(each: ClaimedDelivery) -> DeliveryAttempt:
            async with turns:
                return await post_event(self._server, row, held, event_document(each.event))

        return list(await asyncio.gather(*map(one, claimed)))

    async def _mail(
        self,
        row: DestinationsRecord,
        held: DestinationSecrets,
        claimed: Sequence[ClaimedDelivery],
    ) -> DeliveryAttempt:
        settings = self._server.settings
        mail_server = settings.mail_server
        if mail_server is None:
            return DeliveryAttempt("this pool has no mail server any more")
        events = [event_document(each.event) for each in claimed]
        try:
            await send_mail(
                mail_server, event_mail(mail_server.sender, held.address, events, settings.origin)
            )
        except Unreachable as error:
            log.info("mail not sent", destination=row.id, error=error.detail)
            return DeliveryAttempt(error.detail)
        return DeliveryAttempt()

    async def _settle(
        self,
        row: DestinationsRecord,
        claimed: Sequence[ClaimedDelivery],
        attempts: Sequence[DeliveryAttempt],
    ) -> None:
        server, now = self._server, self._server.now
        results, off = [], ""
        for each, attempt in zip(claimed, attempts, strict=True):
            status, at = SENT, now
            if attempt.error:
                again = next_attempt(each.attempts, now, self._random.random(), attempt.asked)
                status, at = (FAILED, now) if again is None else (PENDING, again)
            if attempt.is_gone:
                off = "the receiver answered 410 Gone; change the URL or switch it on again"
            results.append(
                SettledDelivery(
                    row.id,
                    each.event.number,
                    each.attempts,
                    status,
                    at,
                    attempt.response,
                    attempt.error,
                )
            )
        await server.write(deliveries.settle(results, now, off))
        if off:
            log.info("webhook switched off", destination=row.id, why=off)
            await server.events.subscribers.refresh(server.store, now)


async def opened(server: Server, row: DestinationsRecord) -> DestinationSecrets:
    return DestinationSecrets.decoded(await server.sealer.open(place_of(row.id), row.sealed))


def place_of(id_: int) -> FieldLocation:
    return FieldLocation("destinations", str(id_), "sealed")


async def post_event(
    server: Server, row: DestinationsRecord, held: DestinationSecrets, event: PoolEvent
) -> DeliveryAttempt:
    """One attempt at a webhook. Redirects and refused addresses are failures."""
    now, settings = server.now, server.settings
    request = webhook_request(row.form, event, held, now)
    try:
        answer = await post_checked(
            held.address,
            request.body,
            request.headers,
            settings.webhook_allowed,
            timeout_s=settings.webhook_timeout_s,
        )
    except (Invalid, Unreachable) as error:
        return DeliveryAttempt(error.detail)
    if 200 <= answer.status < 300:
        return DeliveryAttempt(response=answer.status)
    where = encode("webhook", row.id)
    return DeliveryAttempt(
        f"{where} answered {answer.status}",
        answer.status,
        asked_pause(answer.retry_after, now) if answer.retry_after else None,
        is_gone=answer.status == GONE,
    )
