"""Figures learnt from tasks: start-time forecasts, and the slot pricing trained from recent submissions. In memory;
learnt again after a restart.

Simulated schedules are computed in a thread on a snapshot, one at a time, and reused for some seconds.

Replays take minutes, so they run in a separate process (`python -m` of this module, training set on standard input,
pricing on its output), at the lowest priority and under a limit of processor time.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from gpool.core.ids import TaskId
from gpool.core.model import SECOND, Instant, Node, Shape, Span
from gpool.core.scheduler.explain.whatif import NEW_TASK
from gpool.core.scheduler.order.limits import least_gpus
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.place.portfolio import LEAST_ARRIVALS, PLAIN, Learnt, learn
from gpool.core.scheduler.predict.forecast import (
    Calibration,
    ForecastQuestion,
    Range,
    SimulatedSchedule,
    StatedForecast,
    courses,
    waits,
)
from gpool.core.scheduler.predict.run_times import RunTimes
from gpool.core.scheduler.state.events import QueuedTask, TasksQueued
from gpool.core.scheduler.state.snapshot import take
from gpool.core.scheduler.state.state import State
from gpool.observability.logs import get_logger
from gpool.server.metrics import Metrics
from gpool.server.scheduling.policy import ActivePolicy
from gpool.server.store.operations import rules
from gpool.server.store.operations.tasks import submissions
from gpool.server.store.protocol import Store
from gpool.server.wakeups import Wake

REUSED_FOR = Span(5 * SECOND)
"""Age up to which simulated schedules are reused."""

_KEPT_ARRIVALS = 400
_MAX_OPEN = 10_000  # forecasts whose outcome is awaited


class PlannerInputs(Protocol):
    state: State
    policy: ActivePolicy


@dataclass(frozen=True, slots=True)
class Estimate:
    """Forecast start, and the range that holds the start of eight tasks in ten."""

    at: Instant
    first: Instant
    last: Instant


@dataclass(frozen=True, slots=True)
class _Simulated:
    at: Instant
    policy: Policy
    courses: Sequence[SimulatedSchedule]


class Forecasts:
    def __init__(self, store: Store) -> None:
        self.times = RunTimes()
        self._store = store
        self._arrived: deque[tuple[Instant, Shape]] = deque(maxlen=_KEPT_ARRIVALS)
        self._calibration = Calibration()
        self._open: dict[TaskId, StatedForecast] = {}
        self._simulated: _Simulated | None = None
        self._simulating = asyncio.Lock()

    # ---- observations

    def arrived(self, shape: Shape, at: Instant) -> None:
        """Record one arrival per submission: the tasks of a batch arrive together."""
        self._arrived.append((at, shape))

    def ended(self, shape: Shape, durations: Sequence[int]) -> None:
        for duration in durations[-50:]:
            self.times.observe(shape, Span(duration))

    def started(self, tasks: Sequence[TaskId], now: Instant) -> None:
        if self._open:
            for task in tasks:
                told = self._open.pop(task, None)
                if told is not None:
                    self._calibration.note(told, Span(now - told.at))

    def gone(self, tasks: Sequence[TaskId]) -> None:
        """Drop forecasts of cancelled tasks: they have no outcome."""
        for task in tasks:
            self._open.pop(task, None)

    # ---- forecasts

    async def question(self, inputs: PlannerInputs, now: Instant) -> ForecastQuestion:
        since = await self._store.read(rules.held_since())
        snapshot = take(inputs.state)
        return ForecastQuestion(snapshot, now, self.times.copy(), since, tuple(self._arrived))

    async def estimate(
        self, inputs: PlannerInputs, now: Instant, task: TaskId, ahead: int
    ) -> Estimate | None:
        if self.times.is_empty:
            return None
        simulated = await self._schedules(inputs, now)
        found = waits(simulated.courses, task, ahead, simulated.at)
        if found is None:
            return None
        told = self._calibration.told(found[len(found) // 2], simulated.at)
        if len(self._open) < _MAX_OPEN:
            self._open.setdefault(task, told)
        return _estimate(told.range, simulated.at, now)

    async def estimate_new(
        self, inputs: PlannerInputs, now: Instant, shape: Shape
    ) -> Estimate | None:
        """Expected start of a task that is submitted now; None: no run times are known, or it never starts."""
        if self.times.is_empty:
            return None
        asked, policy = await self.question(inputs, now), inputs.policy
        new = TasksQueued(shape, (QueuedTask(NEW_TASK, 0, now),))
        snapshot = replace(asked.snapshot, queued=(*asked.snapshot.queued, new))
        asked = replace(asked, snapshot=snapshot, wanted=frozenset({NEW_TASK}))
        async with self._simulating:
            found = await asyncio.to_thread(courses, asked, policy.current, policy.orders)
        told = waits(found, NEW_TASK, inputs.state.queued_count, now)
        if told is None:
            return None
        return _estimate(self._calibration.told(told[len(told) // 2], now).range, now, now)

    async def _schedules(self, inputs: PlannerInputs, now: Instant) -> _Simulated:
        async with self._simulating:
            known, policy = self._simulated, inputs.policy.current
            if known is None or known.policy != policy or not 0 <= now - known.at < REUSED_FOR:
                asked = await self.question(inputs, now)
                found = await asyncio.to_thread(courses, asked, policy, inputs.policy.orders)
                known = self._simulated = _Simulated(now, policy, found)
            return known


def _estimate(wait: Range, at: Instant, now: Instant) -> Estimate:
    middle, low, high = (
        Instant(max(now, at + each)) for each in (wait.middle, wait.low, wait.high)
    )
    return Estimate(middle, low, high)


log = get_logger(__name__)

MAX_TASKS = 100_000
"""Tasks read from the store."""

CPU_S = 1800
"""Processor time of the training process; then the kernel ends it."""

_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class TrainingSet(msgspec.Struct, frozen=True):
    """A pool and the tasks submitted to it, oldest first: (index in `shapes`, number of tasks)."""

    nodes: tuple[Node, ...]
    shapes: tuple[Shape, ...]
    arrivals: tuple[tuple[int, int], ...]
    at: Instant

    @classmethod
    def of(cls, nodes: tuple[Node, ...], came: list[tuple[Shape, int]], at: Instant) -> TrainingSet:
        indexes: dict[Shape, int] = {}
        found = tuple((indexes.setdefault(shape, len(indexes)), count) for shape, count in came)
        return cls(nodes, tuple(indexes), found, at)

    def best_pricing(self) -> Learnt | None:
        came = [self.shapes[index] for index, count in self.arrivals for _ in range(count)]
        return learn(self.nodes, came, self.at)


class TrainingRequests:
    def __init__(self) -> None:
        self.wake = Wake()
        self._is_open = False

    def ask(self) -> None:
        self._is_open = True
        self.wake.call()

    def take(self) -> bool:
        is_open, self._is_open = self._is_open, False
        return is_open


def set_metrics(metrics: Metrics, learnt: Learnt | None) -> None:
    if learnt is not None:
        plain = learnt.of(PLAIN)
        signals = metrics.signals
        signals.learnt_at.set(learnt.at / 1e6)
        signals.replayed.labels("chosen").set(_idle(learnt))
        signals.replayed.labels("plain").set(plain if plain is not None else _idle(learnt))


def sentence(learnt: Learnt) -> str:
    plain = learnt.of(PLAIN)
    beside = "" if plain is None else f", plain fragmentation gradient descent {plain:.2f} %"
    weights = learnt.pricing.weights
    return (
        f"slots are priced by fragmentation {weights.fragmentation}, remnants {weights.remnants}, stranding "
        f"{weights.stranding} in steps of {weights.step}: on the later half of {learnt.arrivals} arrivals it leaves "
        f"{_idle(learnt):.2f} % of the GPUs idle{beside}"
    )


def _idle(learnt: Learnt) -> float:
    found = learnt.of(learnt.pricing.weights)
    assert found is not None, "the chosen pricing was replayed"
    return found


async def trained(state: State, store: Store, now: Instant) -> Learnt | None:
    """Train on the pool's GPU nodes and recent tasks; None without GPU nodes or with too few GPU tasks."""
    nodes = tuple(
        replace(entry.node, connected=True)
        for entry in state.nodes.values()
        if entry.node is not None and entry.node.offer.gpus
    )
    if not nodes:
        return None
    came = await store.read(submissions.recent_shapes(MAX_TASKS))
    asks = sum(count for shape, count in came if least_gpus(shape))
    if asks < 2 * LEAST_ARRIVALS:
        return None
    return await train_in_process(TrainingSet.of(nodes, came, now))


# ---- the process


async def train_in_process(asked: TrainingSet) -> Learnt | None:
    """None if there is too little to train on, or the process fails (the loop tries again later)."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gpool.server.scheduling.learning",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        told, errors = await process.communicate(msgspec.msgpack.encode(asked))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        log.warning(
            "pricing training failed; trying again later",
            code=process.returncode,
            error=errors.decode("utf-8", "replace")[-2000:],
        )
        return None
    return msgspec.msgpack.decode(told, type=Learnt | None)


def main() -> None:
    os.nice(19)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    asked = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=TrainingSet)
    sys.stdout.buffer.write(msgspec.msgpack.encode(asked.best_pricing()))


if __name__ == "__main__":
    main()
