"""Audit log: entries written in the transaction of their effect, pages, verification of the hash chain.

An entry names actor, action, object, address and outcome: names, ids and scopes, never secrets.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from gpool.core.ids import UserId, encode
from gpool.core.model import SECOND, Instant
from gpool.core.permissions import Action, Thing
from gpool.server.identity.audit import (
    EXPIRED,
    OK,
    AuditAnchor,
    AuditEntry,
    AuditLink,
    ChainBroken,
    ChainIntact,
    check,
    facts,
)
from gpool.server.identity.authorization import acts_as_operator
from gpool.server.server import Server
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations.identity import audit as operations
from gpool.server.store.operations.identity import users
from gpool.server.store.protocol import Operation, again, operation
from gpool.server.store.rows import of_ids, select
from gpool.server.store.values import NodeCredentials, User

T = TypeVar("T")

AuditActor = User | Caller | NodeCredentials | None
"""None: an anonymous caller."""

PAGE = 1000
DAY = 86_400 * SECOND


def entry(
    at: Instant,
    actor: AuditActor,
    action: str,
    thing: str = "",
    *,
    outcome: str = OK,
    address: str = "",
    **members: str,
) -> AuditEntry:
    where = address or (actor.address if isinstance(actor, Caller) else "")
    return AuditEntry(0, at, named(actor), action, thing, outcome, where, facts(members))


def named(actor: AuditActor) -> str:
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
    """Operation and audit entries in one transaction. `entries` may be a function of the operation's value.

    Appending locks the head of the log until the commit, so it comes last.
    """
    value = yield from again(op)
    found = entries(value) if callable(entries) else entries
    appended = tuple(found)
    if appended:
        yield from operations.append_all(appended)
    return value


class _UsedKey(NamedTuple):
    id: int
    user_id: UserId
    name: str
    last_used_at: Instant | None


@operation
def keys_used(used: Sequence[tuple[int, Instant]]) -> Operation[None]:
    rows = yield from select(
        _UsedKey,
        "SELECT k.id, k.user_id, k.name, k.last_used_at FROM {used} AS u JOIN api_keys k ON k.id = u.id",
        {},
        {"used": of_ids(number for number, _ in used)},
    )
    latest = dict(used)
    first_uses = [
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
    if first_uses:
        yield from operations.append_all(first_uses)


async def note(server: Server, *entries: AuditEntry) -> None:
    await server.store.write(operations.append(entries))


async def note_read(server: Server, who: Caller, action: Action, thing: Thing, name: str) -> None:
    """Record, before it is answered, that an operator reads what belongs to another account. `name`: id of the object."""
    if not acts_as_operator(who, action, thing):
        return
    if server.identity.reads.is_new(who.user.id, action.value, name, server.now):
        await note(server, entry(server.now, who, action.value, name))


def as_operator(
    at: Instant, who: Caller, action: Action, thing: Thing, name: str
) -> Operation[None]:
    """Last step of an operation: record that an operator changes what belongs to another account."""
    if acts_as_operator(who, action, thing):
        yield from operations.append_all([entry(at, who, action.value, name)])


async def note_refused_sign_in(server: Server, address: str, via: str, thing: str = "") -> None:
    """Record a refused sign-in, the first ones of an address and minute singly, others as a count."""
    entries = server.identity.refusals.add(server.now, address, via, thing)
    if entries:
        await note(server, *entries)


async def page(server: Server, before: int | None, limit: int) -> tuple[AuditLink, ...]:
    return await server.store.read(operations.newest(before, limit))


class AuditReader(Protocol):
    """Store, or snapshot of one."""

    async def read(self, operation: Operation[T]) -> T: ...


async def verify(
    store: AuditReader, anchors: Iterable[AuditAnchor] = ()
) -> ChainIntact | ChainBroken:
    """Verify the chain from the last expired entry on. Anchors of expired entries but the last cannot be compared."""
    head = await store.read(operations.head())
    begun = start = await store.read(operations.start())
    pinned = [*anchors, *([head] if head else [])]
    named: AuditAnchor | None = None
    if start is not None:
        differing = [a for a in pinned if a.sequence == start.sequence and a.hash != start.hash]
        if differing:
            return ChainBroken(start.sequence, f"entry {start.sequence} differs from its anchor")
    first = 0 if start is None else start.sequence
    async for links in _pages(store, first, head.sequence if head else 0):
        last = links[-1].entry.sequence
        here = [anchor for anchor in pinned if anchor.sequence <= last]
        found = check(
            links, start, [a for a in here if start is None or a.sequence > start.sequence]
        )
        if isinstance(found, ChainBroken):
            return found
        start = found.head
        named = _named_start(links) or named
    if named != begun:
        return ChainBroken(
            first + 1,
            f"the log begins after entry {first}, but no entry says that those before expired",
        )
    return check((), start, [a for a in pinned if start is None or a.sequence > start.sequence])


def _named_start(links: Sequence[AuditLink]) -> AuditAnchor | None:
    """Start of the chain as the last entry about expiry names it."""
    for link in reversed(links):
        if link.entry.action == EXPIRED:
            told = dict(link.entry.facts)
            return AuditAnchor(int(told["through"]), bytes.fromhex(told["hash"]))
    return None


async def _pages(
    store: AuditReader, after: int, until: int
) -> AsyncIterator[tuple[AuditLink, ...]]:
    while after < until:
        links = await store.read(operations.entries(after, min(PAGE, until - after)))
        if not links:
            return
        yield links
        if links[-1].entry.sequence <= after:
            return
        after = links[-1].entry.sequence
