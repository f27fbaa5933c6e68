"""Taking a task's slices away for others: its node warns it, saves its checkpoint and lets go; then it waits again.

It is nobody's fault: not billed, not a failed try. The order is noted before it is sent, so it outlives a restart.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpool.core.errors import Conflict
from gpool.core.ids import TaskId
from gpool.core.model import Instant
from gpool.core.permissions import Action
from gpool.core.scheduler.state.events import TasksPreempted
from gpool.server.actions.operators.audit import audited, entry
from gpool.server.actions.tasks.query import named
from gpool.server.identity.authorization import permit, task_thing
from gpool.server.server import Once, Server
from gpool.server.store.identity_values import Caller
from gpool.server.store.operation import operation
from gpool.server.store.operations.leases import preemption
from gpool.server.store.operations.tasks import tasks as operations
from gpool.server.store.protocol import Operation
from gpool.server.store.values import Recording


async def make_room(server: Server, tasks: Sequence[TaskId]) -> Recording:
    """Stops whatever of these runs or stands in line; what does not is left alone. For those who have decided."""
    recording = await server.write(preemption.preempt(tasks, server.now))
    _take_in(server, recording)
    return recording


async def preempt_task(server: Server, who: Caller, id_: TaskId, once: Once | None) -> None:
    """By an operator's hand. Repeating it changes nothing; what has no lease is refused with `Conflict`."""
    noted = [entry(server.now, who, "task.preempt", named(id_).removeprefix("task "))]
    operation = audited(_preempt(id_, who, server.now), noted)
    answered = await server.write_once(who.user, once, operation, _nothing)
    if answered.value is not None:
        _take_in(server, answered.value)


def _take_in(server: Server, recording: Recording) -> None:
    """They will make room: nothing else has to, and their nodes do not give back unasked."""
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
        why = "stops already" if found.row.holding else "waits already"
        why = "has ended" if found.row.status.is_final else why
        raise Conflict(f"{named(id_)} {why}; there is nothing to take from it")
    return recording


def _nothing(_: Recording) -> bytes:
    return b""
