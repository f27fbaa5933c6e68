"""Recording of events in the transaction of their cause, for subscribed accounts only.

Every write passes `RecordingStore`. While nobody is subscribed it adds nothing. Otherwise the operation's result says
which tasks started, ended or were requeued; events of subscribed accounts are inserted with one statement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from gpool.core.model import EndReason, Instant, TaskStatus
from gpool.core.specs.events import EventKind
from gpool.server.store.operations.events.outbox import (
    EventHolder,
    NewEvent,
    add_events,
    subscribers,
)
from gpool.server.store.protocol import Operation, Store, again, brief, is_brief, operation
from gpool.server.store.values import Recording
from gpool.server.wakeups import Wake

T = TypeVar("T")
NOBODY: frozenset[EventHolder] = frozenset()
ENDS = {
    TaskStatus.SUCCEEDED: EventKind.TASK_SUCCEEDED.value,
    TaskStatus.FAILED: EventKind.TASK_FAILED.value,
    TaskStatus.CANCELLED: EventKind.TASK_CANCELLED.value,
}
STARTED, PREEMPTED = EventKind.TASK_STARTED.value, EventKind.TASK_PREEMPTED.value


class Subscribers:
    """Accounts whose events are recorded, as this process knows them; `wake`: of the loop that numbers events."""

    def __init__(self) -> None:
        self.holders = NOBODY
        self.wake = Wake()

    async def refresh(self, store: Store, now: Instant) -> None:
        self.holders = await store.read(subscribers(now))


class RecordingStore:
    """A store that records the events of each write."""

    def __init__(self, store: Store, known: Subscribers, now: Callable[[], Instant]) -> None:
        self._store, self._known, self._now = store, known, now

    async def write(self, operation: Operation[T]) -> T:
        holders = self._known.holders
        if not holders:
            return await self._store.write(operation)
        recorded = with_events(operation, holders, self._now())
        if is_brief(operation):
            recorded = brief(recorded)
        value = await self._store.write(recorded)
        if recording_in(value) is not None:
            self._known.wake.call()
        return value

    async def read(self, operation: Operation[T]) -> T:
        return await self._store.read(operation)

    async def close(self) -> None:
        await self._store.close()


@operation
def with_events(op: Operation[T], holders: frozenset[EventHolder], at: Instant) -> Operation[T]:
    """The operation, and its events as its last step."""
    value = yield from again(op)
    recording = recording_in(value)
    if recording is not None:
        new = list(events_of(recording, holders, at))
        if new:
            yield from add_events(new)
    return value


def recording_in(value: object) -> Recording | None:
    """The recording that an operation returned: alone, with an answer to keep (`idempotency.once`), or as a member."""
    if isinstance(value, tuple) and len(value) == 2:
        value = value[0]
    if isinstance(value, Recording):
        return value
    found = getattr(value, "recording", None)
    return found if isinstance(found, Recording) else None


def events_of(
    recording: Recording, holders: frozenset[EventHolder], at: Instant
) -> Iterator[NewEvent]:
    for begun in recording.begun:
        if (whose := _holder(begun.user, begun.team)) in holders:
            yield NewEvent(at, STARTED, *whose, begun.task, begun.epoch)
    for back in recording.requeued:
        if back.reason is EndReason.PREEMPTED:
            whose = _holder(back.user, back.team)
            if whose in holders:
                yield NewEvent(at, PREEMPTED, *whose, back.task, back.epoch)
    for ended in recording.ended:
        if (whose := _holder(ended.user, ended.team)) in holders:
            yield NewEvent(at, ENDS[ended.status], *whose, ended.task, ended.epoch)


def _holder(user: int, team: int | None) -> EventHolder:
    return ("user", user) if team is None else ("team", team)
