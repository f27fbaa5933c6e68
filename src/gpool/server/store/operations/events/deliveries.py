"""Deliveries of events to destinations: claimed by the leader, tried, and settled.

A claim postpones the delivery by `CLAIM` and counts the attempt in the same statement. So a leader that dies while it
sends leaves a delivery that its successor tries again, and a leader whose term is over claims nothing. Of one task's
events, only the oldest pending one of a destination is due: later ones wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpool.core.model import SECOND, Instant, Span
from gpool.server.store.generated_rows import DeliveriesRecord, EventsRecord
from gpool.server.store.operations.events.outbox import EVENT
from gpool.server.store.operations.leases.grants import is_current_term
from gpool.server.store.protocol import Operation, Relation, Statement, operation
from gpool.server.store.rows import columns, exists, relation_columns, select, values

CLAIM = Span(120 * SECOND)
"""Longer than one attempt may take."""
PENDING, SENT, FAILED = "pending", "sent", "failed"
DELIVERY = columns(DeliveriesRecord, DeliveriesRecord, "d")
IN_ORDER = (
    "NOT EXISTS (SELECT 1 FROM deliveries o WHERE o.destination_id = d.destination_id "
    "AND o.subject = d.subject AND o.status = 'pending' AND o.number < d.number)"
)


class ClaimedDelivery(NamedTuple):
    """`attempts`: including this one."""

    attempts: int
    event: EventsRecord


class SettledDelivery(NamedTuple):
    destination: int
    number: int
    attempts: int
    status: str
    next_at: Instant
    response: int | None
    error: str


@operation
def due_destinations(now: Instant, limit: int) -> Operation[tuple[int, ...]]:
    found = yield from values(
        int,
        "SELECT DISTINCT d.destination_id FROM deliveries d JOIN destinations t ON t.id = d.destination_id "  # noqa: S608
        f"WHERE d.status = 'pending' AND d.next_at <= :now AND t.status = 'on' AND {IN_ORDER} LIMIT :limit",
        {"now": now, "limit": limit},
    )
    return tuple(found)


class _Claimed(NamedTuple):
    number: int
    attempts: int


@operation
def claim(
    destination: int, term: int, now: Instant, limit: int, *, is_digest: bool
) -> Operation[tuple[ClaimedDelivery, ...]]:
    """Take up to `limit` due deliveries, one for each task; none if another leader has taken over.

    `is_digest`: they are sent in one message, in order, so several of one task may be taken.
    """
    if not (yield from is_current_term(term)):
        return ()
    claimed = yield from select(
        _Claimed,
        "UPDATE deliveries SET attempts = attempts + 1, next_at = :until, tried_at = :now "  # noqa: S608
        "WHERE destination_id = :destination AND status = 'pending' AND number IN ("
        "SELECT d.number FROM deliveries d WHERE d.destination_id = :destination AND d.status = 'pending' "
        f"AND d.next_at <= :now AND {'true' if is_digest else IN_ORDER} ORDER BY d.number LIMIT :limit) RETURNING number, attempts",
        {"destination": destination, "now": now, "until": now + CLAIM, "limit": limit},
    )
    attempts = dict(claimed)
    rows = yield from select(
        EventsRecord,
        f"SELECT {EVENT} FROM {{claimed}} AS c JOIN events e ON e.number = c.number ORDER BY e.number",  # noqa: S608
        {},
        {"claimed": Relation(relation_columns(_Claimed), claimed)},
    )
    return tuple(ClaimedDelivery(attempts[row.number], row) for row in rows)


@operation
def settle(results: Sequence[SettledDelivery], at: Instant, off: str = "") -> Operation[None]:
    """Record attempts, unless they were claimed again meanwhile. `off`: why their destination is switched off."""
    relation = Relation(relation_columns(SettledDelivery), results)
    yield Statement(
        "UPDATE deliveries SET status = r.status, next_at = r.next_at, response = r.response, error = r.error "
        "FROM {results} AS r WHERE deliveries.destination_id = r.destination AND deliveries.number = r.number "
        "AND deliveries.attempts = r.attempts AND deliveries.status = 'pending'",
        {},
        {"results": relation},
    )
    for destination in {result.destination for result in results}:
        parameters = {"destination": destination, "at": at, "why": off}
        if off:
            yield Statement(
                "UPDATE destinations SET status = 'off', why = :why, changed_at = :at "
                "WHERE id = :destination AND status = 'on'",
                parameters,
            )
            yield Statement(
                "UPDATE deliveries SET status = 'failed', error = :why "
                "WHERE destination_id = :destination AND status = 'pending'",
                {"destination": destination, "why": off},
            )
        elif any(result.status == SENT for result in results):
            yield Statement(
                "UPDATE destinations SET sent_at = :at WHERE id = :destination",
                {"destination": destination, "at": at},
            )


# ---- for people


class DeliveryView(NamedTuple):
    number: int
    status: str
    attempts: int
    next_at: Instant
    tried_at: Instant | None
    response: int | None
    error: str
    kind: str


@operation
def delivery_page(destination: int, before: int, limit: int) -> Operation[tuple[DeliveryView, ...]]:
    """Deliveries of a destination, newest first."""
    rows = yield from select(
        DeliveryView,
        "SELECT d.number, d.status, d.attempts, d.next_at, d.tried_at, d.response, d.error, e.kind "
        "FROM deliveries d JOIN events e ON e.number = d.number WHERE d.destination_id = :destination "
        "AND d.number < :before ORDER BY d.number DESC LIMIT :limit",
        {"destination": destination, "before": before, "limit": limit},
    )
    return tuple(rows)


@operation
def replay(destination: int, number: int | None, since: Instant, now: Instant) -> Operation[int]:
    """Send again: one event whatever its outcome was, or with None all since then that failed; return their number."""
    which = "number = :number" if number is not None else "status = 'failed' AND number >= :since"
    found = yield from values(
        int,
        "UPDATE deliveries SET status = 'pending', attempts = 0, next_at = :now, error = '' "  # noqa: S608
        f"WHERE destination_id = :destination AND {which} RETURNING number",
        {"destination": destination, "now": now}
        | ({"number": number} if number is not None else {"since": since}),
    )
    return len(found)


@operation
def has_due(now: Instant) -> Operation[bool]:
    """Whether a delivery may be due: a cheap test before the exact one."""
    return (
        yield from exists(
            "SELECT 1 FROM deliveries d WHERE d.status = 'pending' AND d.next_at <= :now LIMIT 1",
            {"now": now},
        )
    )
