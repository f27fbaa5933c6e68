"""Tables of events and notices: the outbox, numbered events, destinations, deliveries, readers, conditions."""

from __future__ import annotations

from sqlalchemy import Column, Index, Table

from gpool.server.store.schema_columns import (
    BIG,
    bytes_column,
    counter,
    id_column,
    int_column,
    maybe_int,
    maybe_text,
    metadata,
    note,
    partial_index,
    text_column,
)

outbox = Table(
    "outbox",
    metadata,
    Column("id", BIG, primary_key=True, autoincrement=True),
    int_column("at"),
    text_column("kind"),
    text_column("holder_kind"),
    int_column("holder_id"),
    int_column("subject"),
    counter("epoch"),
    note("data"),
)
"""Events written in the transaction of their cause, until the loop `events` numbers them. The database gives the ids,
so that events of one task have them in the order of their causes. `data` empty: read from the task's row.
"""

events = Table(
    "events",
    metadata,
    int_column("number", primary_key=True),
    int_column("at"),
    text_column("kind"),
    text_column("holder_kind"),
    int_column("holder_id"),
    int_column("subject"),
    text_column("data"),
    Index("ix_events_holder", "holder_kind", "holder_id", "number"),
)
"""Events in the order in which readers and receivers get them. `number`: microseconds of the clock when the leader
numbered it, or one more than the one before; never used twice, also after a restored backup."""

destinations = Table(
    "destinations",
    metadata,
    id_column(),
    text_column("holder_kind"),
    int_column("holder_id"),
    text_column("form"),
    text_column("kinds"),
    bytes_column("sealed"),
    text_column("status"),
    note("why"),
    int_column("created_at"),
    int_column("changed_at"),
    maybe_int("sent_at"),
    maybe_text("code_hash"),
    counter("code_tries"),
    Index("ix_destinations_holder", "holder_kind", "holder_id", "id"),
)
"""Webhooks and mail addresses. `sealed`: URL or address with the secrets. `status`: on, off, unconfirmed."""

deliveries = Table(
    "deliveries",
    metadata,
    int_column("destination_id", primary_key=True),
    int_column("number", primary_key=True),
    int_column("subject"),
    text_column("status"),
    counter("attempts"),
    int_column("next_at"),
    maybe_int("tried_at"),
    maybe_int("response"),
    note("error"),
)
"""One event for one destination. `status`: pending, sent, failed. `response`: HTTP status of the last attempt."""
partial_index("ix_deliveries_due", deliveries.c.next_at, where="status = 'pending'")
partial_index(
    "ix_deliveries_order",
    deliveries.c.destination_id,
    deliveries.c.subject,
    deliveries.c.number,
    where="status = 'pending'",
)

event_readers = Table(
    "event_readers",
    metadata,
    text_column("holder_kind", primary_key=True),
    int_column("holder_id", primary_key=True),
    int_column("expires_at"),
)
"""Accounts whose events are recorded because somebody reads `/v1/events`."""

conditions = Table(
    "conditions",
    metadata,
    text_column("kind", primary_key=True),
    text_column("object", primary_key=True),
    int_column("since"),
    text_column("data"),
)
"""States that hold now and whose begin was an event: a lost node, an alert. `data`: of the event that ends it."""
