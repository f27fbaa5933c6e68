"""In-memory picture of the scheduling state: the fold of all committed events. The store is the source of truth.

A caller folds what it commits before its next await; the store answers in commit order, so events are folded in that
order. A rebuild reads through the writer: its rows contain all earlier commits. When a commit's outcome is unknown
(failed or cancelled) or an event contradicts the state, the picture is stale until the next pass rebuilds it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from gpool.core.errors import GpoolError
from gpool.core.ids import NodeId, SpecId, TaskId
from gpool.core.model import Instant, Merit, Node, Shape, Span
from gpool.core.scheduler.order.limits import GpuLimits
from gpool.core.scheduler.predict.run_times import model_of
from gpool.core.scheduler.state.events import (
    Event,
    Leased,
    NodeChanged,
    NodeRemoved,
    QueuedTask,
    RunTimesObserved,
    TasksPreempted,
    TasksQueued,
    TasksReleased,
    TasksWithdrawn,
)
from gpool.core.scheduler.state.operator_rules import OperatorRules
from gpool.core.scheduler.state.state import Contradiction, State, build
from gpool.server.metrics import Metrics
from gpool.server.nodes.registry import NodeRegistry
from gpool.server.scheduling.backoff import RejectedPlans
from gpool.server.scheduling.delivery import SpecCache
from gpool.server.scheduling.learning import Forecasts
from gpool.server.scheduling.policy import ActivePolicy
from gpool.server.store.operations import rules as usage_operations
from gpool.server.store.operations.leases import leases
from gpool.server.store.operations.tasks.submissions import Submission, SubmittedTasks
from gpool.server.store.protocol import Operation, Store, operation
from gpool.server.store.values import Picture, QueuedRow, Recording
from gpool.server.wakeups import Hub, Wake
from gpool.wire.frames import StopReason

log = logging.getLogger(__name__)
T = TypeVar("T")


class _Validity:
    """An invalidation during a rebuild keeps the picture stale."""

    def __init__(self) -> None:
        self.invalidations = 1
        self._answered = 0  # invalidations up to which the last rebuild is valid

    @property
    def is_stale(self) -> bool:
        return self._answered != self.invalidations

    @property
    def is_new(self) -> bool:
        return not self._answered

    def invalidate(self) -> None:
        self.invalidations += 1

    def rebuilt(self, invalidations: int) -> None:
        self._answered = invalidations


class StatePicture:
    def __init__(
        self,
        store: Store,
        nodes: NodeRegistry,
        policy: ActivePolicy,
        hub: Hub,
        metrics: Metrics,
        clock: Callable[[], Instant] | None = None,
    ) -> None:
        self.state = State()
        self.term = 0  # leadership term of the rows the state was built from
        self.changed = Wake()  # called when a pass may decide something new
        self.nodes = nodes
        self.policy = policy
        self.specs = SpecCache()
        self.rejected = RejectedPlans()
        self.forecasts = Forecasts(store)
        self.arriving = 0  # tasks being submitted, not yet folded
        self._store = store
        self._hub = hub
        self._metrics = metrics
        self._clock = clock  # None: no backoff begins, and releases carry no instant
        self._validity = _Validity()

    # ---- staleness

    @property
    def is_stale(self) -> bool:
        return self._validity.is_stale

    def invalidate(self) -> None:
        self._validity.invalidate()
        self.changed.call()

    @contextmanager
    def commit(self) -> Iterator[None]:
        try:
            yield
        except GpoolError as error:
            if error.status >= 500:  # the commit itself failed
                self.invalidate()
            raise
        except BaseException:
            self.invalidate()
            raise

    async def write(self, op: Operation[T]) -> T:
        with self.commit():
            return await self._store.write(op)

    def drop_unused_specs(self) -> None:
        if self.specs.is_oversized(len(self.state.shapes)):
            self.invalidate()

    # ---- rebuilding

    async def rebuild(self, now: Instant) -> None:
        """Take a new term and build the state from the store. Nodes that hold leases get a full lease time."""
        invalidations, is_first = self._validity.invalidations, self._validity.is_new
        self.policy.apply_rules_at(now)
        used = await self._store.read(usage_operations.usage()) if is_first else {}
        self.term, rows = await self.write(_survey(now))
        self.specs.rebuild(rows.specs, rows.teams)
        self.nodes.failed_starts.rebuild(rows.unstarted)
        state = self._built(rows)
        if is_first:
            state.shares.restore(used, now)
        else:
            state.inherit(self.state, now)
        state.shares.weights = self.policy.current.weights
        self.state = state
        self.rejected.rebuild(state)
        self._validity.rebuilt(invalidations)
        for node in _holders(rows):
            self.nodes.ensure_deadline(node, now)
        self._metrics.rebuilt.inc()

    def _built(self, rows: Picture) -> State:
        shapes, ran, shape_for = self.specs.shapes(), rows.ran, self.nodes.failed_starts.shape_for
        leased = {}
        for lease in (*(held for _, held in rows.held), *(g.lease for g in rows.gangs)):
            known = rows.since.get(lease.task)
            if known is not None and shapes[lease.spec].preemptible:
                leased_at, queued_at = known
                told = Leased(lease.epoch, queued_at, ran.get(lease.task, Span(0)))
                leased[lease.task] = (leased_at, told)
        state = build(
            (self.effective_node(row.node) for row in rows.nodes),
            (
                (shape_for(row.task, shapes[row.spec]), _queued_task(row, shapes[row.spec], ran))
                for row in rows.queued
            ),
            ((node, lease.allocation, shapes[lease.spec], lease.task) for node, lease in rows.held),
            leased,
        )
        for gang in rows.gangs:
            state.fold(gang.leased(shapes[gang.lease.spec], leased.get(gang.lease.task)))
        state.fold(TasksPreempted(rows.preempting))
        return state

    # ---- folding committed events

    def fold(self, event: Event) -> None:
        if self.is_stale:
            return
        try:
            self.state.fold(event)
        except Contradiction:
            log.exception("an event contradicts the scheduling state; rebuilding it from the store")
            self.invalidate()

    def add_submission(
        self, submitted: SubmittedTasks, submission: Submission, *, is_queued: bool = False
    ) -> None:
        """Fold new tasks, unless a proposal has queued them.

        The caller wakes the next pass (`changed`) unless it starts them itself.
        """
        shape = self.specs.add(submitted.spec_id, submission)
        at = submission.at
        if not is_queued:
            self.fold(
                TasksQueued(shape, tuple([QueuedTask(task.id, 0, at) for task in submitted.tasks]))
            )
        self.forecasts.arrived(shape, at)
        self._metrics.submitted.inc(len(submitted.tasks))

    def absorb(self, recording: Recording) -> None:
        if recording.withdrawn:
            self.fold(TasksWithdrawn(recording.withdrawn))
            self.forecasts.gone(recording.withdrawn)
            self.rejected.forget(recording.withdrawn)
        attained = _attained(self.state, recording) if recording.requeued else {}
        now = None if self._clock is None else self._clock()
        for node in self.nodes.count(recording, self.state.held, now):
            self.refresh_node(node)
        ran: Sequence[_RunTimes] = ()
        if recording.released:
            ran = _run_times(self.state, recording)  # while their allocations are known
            self.fold(TasksReleased(recording.released, Instant(0) if now is None else now))
        if recording.requeued:
            self._requeue(recording, attained)
        _count(self._metrics, recording)
        self._hub.publish(_topics(recording))
        self.nodes.stop(recording.to_stop, StopReason.CANCELLED)
        self.nodes.stop(recording.to_preempt, StopReason.PREEMPTED)
        is_freed = recording.released or recording.requeued or recording.withdrawn
        if is_freed and (self.is_stale or self.waiting):
            self.changed.call()
        if ran:  # statistics: requests that wait for these tasks are answered first
            _soon(self._observe_run_times, ran)

    def _observe_run_times(self, ran: Sequence[_RunTimes]) -> None:
        for shape, model, durations in ran:
            self.fold(RunTimesObserved(shape, len(durations), Span(sum(durations)), model))
            self.forecasts.ended(shape, durations)

    def _requeue(self, recording: Recording, attained: Mapping[TaskId, Span]) -> None:
        failed_starts = self.nodes.failed_starts
        by_spec: dict[tuple[SpecId, tuple[NodeId, ...]], list[QueuedTask]] = {}
        for task in recording.requeued:
            ran = attained.get(task.task, Span(0))
            alike = (task.spec, failed_starts.tried(task.task))
            by_spec.setdefault(alike, []).append(
                QueuedTask(task.task, task.epoch, task.queued_at, ran)
            )
        for (spec_id, _), tasks in by_spec.items():
            shape = self.specs.shape(spec_id)
            if shape is None:
                self.invalidate()
                return
            self.fold(TasksQueued(failed_starts.shape_for(tasks[0].id, shape), tuple(tasks)))

    # ---- nodes

    def node_changed(self, node: Node) -> None:
        self.fold(NodeChanged(self.effective_node(node)))
        self._hub.publish((node.id,))
        self.changed.call()

    def refresh_node(self, id_: NodeId) -> None:
        entry = self.state.nodes.get(id_)
        if entry is not None and entry.node is not None:
            self.node_changed(entry.node)

    def node_removed(self, node: NodeId) -> None:
        self.nodes.disconnect(node, "its owner removed this node")
        self.nodes.forget(node)
        self.fold(NodeRemoved(node))

    def effective_node(self, node: Node) -> Node:
        return self.nodes.annotated(self.policy.ruled(node))

    def add_loss(self, node: NodeId) -> None:
        entry = self.state.nodes.get(node)
        if entry is not None and entry.lines:
            self.nodes.add_loss(node)

    def use_reliability(self, reliability: Mapping[NodeId, Merit]) -> None:
        self.nodes.set_reliability(reliability)
        for id_, merit in reliability.items():
            entry = self.state.nodes.get(id_)
            if entry is not None and entry.node is not None and entry.node.merit != merit:
                self.fold(NodeChanged(self.effective_node(entry.node)))

    # ---- policy and time

    def use_limits(self, limits: GpuLimits) -> None:
        if self.policy.use_limits(limits):
            self.changed.call()

    def use_rules(self, rules: OperatorRules, now: Instant) -> None:
        if self.policy.use_rules(rules, now):
            self.state.shares.weights = self.policy.current.weights
            self._apply_rules(now)

    def _apply_rules(self, now: Instant) -> None:
        self.policy.apply_rules_at(now)
        known = [entry.node for entry in self.state.nodes.values() if entry.node is not None]
        for node in known:
            if self.policy.ruled(node) != node:
                self.node_changed(node)
        self.changed.call()

    def advance(self, now: Instant) -> None:
        for node in self.nodes.backoff.end_expired(now):
            self.refresh_node(node)
        if self.policy.has_due_changes(now):
            self._apply_rules(now)
        for queued in self.rejected.end_expired(now):
            self.fold(queued)

    # ---- counts

    @property
    def waiting(self) -> int:
        return self.state.queued_count + len(self.rejected)

    def add_arriving(self, count: int) -> None:
        self.arriving += count


class _RunTimes(NamedTuple):
    """Durations of tasks of one shape on one GPU model, in µs."""

    shape: Shape
    model: str
    durations: list[int]


def _run_times(state: State, recording: Recording) -> Sequence[_RunTimes]:
    seen: dict[tuple[int, str], _RunTimes] = {}
    for ended in recording.ended:
        line = state.held.get(ended.task)
        if line is not None and ended.duration > 0:
            model = model_of(state.nodes[line.node].node, line.allocation)
            which = (id(line.shape), model)
            if which not in seen:
                seen[which] = _RunTimes(line.shape, model, [])
            seen[which].durations.append(ended.duration)
    return tuple(seen.values())


def _soon(call: Callable[[T], None], argument: T) -> None:
    """Call in the loop's next iteration; at once in a tool without a loop."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        call(argument)
    else:
        loop.call_soon(call, argument)


