"""The database file of a run: where it lies, how it begins, and what a scheduler would see in it."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path

from gpool.core.scheduler.state.events import QueuedTask, TasksLeased
from gpool.core.scheduler.state.shapes import shape_of
from gpool.core.scheduler.state.state import State, build
from gpool.server.scheduling.picture import StatePicture
from gpool.server.store import open_inline
from gpool.server.store.values import Picture


def rebuilt(picture: StatePicture, rows: Picture) -> State:
    """Build the scheduling state from stored rows, with the fields of nodes that only the picture has."""
    shapes = {id_: shape_of(spec, user, rows.teams.get(id_)) for id_, user, spec in rows.specs}
    state = build(
        [picture.nodes.annotated(row.node) for row in rows.nodes],
        [
            (shapes[row.spec], QueuedTask(row.task, row.epoch, row.queued_at))
            for row in rows.queued
            if row.task not in picture.rejected
        ],
        [(node, lease.allocation, shapes[lease.spec], lease.task) for node, lease in rows.held],
    )
    for gang in rows.gangs:
        lease = gang.lease
        shape, tasks = shapes[lease.spec], (lease.task,)
        state.fold(TasksLeased(gang.node, lease.allocation, shape, tasks, gang.members))
    return state


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
