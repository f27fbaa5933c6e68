"""Cancelling. What waits ends at once; what runs is marked at once and stopped by its node."""

from __future__ import annotations

from gpool.core.ids import BatchId, TaskId, encode
from gpool.core.model import Instant
from gpool.core.permissions import Action
from gpool.server.actions.tasks.query import named
from gpool.server.identity.authorization import batch_thing, permit, task_thing
from gpool.server.server import Once, Server
from gpool.server.store.identity_values import Caller
from gpool.server.store.operation import operation
from gpool.server.store.operations.tasks import tasks as operations
from gpool.server.store.protocol import Operation
from gpool.server.store.values import Recording


async def cancel_task(server: Server, who: Caller, id_: TaskId, once: Once | None) -> None:
    """Cancelling what has ended changes nothing and is no error."""
    answered = await server.write_once(who.user, once, _cancel_task(id_, who, server.now), _nothing)
    if answered.value is not None:
        server.picture.absorb(answered.value)


async def cancel_batch(server: Server, who: Caller, id_: BatchId, once: Once | None) -> None:
    """Cancels whatever has not ended and closes the batch: nothing can be added to it."""
    answered = await server.write_once(
        who.user, once, _cancel_batch(id_, who, server.now), _nothing
    )
    if answered.value is not None:
        server.picture.absorb(answered.value)
        server.hub.publish((id_,))


@operation
def _cancel_task(id_: TaskId, who: Caller, at: Instant) -> Operation[Recording]:
    found = yield from operations.task(id_, None)
    permit(who, Action.TASK_CANCEL, task_thing(found), named(id_))
    return (yield from operations.cancel((id_,), None, at))


@operation
def _cancel_batch(id_: BatchId, who: Caller, at: Instant) -> Operation[Recording]:
    found = yield from operations.batch(id_, None)
    permit(who, Action.BATCH_CANCEL, batch_thing(found), f"batch {encode('batch', id_)}")
    yield from operations.close_batch(id_)
    waiting = yield from operations.batch_tasks(id_)
    return (yield from operations.cancel(waiting, None, at))


def _nothing(_: Recording) -> bytes:
    return b""
