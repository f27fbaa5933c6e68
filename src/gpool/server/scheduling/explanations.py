"""Explains why tasks wait and what would start them, for many requests at once. It changes nothing.

Reasons are computed on the live state, in the event loop, in small steps. Changes that would start a task are tried in
one thread, on a snapshot; tasks asked for meanwhile form the next batch and share one budget of processor time.
Answers past `MAX_TASKS` in a batch are marked incomplete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import thread_time
from typing import NamedTuple

from gpool.core.errors import TooMany
from gpool.core.ids import TaskId
from gpool.core.model import SECOND, Instant, Shape, Span
from gpool.core.scheduler.explain.mismatch import Explanation
from gpool.core.scheduler.explain.waiting import in_steps, step
from gpool.core.scheduler.explain.whatif import Asking, StartNow, Suggested
from gpool.core.scheduler.order.orders import Order, Policy
from gpool.core.scheduler.state.snapshot import Snapshot, take
from gpool.server.scheduling.learning import PlannerInputs

MAX_REQUESTS = 500
"""Requests at once; more are refused."""

BUSY_S = 2
"""Retry-After of a refused request."""

MAX_TASKS = 64
"""Tasks of one batch."""

BUDGET_S = 0.4
"""Processor time of one batch."""

REUSE = Span(5 * SECOND)
"""Age up to which suggestions on pages are reused."""

MAX_REUSED = 1000
"""Tasks whose suggestions are kept for pages."""

UNTRIED = Suggested((), is_complete=False)


class _Recent(NamedTuple):
    at: Instant
    found: asyncio.Task[Suggested]


class _Batch:
    def __init__(self) -> None:
        self.tasks: dict[TaskId, None] = {}
        self.found: Mapping[TaskId, Suggested] | None = None


class Explainer:
    def __init__(self) -> None:
        self._requests = 0
        self._explaining, self._trying = asyncio.Lock(), asyncio.Lock()
        self._next = _Batch()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gpool-explain")
        self.batches = 0  # tried out so far
        self._recent: dict[TaskId, _Recent] = {}

    @contextmanager
    def admitted(self) -> Iterator[None]:
        if self._requests >= MAX_REQUESTS:
            raise TooMany(
                f"{MAX_REQUESTS} explanations are being computed; try again in a few seconds",
                retry_after=BUSY_S,
            )
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1

    async def why(self, inputs: PlannerInputs, task: TaskId, now: Instant) -> Explanation:
        async with self._explaining:
            policy = inputs.policy
            steps = in_steps(inputs.state, task, now, policy.current, policy.orders)
            while True:
                found = step(steps)
                if found is not None:
                    return found
                await asyncio.sleep(0)  # let other requests run

    async def suggestions(self, inputs: PlannerInputs, task: TaskId, now: Instant) -> Suggested:
        batch = self._next
        # With the lock free, all requests of a full batch were cancelled: it is taken over.
        is_full = len(batch.tasks) >= MAX_TASKS and self._trying.locked()
        if is_full and task not in batch.tasks:
            return UNTRIED
        batch.tasks[task] = None
        async with self._trying:  # the first request of a batch computes it for all
            if batch.found is None:
                if self._next is batch:
                    self._next = _Batch()
                batch.found = await self._tried(inputs, batch.tasks, now)
        return batch.found.get(task, UNTRIED)

    async def recent_suggestions(
        self, inputs: PlannerInputs, task: TaskId, now: Instant, wait_s: float
    ) -> Suggested | None:
        """Suggestions at most `REUSE` old; None: not computed within `wait_s`, ask again later."""
        known = self._recent.get(task)
        if known is None or not 0 <= now - known.at <= REUSE:
            fresh = {id_: one for id_, one in self._recent.items() if now - one.at <= REUSE}
            self._recent = dict(list(fresh.items())[-MAX_REUSED + 1 :])
            trying = asyncio.create_task(self.suggestions(inputs, task, now))
            known = self._recent[task] = _Recent(now, trying)
        await asyncio.wait({known.found}, timeout=wait_s)
        return known.found.result() if known.found.done() else None

    async def start_of(self, inputs: PlannerInputs, shape: Shape, now: Instant) -> StartNow | None:
        """Where a new task of this shape would start now; None: it would wait."""
        async with self._trying:
            asking = (take(inputs.state), now, inputs.policy.current, inputs.policy.orders)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, _start_of, asking, shape)

    async def _tried(
        self, inputs: PlannerInputs, tasks: Collection[TaskId], now: Instant
    ) -> Mapping[TaskId, Suggested]:
        self.batches += 1
        snapshot = take(inputs.state, tasks)
        loop, policy, orders = (
            asyncio.get_running_loop(),
            inputs.policy.current,
            inputs.policy.orders,
        )
        return await loop.run_in_executor(
            self._thread, try_all, snapshot, tuple(tasks), now, policy, orders
        )


def _start_of(
    asking: tuple[Snapshot, Instant, Policy, Mapping[str, Order]], shape: Shape
) -> StartNow | None:
    return Asking(*asking).start_of(shape)


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
