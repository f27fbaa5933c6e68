"""Effects of a recording beside the state: topics to wake, figures to count, run times to learn."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from gpool.core.ids import TaskId
from gpool.core.model import SECOND, Instant, Shape, Span
from gpool.core.scheduler.predict.run_times import model_of
from gpool.core.scheduler.state.state import State
from gpool.observability.logs import get_logger
from gpool.server.metrics import Metrics
from gpool.server.store.values import Recording

log = get_logger(__name__)


class ObservedRunTimes(NamedTuple):
    """Durations of tasks of one shape on one GPU model, in µs."""

    shape: Shape
    model: str
    durations: list[int]


def run_times_of(state: State, recording: Recording) -> Sequence[ObservedRunTimes]:
    seen: dict[tuple[int, str], ObservedRunTimes] = {}
    for ended in recording.ended:
        line = state.held.get(ended.task)
        if line is not None and ended.duration > 0:
            model = model_of(state.nodes[line.node].node, line.allocation)
            which = (id(line.shape), model)
            if which not in seen:
                seen[which] = ObservedRunTimes(line.shape, model, [])
            seen[which].durations.append(ended.duration)
    return tuple(seen.values())


def attained_by(state: State, recording: Recording) -> dict[TaskId, Span]:
    found = {}
    for task in recording.requeued:
        line = state.held.get(task.task)
        lease = line.leases.get(task.task) if line is not None else None
        if lease is not None:
            found[task.task] = Span(lease.attained + task.ran)
    return found


def topics_of(recording: Recording) -> set[int]:
    topics: set[int] = set(recording.started)
    topics.update(recording.logged, recording.released, recording.withdrawn, recording.noted)
    for ended in recording.ended:
        topics.add(ended.task)
        topics.add(ended.batch)
    return topics


def count_starts(metrics: Metrics, state: State, started: Sequence[TaskId], now: Instant) -> None:
    agents = metrics.signals.agents
    agents.starts.inc(len(started))
    for task in started:
        line = state.held.get(task)
        if (
            line is not None and line.count == 1 and line.since
        ):  # else it queued behind other leases
            agents.start_time.observe(max(0, now - line.since) / SECOND)


def count_recording(metrics: Metrics, recording: Recording) -> None:
    if recording.ended and log.isEnabledFor(logging.DEBUG):
        for end in recording.ended:
            log.debug("task ended", task=end.task, outcome=end.status.value)
    for status, count in Counter(ended.status for ended in recording.ended).items():
        metrics.ended.labels(str(status)).inc(count)
    observe = metrics.signals.planner.runs.observe
    for ended in recording.ended:
        if ended.duration > 0:
            observe(ended.duration / SECOND)
    for task in recording.requeued:
        metrics.requeued.labels(task.reason.value).inc()
        if task.fault is not None:
            metrics.signals.agents.failed_starts.labels(task.fault.value).inc()
    for hold in recording.unusable:
        log.warning("checkpoint rejected", task=hold.task, epoch=hold.epoch)
    if recording.refused:
        metrics.refused.inc(len(recording.refused))
