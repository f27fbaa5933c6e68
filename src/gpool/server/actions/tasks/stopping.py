"""Cancellation and preemption of tasks and batches; requests are stored before they are sent, so they survive a restart.

Cancelling ends a waiting task and marks a running one, which its node stops. Preempting makes the node warn the task,
save its checkpoint and return the lease; the task is queued again, unbilled, without a failed try.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpool.core.errors import Conflict
from gpool.core.ids import BatchId, TaskId, encode
from gpool.core.model import Instant
from gpool.core.permissions import Action
from gpool.core.scheduler.state.events import TasksPreempted
from gpool.server.actions.operators.audit import audited, entry
from gpool.server.actions.tasks.query import named
from gpool.server.identity.authorization import batch_thing, permit, task_thing
from gpool.server.server import Once, Server
from gpool.server.store.identity_values import Caller
from gpool.server.store.operation import operation
from gpool.server.store.operations.leases import preemption
from gpool.server.store.operations.tasks import tasks as operations
from gpool.server.store.protocol import Operation
from gpool.server.store.values import Recording

# ---- cancellation


async def cancel_task(server: Server, who: Caller, id_: TaskId, once: Once | None) -> bool:
    """Cancel a task; an ended one stays. False: a repetition, without a permission check."""
    answered = await server.write_once(who.user, once, _cancel_task(id_, who, server.now), _nothing)
    if answered.value is not None:
        server.picture.absorb(answered.value)
    return answered.value is not None


async def cancel_batch(server: Server, who: Caller, id_: BatchId, once: Once | None) -> bool:
    answered = await server.write_once(
        who.user, once, _cancel_batch(id_, who, server.now), _nothing
    )
    if answered.value is not None:
        server.picture.absorb(answered.value)
        server.hub.publish((id_,))
    return answered.value is not None


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


# ---- preemption


async def preempt_tasks(server: Server, tasks: Sequence[TaskId]) -> Recording:
    """The caller has checked the permission."""
    recording = await server.write(preemption.preempt(tasks, server.now))
    _fold(server, recording)
    return recording


async def preempt_task(server: Server, who: Caller, id_: TaskId, once: Once | None) -> bool:
    """Preempt a task for an operator; `Conflict` if it has no lease. False: a repetition."""
    order = entry(server.now, who, "task.preempt", encode("task", id_))
    preempting = audited(_preempt(id_, who, server.now), [order])
    answered = await server.write_once(who.user, once, preempting, _nothing)
    if answered.value is not None:
        _fold(server, answered.value)
    return answered.value is not None


def _fold(server: Server, recording: Recording) -> None:
    """Inform the scheduler, so that it preempts nothing else for the same capacity."""
    asked = dict.fromkeys(TaskId(hold.task) for _, hold in recording.to_preempt)
    if asked:
        server.picture.fold(TasksPreempted(tuple(asked)))
    server.picture.absorb(recording)


@operation
def _preempt(id_: TaskId, who: Caller, at: Instant) -> Operation[Recording]:
    found = yield from operations.task(id_, None)
    permit(who, Action.TASK_PREEMPT, task_thing(found), named(id_))
    assert found is not None
    recording = yield from preemption.preempt((id_,), at)
    if not recording.to_preempt:
        state = "is being stopped already" if found.row.holding else "is waiting already"
        state = "has ended" if found.row.status.is_final else state
        raise Conflict(f"{named(id_)} {state}; there is nothing to preempt")
    return recording


def _nothing(_: Recording) -> bytes:
    return b""
