"""In-memory picture of the scheduling state: the fold of all committed events. The store is the source of truth.

A caller folds what it commits before its next await; the store answers in commit order, so events are folded in that
order. A rebuild reads through the writer: its rows contain all earlier commits. When a commit's outcome is unknown
(failed or cancelled) or an event contradicts the state, the picture is stale until the next pass rebuilds it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from gpool.core.errors import GpoolError, Unreachable
from gpool.core.ids import NodeId, SpecId, TaskId
from gpool.core.model import Instant, Merit, Node, Shape, Span
from gpool.core.scheduler.order.limits import GpuLimits
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
from gpool.observability.logs import get_logger
from gpool.server.metrics import Metrics
from gpool.server.nodes.registry import NodeRegistry
from gpool.server.scheduling.backoff import RejectedPlans
from gpool.server.scheduling.delivery import SpecCache
from gpool.server.scheduling.learning import Forecasts
from gpool.server.scheduling.policy import ActivePolicy
from gpool.server.scheduling.recordings import (
    ObservedRunTimes,
    attained_by,
    count_recording,
    count_starts,
    run_times_of,
    topics_of,
)
from gpool.server.store.operations import rules as usage_operations
from gpool.server.store.operations.leases import leases
from gpool.server.store.operations.tasks.submissions import Submission, SubmittedTasks
from gpool.server.store.protocol import Operation, Store, operation
from gpool.server.store.values import Picture, QueuedRow, Recording
from gpool.server.wakeups import Hub, Wake
from gpool.wire.frames import StopReason

log = get_logger(__name__)
T = TypeVar("T")


class _Validity:
    """An invalidation during a rebuild keeps the picture stale."""

    def __init__(self) -> None:
        self.invalidations = 1
        self.unknown_commits = 0  # without an answer: leases and stops of theirs were not sent
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
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        self.state = State()
        self.term = 0  # leadership term of the rows the state was built from; 0: of a follower
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
        self._leads = leads
        self.validity = _Validity()

    # ---- staleness

    @property
    def is_stale(self) -> bool:
        return self.validity.is_stale

    def invalidate(self) -> None:
        self.validity.invalidate()
        self.changed.call()

    @contextmanager
    def commit(self) -> Iterator[None]:
        try:
            yield
        except GpoolError as error:
            if error.status >= 500:  # the commit itself failed
                self.validity.unknown_commits += isinstance(error, Unreachable)
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
        """Build the state from the store; the leader takes a new term, and gives nodes that hold leases a full lease time."""
        invalidations, is_first = self.validity.invalidations, self.validity.is_new
        self.policy.apply_rules_at(now)
        used = await self._store.read(usage_operations.usage()) if is_first else {}
        self.term, rows = await self.write(_survey(now) if self._leads() else _followed())
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
        self.validity.rebuilt(invalidations)
        for node in _holders(rows) if self.term else ():
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

    def absorb(self, recording: Recording, *, is_own: bool = True) -> None:
        """Fold a committed recording. `is_own` False: another replica wrote it, and has counted it in its metrics."""
        if recording.withdrawn:
            self.fold(TasksWithdrawn(recording.withdrawn))
            self.forecasts.gone(recording.withdrawn)
            self.rejected.forget(recording.withdrawn)
        attained = attained_by(self.state, recording) if recording.requeued else {}
        now = None if self._clock is None else self._clock()
        if recording.started and now is not None:
            count_starts(self._metrics, self.state, recording.started, now)
        for node in self.nodes.count(recording, self.state.held, now):
            self.refresh_node(node)
        ran: Sequence[ObservedRunTimes] = ()
        if recording.released:
            ran = run_times_of(self.state, recording)  # while their allocations are known
            self.fold(TasksReleased(recording.released, Instant(0) if now is None else now))
        if recording.requeued:
            self._requeue(recording, attained)
        if is_own:
            count_recording(self._metrics, recording)
        self._hub.publish(topics_of(recording))
        self.nodes.stop(recording.to_stop, StopReason.CANCELLED)
        self.nodes.stop(recording.to_preempt, StopReason.PREEMPTED)
        is_freed = recording.released or recording.requeued or recording.withdrawn
        if is_freed and (self.is_stale or self.waiting):
            self.changed.call()
        if ran:  # statistics: requests that wait for these tasks are answered first
            _soon(self._observe_run_times, ran)

    def _observe_run_times(self, ran: Sequence[ObservedRunTimes]) -> None:
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


def _holders(rows: Picture) -> Iterator[NodeId]:
    yield from (node for node, _ in rows.held)
    for gang in rows.gangs:
        yield from gang.nodes


@operation
def _survey(at: Instant) -> Operation[tuple[int, Picture]]:
    term = yield from leases.take_term(at)
    picture = yield from leases.picture()
    return term, picture


@operation
def _followed() -> Operation[tuple[int, Picture]]:
    picture = yield from leases.picture()
    return 0, picture
