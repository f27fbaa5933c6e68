"""Tasks whose plan the store keeps refusing. Each waits, longer every time, so that a pass is not spent on it again and again.

A refusal or two is nothing: something was committed between plan and write, and the picture learns of it. At the second in a
row the picture is doubted, and a new one is taken. What is refused even so is kept out of the queue until its pause is over.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gpool.core.ids import TaskId
from gpool.core.model import SECOND, Instant, Shape, Span
from gpool.core.scheduler.explain.mismatch import Explanation, counted
from gpool.core.scheduler.state.events import Placement, QueuedTask, TasksQueued, TasksWithdrawn
from gpool.core.scheduler.state.queue import epoch_of
from gpool.core.scheduler.state.state import State

DOUBTED_AFTER = 2
LONGEST = Span(60 * SECOND)


@dataclass(frozen=True, slots=True)
class _Kept:
    shape: Shape
    task: QueuedTask
    until: Instant


def pause_after(refusals: int) -> Span:
    """Nothing until the picture was taken anew; then one second, two, four, at most a minute."""
    beyond = refusals - DOUBTED_AFTER
    return Span(0) if beyond <= 0 else Span(min(LONGEST, SECOND << min(beyond - 1, 10)))


class Refused:
    def __init__(self) -> None:
        self._counts: dict[TaskId, int] = {}  # refusals in a row
        self._kept: dict[TaskId, _Kept] = {}
        self.noted = 0  # refusals in all

    def __contains__(self, task: TaskId) -> bool:
        """Whether it is kept out of the queue."""
        return task in self._kept

    @property
    def kept(self) -> int:
        """How many are."""
        return len(self._kept)

    def explanation(self, task: TaskId, now: Instant) -> Explanation | None:
        """Of a task that is kept out of the queue."""
        kept = self._kept.get(task)
        if kept is None:
            return None
        times = counted(self._counts.get(task, 0), "time", "times")
        left = max(1, -(-(kept.until - now) // SECOND))
        return Explanation(
            "refused",
            f"It was to start {times} in a row, and what is stored of it or of its node did not allow it: the operator's log "
            f"says more. It is tried again in {left} s.",
        )

    def forget(self, tasks: Collection[TaskId]) -> None:
        """They do not wait any more."""
        if self._counts:
            for task in tasks:
                self._counts.pop(task, None)
                self._kept.pop(task, None)

    def note(self, places: Sequence[Placement], granted: Collection[TaskId]) -> list[TaskId]:
        """What came of a plan. Those that were refused, which is to be told to the log."""
        self.forget(granted)
        asked = dict.fromkeys(grant.task for place in places for grant in place.grants)
        refused = [task for task in asked if task not in granted]
        self.noted += len(refused)
        for task in refused:
            self._counts[task] = self._counts.get(task, 0) + 1
        return refused

    def is_doubtful(self, refused: Collection[TaskId]) -> bool:
        """Whether a new picture may help."""
        return any(self._counts[task] == DOUBTED_AFTER for task in refused)

    def keep_out(self, state: State, refused: Collection[TaskId], now: Instant) -> None:
        """Those whose pause begins."""
        for task in refused:
            pause = pause_after(self._counts[task])
            if pause or state.queue_of(task) is None:  # cancelled meanwhile: it is forgotten
                self._keep(state, task, Instant(now + pause))

    def _keep(self, state: State, task: TaskId, until: Instant) -> None:
        waiting = state.queue_of(task)
        entry = None if waiting is None else waiting.queue.entry_of(task)
        if waiting is None or entry is None:
            self.forget((task,))
            return
        attained = state.attained(task, Instant(0))
        again = QueuedTask(task, epoch_of(entry), Instant(entry.queued_at), attained)
        self._kept[task] = _Kept(waiting.shape, again, until)
        state.fold(TasksWithdrawn((task,)))

    def let_in(self, now: Instant) -> list[TasksQueued]:
        """To be folded: those whose pause is over wait like the others."""
        over = [kept for kept in self._kept.values() if kept.until <= now]
        for kept in over:
            del self._kept[kept.task.id]
        return [TasksQueued(kept.shape, (kept.task,)) for kept in over]

    def renewed(self, state: State) -> None:
        """A new picture has all that waits."""
        self._counts = {
            task: count for task, count in self._counts.items() if state.queue_of(task) is not None
        }
        for task, kept in list(self._kept.items()):
            del self._kept[task]
            self._keep(state, task, kept.until)