def _queued_task(row: QueuedRow, shape: Shape, ran: Mapping[TaskId, Span]) -> QueuedTask:
    is_counted = row.epoch and shape.preemptible
    attained = ran.get(row.task, Span(0)) if is_counted else Span(0)
    return QueuedTask(row.task, row.epoch, row.queued_at, attained)


def _attained(state: State, recording: Recording) -> dict[TaskId, Span]:
    found = {}
    for task in recording.requeued:
        line = state.held.get(task.task)
        lease = line.leases.get(task.task) if line is not None else None
        if lease is not None:
            found[task.task] = Span(lease.attained + task.ran)
    return found


def _topics(recording: Recording) -> set[int]:
    topics: set[int] = set(recording.started)
    topics.update(recording.logged, recording.released, recording.withdrawn, recording.noted)
    for ended in recording.ended:
        topics.add(ended.task)
        topics.add(ended.batch)
    return topics


def _count(metrics: Metrics, recording: Recording) -> None:
    for status, count in Counter(ended.status for ended in recording.ended).items():
        metrics.ended.labels(str(status)).inc(count)
    for task in recording.requeued:
        metrics.requeued.labels(task.reason.value).inc()
    for hold in recording.unusable:
        log.warning("checkpoint of task %s (epoch %s) rejected", hold.task, hold.epoch)
    if recording.refused:
        metrics.refused.inc(len(recording.refused))


def _holders(rows: Picture) -> Iterator[NodeId]:
    yield from (node for node, _ in rows.held)
    for gang in rows.gangs:
        yield from gang.nodes


@operation
def _survey(at: Instant) -> Operation[tuple[int, Picture]]:
    term = yield from leases.take_term(at)
    picture = yield from leases.picture()
    return term, picture
