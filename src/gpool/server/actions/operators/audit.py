"""The audit record: what is written into it, in the transaction of its effect, and how it is read and checked.

An entry names who, what, on what, from where and whether it went well. It holds no secrets: names, ids, scopes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import TypeVar

from gpool.core.ids import encode
from gpool.core.model import SECOND, Instant
from gpool.server.identity.audit import (
    AuditAnchor,
    AuditEntry,
    AuditLink,
    ChainBroken,
    ChainIntact,
    check,
    facts,
)
from gpool.server.server import Server
from gpool.server.store.identity_values import Caller
from gpool.server.store.operation import again, operation
from gpool.server.store.operations.identity import audit as operations
from gpool.server.store.operations.identity import users
from gpool.server.store.protocol import Operation, Statement, Store
from gpool.server.store.rows import of_ids
from gpool.server.store.values import NodeCredentials, User

T = TypeVar("T")

Actor = User | Caller | NodeCredentials | None
"""Who did it; None: nobody we know."""

OK, REFUSED = "ok", "refused"
PAGE = 1000
DAY = 86_400 * SECOND


def entry(
    at: Instant,
    actor: Actor,
    action: str,
    thing: str = "",
    *,
    outcome: str = OK,
    address: str = "",
    **told: str,
) -> AuditEntry:
    """An entry to be appended; the record gives it its number."""
    where = address or (actor.address if isinstance(actor, Caller) else "")
    return AuditEntry(0, at, named(actor), action, thing, outcome, where, facts(told))


def named(actor: Actor) -> str:
    match actor:
        case None:
            return ""
        case User():
            return encode("user", actor.id)
        case Caller():
            return encode("user", actor.user.id)
        case NodeCredentials():
            return encode("node", actor.node)


@operation
def audited(
    op: Operation[T], entries: Sequence[AuditEntry] | Callable[[T], Iterable[AuditEntry]]
) -> Operation[T]:
    """The operation and its entries, in one transaction. `entries` may look at what the operation gave.

    Appending locks the record's head until the commit, so it comes last.
    """
    value = yield from again(op)
    found = entries(value) if callable(entries) else entries
    told = tuple(found)
    if told:
        yield from operations.append_all(told)
    return value


@operation
def keys_used(used: Sequence[tuple[int, Instant]]) -> Operation[None]:
    """When API keys were last used; the first use of each in a day is noted."""
    rows = yield Statement(
        "SELECT k.id, k.user_id, k.name, k.last_used_at FROM {used} AS u JOIN api_keys k ON k.id = u.id",
        {},
        {"used": of_ids(number for number, _ in used)},
    )
    latest = dict(used)
    noted = [
        AuditEntry(
            0,
            latest[number],
            encode("user", user),
            "key.used",
            encode("key", number),
            OK,
            "",
            facts({"name": name}),
        )
        for number, user, name, last in rows
        if last is None or last // DAY < latest[number] // DAY
    ]
    yield from users.touch_keys(used)
    if noted:
        yield from operations.append_all(noted)


async def note(server: Server, *entries: AuditEntry) -> None:
    """What has no effect of its own: a sign-in that went wrong, say."""
    await server.store.write(operations.append(entries))


async def page(server: Server, before: int | None, limit: int) -> tuple[AuditLink, ...]:
    """Newest first."""
    return await server.store.read(operations.newest(before, limit))


async def verify(server: Server, anchors: Iterable[AuditAnchor] = ()) -> ChainIntact | ChainBroken:
    """Walks the whole record, a page at a time, up to where its head was when it began."""
    head = await server.store.read(operations.head())
    pinned = [*anchors, *([head] if head else [])]
    start: AuditAnchor | None = None
    async for links in _pages(server.store, head.sequence if head else 0):
        last = links[-1].entry.sequence
        here = [anchor for anchor in pinned if anchor.sequence <= last]
        found = check(
            links, start, [a for a in here if start is None or a.sequence > start.sequence]
        )
        if isinstance(found, ChainBroken):
            return found
        start = found.head
    return check((), start, [a for a in pinned if start is None or a.sequence > start.sequence])


async def _pages(store: Store, until: int) -> AsyncIterator[tuple[AuditLink, ...]]:
    after = 0
    while after < until:
        links = await store.read(operations.entries(after, min(PAGE, until - after)))
        if not links:
            return
        yield links
        if links[-1].entry.sequence <= after:
            return
        after = links[-1].entry.sequence
