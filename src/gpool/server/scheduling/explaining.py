"""Works out why tasks wait and what would start them, for however many ask at once. It decides nothing and changes nothing.

Why a task waits is told of the scheduling state itself, on the loop, a little at a time and for one after another. What
would start it is tried out in one thread of its own. All that are asked for while it is busy are answered together, each task
once, on one frozen copy and within one budget of processor time: the more ask, the less is tried for each, and past a number
of tasks nothing is. Whoever asks gets an answer; an answer that is not complete says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import thread_time
from typing import Protocol

from gpool.core.errors import TooMany
from gpool.core.ids import TaskId
from gpool.core.model import Instant
from gpool.core.scheduler.explain.mismatch import Explanation
from gpool.core.scheduler.explain.waiting import in_steps, step
from gpool.core.scheduler.explain.whatif import Asking, Suggested
from gpool.core.scheduler.order.orders import Order, Policy
from gpool.core.scheduler.state.snapshot import Snapshot, take
from gpool.core.scheduler.state.state import State

MOST_ASKING = 500
"""Requests at once; more are refused."""

MOST_TASKS = 64
"""Tasks that something is tried for at once."""

BUDGET_S = 0.4
"""Of processor time, for all that are answered together."""

UNTRIED = Suggested((), is_complete=False)


class Scheduled(Protocol):
    """The scheduler, as far as it is asked here."""

    state: State
    policy: Policy
    orders: Mapping[str, Order]


class _Batch:
    """Tasks that are answered together."""

    def __init__(self) -> None:
        self.tasks: dict[TaskId, None] = {}
        self.found: Mapping[TaskId, Suggested] | None = None


class Explaining:
    def __init__(self) -> None:
        self._asking = 0
        self._telling, self._trying = asyncio.Lock(), asyncio.Lock()
        self._next = _Batch()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gpool-explain")
        self.batches = 0  # that were tried out so far

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Around each request; `TooMany` when very many are waiting."""
        if self._asking >= MOST_ASKING:
            raise TooMany("too many explanations are asked for at once; ask again in a few seconds")
        self._asking += 1
        try:
            yield
        finally:
            self._asking -= 1

    async def why(self, scheduled: Scheduled, task: TaskId, now: Instant) -> Explanation:
        """Why it waits, of all that is known."""
        async with self._telling:
            steps = in_steps(scheduled.state, task, now, scheduled.policy, scheduled.orders)
            while True:
                told = step(steps)
                if told is not None:
                    return told
                await asyncio.sleep(0)  # others have their turn

    async def suggestions(self, scheduled: Scheduled, task: TaskId, now: Instant) -> Suggested:
        """What would start it now."""
        batch = self._next
        is_full = (
            len(batch.tasks) >= MOST_TASKS and self._trying.locked()
        )  # else all of it went away
        if is_full and task not in batch.tasks:
            return UNTRIED
        batch.tasks[task] = None
        async with self._trying:  # whoever of a batch comes first asks for all of it
            if batch.found is None:
                if self._next is batch:
                    self._next = _Batch()
                batch.found = await self._tried(scheduled, batch.tasks, now)
        return batch.found.get(task, UNTRIED)

    async def _tried(
        self, scheduled: Scheduled, tasks: Collection[TaskId], now: Instant
    ) -> Mapping[TaskId, Suggested]:
        self.batches += 1
        snapshot = take(scheduled.state, tasks)
        loop, policy, orders = asyncio.get_running_loop(), scheduled.policy, scheduled.orders
        return await loop.run_in_executor(
            self._thread, try_all, snapshot, tuple(tasks), now, policy, orders
        )


def try_all(
    snapshot: Snapshot,
    tasks: tuple[TaskId, ...],
    now: Instant,
    policy: Policy,
    orders: Mapping[str, Order],
) -> Mapping[TaskId, Suggested]:
    ends = thread_time() + BUDGET_S
    asking = Asking(snapshot, now, policy, orders)
    found = {}
    for place, task in enumerate(tasks):
        until = thread_time() + (ends - thread_time()) / (len(tasks) - place)
        found[task] = asking.of(task, lambda until=until: thread_time() > until)  # type: ignore[misc]
    return found
