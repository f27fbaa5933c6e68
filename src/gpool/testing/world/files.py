"""The database file of a run: where it lies, how it begins, and what a scheduler would see in it."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from gpool.core.model import Node
from gpool.core.scheduler.state.events import QueuedTask, TasksLeased
from gpool.core.scheduler.state.shapes import shape_of
from gpool.core.scheduler.state.state import State, build
from gpool.server.scheduling.scheduler import Scheduler
from gpool.server.store import open_inline
from gpool.server.store.values import Picture


def rebuilt(scheduler: Scheduler, picture: Picture) -> State:
    """The scheduling state from a picture, with what the scheduler knows of the nodes beside it."""
    shapes = {
        id_: shape_of(spec, user, picture.teams.get(id_)) for id_, user, spec in picture.specs
    }
    state = build(
        [_as_known(scheduler, row.node) for row in picture.nodes],
        [
            (shapes[row.spec], QueuedTask(row.task, row.epoch, row.queued_at))
            for row in picture.queued
            if row.task not in scheduler.refused
        ],
        [(node, lease.allocation, shapes[lease.spec], lease.task) for node, lease in picture.held],
    )
    for gang in picture.gangs:
        lease = gang.lease
        shape, tasks = shapes[lease.spec], (lease.task,)
        state.fold(TasksLeased(gang.node, lease.allocation, shape, tasks, gang.members))
    return state


def _as_known(scheduler: Scheduler, node: Node) -> Node:
    """With what the store does not have: whether it is connected, whether it rests, and what experience says of it."""
    merit = scheduler.merits.get(node.id, node.merit)
    connected, resting = node.id in scheduler.channels, scheduler.rests.why(node.id)
    return replace(node, connected=connected, merit=merit, resting=resting)


@lru_cache(maxsize=1)
def empty_database() -> bytes:
    """A migrated file: made once, copied for every run."""
    with tempfile.TemporaryDirectory(dir=fast_folder()) as folder:
        path = Path(folder) / "empty.db"
        open_inline(path, synchronous="OFF").close()
        return path.read_bytes()


def fast_folder() -> str | None:
    """Memory, where the machine has such a folder: nothing here has to outlive the run."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
