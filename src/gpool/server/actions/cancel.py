"""Cancelling. What waits ends at once; what runs is marked at once and stopped by its node."""

from __future__ import annotations

from gpool.core.errors import NotFound
from gpool.core.ids import BatchId, TaskId, UserId, encode
from gpool.core.model import Instant
from gpool.server.actions.query import scope
from gpool.server.server import Once, Server
from gpool.server.store.operation import operation
from gpool.server.store.operations import tasks as operations
from gpool.server.store.protocol import Operation
from gpool.server.store.values import Recording, User


async def cancel_task(server: Server, user: User, id_: TaskId, once: Once | None) -> None:
    """Cancelling what has ended changes nothing and is no error."""
    answered = await server.write_once(
        user, once, _cancel_task(id_, scope(user), server.now), _nothing
    )
    if answered.value is not None:
        server.scheduler.absorb(answered.value)


async def cancel_batch(server: Server, user: User, id_: BatchId, once: Once | None) -> None:
    """Cancels whatever has not ended and closes the batch: nothing can be added to it."""
    answered = await server.write_once(
        user, once, _cancel_batch(id_, scope(user), server.now), _nothing
    )
    if answered.value is not None:
        server.scheduler.absorb(answered.value)
        server.hub.publish((id_,))


@operation
def _cancel_task(id_: TaskId, whose: UserId | None, at: Instant) -> Operation[Recording]:
    if (yield from operations.task(id_, whose)) is None:
        raise NotFound(f"no task {encode('task', id_)} of yours; `gpool ps --all` lists them")
    return (yield from operations.cancel((id_,), whose, at))


@operation
def _cancel_batch(id_: BatchId, whose: UserId | None, at: Instant) -> Operation[Recording]:
    if (yield from operations.batch(id_, whose)) is None:
        raise NotFound(f"no batch {encode('batch', id_)} of yours")
    yield from operations.close_batch(id_)
    waiting = yield from operations.batch_tasks(id_)
    return (yield from operations.cancel(waiting, whose, at))


def _nothing(_: Recording) -> bytes:
    return b""
