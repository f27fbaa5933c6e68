"""Promotion: protection of starving tasks that does not become thrashing. Reads the state; ranks nothing.

Under overload the waiting time of long tasks grows without bound. If every task that waited long went first, the pool
would serve tasks by age, short tasks would wait behind all of them, and each change at the front would stop running
tasks. Promotion is therefore bounded in number and in rank:

- The oldest tasks of a user that waited for `policy.starvation`, running ones included, until they hold
  `policy.promoted_milli` of the GPUs their user holds (at least one task), go before the user's tasks of
  `LEVEL_OF_PROMOTED` (8 hours of run time) and above: they stop long tasks, never short ones. Tasks that waited for
  `FACTOR` times as long are promoted until all of them hold `FACTOR` times that part: the part grows with the wait.
- The oldest of them goes before all tasks of its user once it waited for `policy.promotion`. So every task runs one
  day, whatever its user submits later.

A promoted task stays among the oldest, so it stays promoted until it ends: promotion costs it no stops.

**Example.** A user holds 320 GPUs, 96 of them for promoted tasks, 192 for those that waited for two days. Tasks that
waited for more than a day, oldest first:

    gpus     32  running   waited 3 days   promoted (32)    first of all
             64  waiting   waited 1 day    promoted (96)    stops tasks of level 3 and above that are not promoted
              8  waiting   waited 1 day    not promoted     waits with the tasks of its level
             16  waiting   waited 2 days   promoted (112)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpool.core.ids import TaskId, UserId
from gpool.core.model import Instant, Span
from gpool.core.scheduler.order.fair_share import asked_by
from gpool.core.scheduler.order.orders import Policy, Promotion
from gpool.core.scheduler.state.state import State
from gpool.core.scheduler.state.stoppable import WaitedTask
from gpool.core.scheduler.state.waiting import ShapeState

FACTOR = 2
"""Of waiting time and of the part of the GPUs."""


class Promotions:
    """Promoted tasks by user, computed on demand for one instant."""

    def __init__(self, state: State, now: Instant, policy: Policy) -> None:
        self._state, self._now, self._policy = state, now, policy
        self._known: dict[UserId, Mapping[int, Promotion]] = {}

    def of(self, user: UserId, task: int) -> Promotion:
        return self.of_user(user).get(task, Promotion.NONE)

    def of_user(self, user: UserId) -> Mapping[int, Promotion]:
        """Promoted tasks only."""
        known = self._known.get(user)
        if known is None:
            known = self._known[user] = self._promoted(user)
        return known

    def _promoted(self, user: UserId) -> dict[int, Promotion]:
        part = self._state.gpus.get(("user", user), 0) * self._policy.promoted_milli // 1000
        longer = FACTOR * self._policy.starvation
        latest = self._now - self._policy.starvation
        starving = self._state.stoppable.waited(user, self._policy.starvation).copy()
        for entry in self._state.queues.shapes_of(user):
            if entry.queue.front().queued_at <= latest:
                starving += self._starving_waits(entry, part)
        starving.sort()
        found: dict[int, Promotion] = {}
        gpus = 0
        for each in starving:
            if found and gpus >= part:
                if gpus >= FACTOR * part or self._now - each.queued_at < longer:
                    break
                if each.waited < longer:
                    continue
            is_first = not found and each.waited >= self._policy.promotion
            found[each.task] = Promotion.FIRST if is_first else Promotion.LONG
            gpus += each.gpus
        return found

    def _starving_waits(self, entry: ShapeState, part: int) -> Iterator[WaitedTask]:
        """Oldest first; not those that could not be promoted even if only this shape waited."""
        gpus, starvation = asked_by(entry.shape)[0], self._policy.starvation
        least, taken, taken_longer = starvation, 0, 0
        for waiting in entry.queue.entries():
            age = self._now - waiting.queued_at
            if age < least:
                return
            waited = age - self._state.queues.attained(TaskId(waiting.task))
            if waited < least:
                continue
            yield WaitedTask(waiting.queued_at, waiting.task, gpus, waited)
            taken += gpus
            if waited >= FACTOR * starvation:
                taken_longer += gpus
            if taken_longer >= FACTOR * part:
                return
            if taken >= part:
                least = Span(FACTOR * starvation)
