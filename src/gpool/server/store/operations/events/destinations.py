"""Destinations of events: webhooks and mail addresses of users, teams and the pool. Sealed fields stay sealed."""

from __future__ import annotations

from gpool.core.errors import Conflict
from gpool.core.model import Instant
from gpool.server.store.generated_rows import DestinationsRecord
from gpool.server.store.operations.events.outbox import EventHolder
from gpool.server.store.protocol import Operation, Statement, operation
from gpool.server.store.rows import columns, exists, select, values

DESTINATION = columns(DestinationsRecord, DestinationsRecord, "d")
MAIL = "mail"
ON, OFF, UNCONFIRMED = "on", "off", "unconfirmed"
MOST = 20
"""Destinations of an account."""
CODE_TRIES = 5


@operation
def add_destination(new: DestinationsRecord) -> Operation[None]:
    """`Conflict` beyond `MOST` of the account."""
    found = yield from values(
        int,
        "SELECT COUNT(*) FROM destinations WHERE holder_kind = :kind AND holder_id = :id",
        {"kind": new.holder_kind, "id": new.holder_id},
    )
    if found[0] >= MOST:
        raise Conflict(f"an account has at most {MOST} webhooks and mail addresses; delete one")
    names = ", ".join(new._fields)
    marks = ", ".join(f":{name}" for name in new._fields)
    yield Statement(
        f"INSERT INTO destinations ({names}) VALUES ({marks})",  # noqa: S608
        new._asdict(),
    )


@operation
def destination(id_: int) -> Operation[DestinationsRecord | None]:
    rows = yield from select(
        DestinationsRecord,
        f"SELECT {DESTINATION} FROM destinations d WHERE d.id = :id",  # noqa: S608
        {"id": id_},
    )
    return rows[0] if rows else None


@operation
def destinations_of(
    holder: EventHolder, *, is_mail: bool
) -> Operation[tuple[DestinationsRecord, ...]]:
    sign = "=" if is_mail else "<>"
    rows = yield from select(
        DestinationsRecord,
        f"SELECT {DESTINATION} FROM destinations d WHERE d.holder_kind = :kind AND d.holder_id = :id "  # noqa: S608
        f"AND d.form {sign} :mail ORDER BY d.id",
        {"kind": holder[0], "id": holder[1], "mail": MAIL},
    )
    return tuple(rows)


@operation
def change_destination(new: DestinationsRecord) -> Operation[bool]:
    """Write the members that a person may change."""
    return (
        yield from exists(
            "UPDATE destinations SET kinds = :kinds, sealed = :sealed, status = :status, why = :why, "
            "changed_at = :changed_at WHERE id = :id RETURNING id",
            {
                name: value
                for name, value in new._asdict().items()
                if name in ("id", "kinds", "sealed", "status", "why", "changed_at")
            },
        )
    )


@operation
def delete_destination(id_: int) -> Operation[bool]:
    yield Statement("DELETE FROM deliveries WHERE destination_id = :id", {"id": id_})
    sql = "DELETE FROM destinations WHERE id = :id RETURNING id"
    return (yield from exists(sql, {"id": id_}))


@operation
def confirm(id_: int, code_hash: str, at: Instant) -> Operation[bool]:
    """Confirm an address by its code. After `CODE_TRIES` wrong ones the address is deleted."""
    rows = yield from values(
        str,
        "UPDATE destinations SET code_tries = code_tries + 1 WHERE id = :id AND status = :unconfirmed "
        "RETURNING code_hash",
        {"id": id_, "unconfirmed": UNCONFIRMED},
    )
    if rows == [code_hash]:
        yield Statement(
            "UPDATE destinations SET status = :on, code_hash = NULL, changed_at = :at WHERE id = :id",
            {"on": ON, "at": at, "id": id_},
        )
        return True
    yield Statement(
        "DELETE FROM destinations WHERE id = :id AND status = :unconfirmed AND code_tries >= :most",
        {"id": id_, "unconfirmed": UNCONFIRMED, "most": CODE_TRIES},
    )
    return False


@operation
def forget_unconfirmed(before: Instant) -> Operation[None]:
    yield Statement(
        "DELETE FROM destinations WHERE status = :unconfirmed AND created_at < :before",
        {"unconfirmed": UNCONFIRMED, "before": before},
    )
