"""Holds the scheduling state of this server and runs its passes. The store is the truth; this is a picture of it.

Whoever commits something folds it here before the next await; the store answers in the order of its commits, so the
folds keep that order. A picture is taken through the writer too, so it has a place in that order: what was committed
before is in it, what comes after is folded onto it. When in doubt (a caller was cancelled between commit and fold, a
contradiction), folding stops and the next pass takes a new picture.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from time import thread_time
from typing import TYPE_CHECKING, TypeVar

from gpool.core.errors import GpoolError
from gpool.core.ids import NodeId, SpecId, TaskId, UserId
from gpool.core.model import Instant, Merit, Node, Shape, Span, TaskSpec
from gpool.core.scheduler.order.limits import GpuLimits
from gpool.core.scheduler.order.orders import ORDERS, Order, Policy
from gpool.core.scheduler.passes.plan import plan
from gpool.core.scheduler.predict.predictions import model_of
from gpool.core.scheduler.state.events import (
    Event,
    Leased,
    NodeChanged,
    NodeRemoved,
    Place,
    Preempt,
    QueuedTask,
    RunTimesObserved,
    TasksPreempted,
    TasksQueued,
    TasksReleased,
    TasksWithdrawn,
)
from gpool.core.scheduler.state.operator_rules import NO_RULES, Rules
from gpool.core.scheduler.state.shapes import shape_of
from gpool.core.scheduler.state.state import Contradiction, State, build
from gpool.server.identity.secrets.sealer import Sealer
from gpool.server.metrics import Metrics
from gpool.server.nodes.report_batches import Recorder
from gpool.server.scheduling import backoff, gangs, grant_delivery
from gpool.server.scheduling.failed_starts import FailedStarts
from gpool.server.scheduling.forecasts import Forecasts
from gpool.server.scheduling.rejected_plans import Refused
from gpool.server.store.operation import brief, operation
from gpool.server.store.operations.leases import leases, preemption
from gpool.server.store.operations.operators import rules
from gpool.server.store.operations.operators import rules as rules_operations
from gpool.server.store.operations.tasks.submissions import Submission, SubmittedTasks
from gpool.server.store.protocol import Operation, Store
from gpool.server.store.values import AppliedPlan, GrantedLine, Picture, QueuedRow, Recording
from gpool.server.wakeups import Hub, Wake
from gpool.wire.frames import Hold, StopReason

if TYPE_CHECKING:
    from gpool.server.nodes.connection import Channel

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_SPECS = 50_000
"""Specs remembered beyond those in use; a new picture forgets the rest."""

MAX_NAMES = 500_000
"""Names of inputs and outputs in such specs, about 100 MB."""


class Scheduler:
    def __init__(
        self,
        store: Store,
        hub: Hub,
        metrics: Metrics,
        policy: Policy,
        ttl: Span,
        sealer: Sealer,
        orders: Mapping[str, Order] = ORDERS,
        clock: Callable[[], Instant] | None = None,
        passed: Callable[[], Instant] | None = None,
    ) -> None:
        self.state = State()
        self.wake = Wake()
        self.channels: dict[NodeId, Channel] = {}
        self.heard: dict[
            NodeId, tuple[str, int]
        ] = {}  # the newest beat of each node: (boot, number)
        self.deadlines: dict[
            NodeId, Instant
        ] = {}  # when a silent node's leases may be given away, by `passed`
        self._store = store
        self._hub = hub
        self._metrics = metrics
        self.policy = policy
        self.configured = policy  # before operators changed it
        self.rules = NO_RULES
        self._ruled_at = Instant(0)
        self.merits: Mapping[NodeId, Merit] = {}
        self.lost: dict[NodeId, int] = {}  # how often nodes went away with leases, lately
        self.rests = backoff.Rests()
        self.failed_starts = FailedStarts(self.rests)
        self.forecasts = Forecasts()
        self.refused = Refused()
        self.orders = orders
        self._ttl = ttl
        self._sealer = sealer
        self._clock = clock  # None: what ends does so at the next event with a time
        self._passed = passed  # None: lease times go by the time of day
        self._term = 0
        self._doubts = 1
        self._settled = 0  # the doubt that the current picture answers
        self.arriving = 0  # tasks being submitted, not yet folded
        self._specs: dict[SpecId, tuple[UserId, TaskSpec, Shape]] = {}
        self._names = 0  # in specs remembered since the picture
        self.recorder = Recorder(self._write, self.absorb)
        self._with_secrets: set[SpecId] = set()
        self._with_checkpoints: set[SpecId] = set()

    # ---- passes

    async def run_once(self, now: Instant) -> int:
        """One pass: plan, write, fold, send. How many leases it granted."""
        if self.in_doubt:
            await self.rebuild(now)
        for node in self.rests.over(now):
            self._look_again(node)
        if self.rules.changes_between(self._ruled_at, now):
            self._lay_rules(now)
        for waiting in self.refused.let_in(now):
            self.fold(waiting)
        began = thread_time()
        self.state.pass_time(now)
        term = self._term  # of the picture it is planned on, whatever happens before it is written
        decided = plan(self.state, now, self.policy, self.orders)
        self._metrics.planning.inc(thread_time() - began)
        places = decided.places
        self._metrics.queued.set(self.waiting)
        if decided.preemptions:
            await self._preempt(decided.preemptions, term, now)
        if not places:
            return 0
        asked = sum(len(place.grants) for place in places)
        shared, sealed = await gangs.new_secrets(self._sealer, places)
        writing = leases.apply_plan(
            places, term, now, self._with_secrets, self._with_checkpoints, sealed
        )
        applied = await self._write(brief(writing, asked))
        if applied.deposed:
            log.warning("another scheduler has taken over; looking again")
            self.doubt()
            return 0
        for line in applied.lines:
            tasks = tuple(TaskId(lease.task) for _, lease in line.leases)
            self.forecasts.started(tasks, now)
            self.fold(line.place.leased(tasks, now))
            for node in gangs.nodes_of(line):  # one that was given up since the plan was made
                self.deadlines.setdefault(node, self._deadline(now))
        self._note_refused(places, applied, now)
        await self._deliver(applied, shared, now)
        granted = sum(len(line.leases) for line in applied.lines)
        self._metrics.granted.inc(granted)
        if granted and decided.is_partial:
            self.wake.call()
        return granted

    def _note_refused(self, places: Sequence[Place], applied: AppliedPlan, now: Instant) -> None:
        granted = {TaskId(lease.task) for line in applied.lines for _, lease in line.leases}
        refused = self.refused.note(places, granted)
        if not refused:
            return
        log.info("%d of %d starts were overtaken", len(refused), len(refused) + len(granted))
        if self.refused.is_doubtful(refused):
            log.warning("starts are refused again; taking a new picture: tasks %s", refused[:10])
            self.doubt()
        if not self.in_doubt:
            self.refused.keep_out(self.state, refused, now)

    async def _preempt(self, preemptions: Sequence[Preempt], term: int, now: Instant) -> None:
        """Asks those that are still as planned to make room; they hold it until their nodes say that they ended."""
        holds = [Hold(each.task, each.epoch) for each in preemptions]
        recording = await self._write(preemption.preempt_if_current(holds, term, now))
        asked = tuple(dict.fromkeys(TaskId(hold.task) for _, hold in recording.to_preempt))
        if len(asked) < len(holds):
            log.info("%d of %d preemptions had been overtaken", len(holds) - len(asked), len(holds))
        if asked:
            gainers = {each.task: each.beneficiary for each in preemptions}
            self.fold(TasksPreempted(asked, tuple(gainers[task] for task in asked)))
        self.absorb(recording)

    async def rebuild(self, now: Instant) -> None:
        """Takes a new term and a new picture; every silent node's time starts anew, so none is given up early."""
        doubt, self._ruled_at = self._doubts, now
        told = {} if self._settled else await self._store.read(rules.usage())
        self._term, picture = await self._write(_survey(now))
        teams = picture.teams
        self._specs = {
            id_: (user, spec, shape_of(spec, user, teams.get(id_)))
            for id_, user, spec in picture.specs
        }
        self._with_secrets = {id_ for id_, _, spec in picture.specs if spec.secrets}
        self._with_checkpoints = {id_ for id_, _, spec in picture.specs if spec.checkpoint}
        self.failed_starts.renewed(picture.unstarted)
        state = self._built(picture)
        if self._settled:
            state.inherit(self.state, now)
        else:
            state.shares.recall(told, now)
        state.shares.weights = self.policy.weights
        self.state = state
        self.refused.renewed(state)
        self._names = 0
        self._settled = doubt
        holding = [node for node, _ in picture.held]
        holding += [part for gang in picture.gangs for part in gang.nodes]
        for node in holding:
            self.deadlines.setdefault(node, self._deadline(now))
        self._metrics.rebuilt.inc()

    def _built(self, picture: Picture) -> State:
        specs, ran, shape_for = self._specs, picture.ran, self.failed_starts.shape_for
        leases = {}
        for lease in (*(held for _, held in picture.held), *(g.lease for g in picture.gangs)):
            known = picture.since.get(lease.task)
            if known is not None and specs[lease.spec][2].preemptible:
                leased_at, queued_at = known
                told = Leased(lease.epoch, queued_at, ran.get(lease.task, Span(0)))
                leases[lease.task] = (leased_at, told)
        state = build(
            (self._with_connection(row.node) for row in picture.nodes),
            (
                (shape_for(row.task, specs[row.spec][2]), self._queued_task(row, ran))
                for row in picture.queued
            ),
            (
                (node, lease.allocation, specs[lease.spec][2], lease.task)
                for node, lease in picture.held
            ),
            leases,
        )
        for gang in picture.gangs:
            state.fold(gang.leased(specs[gang.lease.spec][2], leases.get(gang.lease.task)))
        state.fold(TasksPreempted(picture.preempting))
        return state

    def _queued_task(self, row: QueuedRow, ran: Mapping[TaskId, Span]) -> QueuedTask:
        is_counted = row.epoch and self._specs[row.spec][2].preemptible
        attained = ran.get(row.task, Span(0)) if is_counted else Span(0)
        return QueuedTask(row.task, row.epoch, row.queued_at, attained)

    def use_limits(self, limits: GpuLimits) -> None:
        """How many GPUs users and teams may run at once, from the next pass on."""
        if limits != self.policy.limits:
            self.policy = replace(self.policy, limits=limits)
            self.wake.call()

    def use_rules(self, rules: Rules, now: Instant) -> None:
        """What operators laid upon the pool, from the next pass on."""
        configured = replace(self.configured, limits=self.policy.limits)
        policy = rules.policy_upon(configured, self.orders)
        if rules == self.rules and policy == self.policy:
            return
        self.policy, self.rules = policy, rules
        self.state.shares.weights = policy.weights
        self._lay_rules(now)

    def _lay_rules(self, now: Instant) -> None:
        self._ruled_at = now
        known = [entry.node for entry in self.state.nodes.values() if entry.node is not None]
        for node in known:
            if self.rules.upon(node, now) != node:
                self.node_changed(node)
        self.wake.call()

    def use_merits(self, merits: Mapping[NodeId, Merit]) -> None:
        """What experience says of nodes, from the next pass on."""
        self.merits = merits
        for id_, merit in merits.items():
            entry = self.state.nodes.get(id_)
            if entry is not None and entry.node is not None and entry.node.merit != merit:
                self.fold(NodeChanged(self._with_connection(entry.node)))

    def note_lost(self, node: NodeId) -> None:
        """It went silent, or forgot what it had; that is held against it if it had anything."""
        entry = self.state.nodes.get(node)
        if entry is not None and entry.lines:
            self.lost[node] = self.lost.get(node, 0) + 1

    async def since(self) -> Mapping[TaskId, Instant]:
        """Since when leases are held."""
        return await self._store.read(rules_operations.held_since())

    @property
    def waiting(self) -> int:
        """Tasks that are queued, those that are kept out of the queue for a while too."""
        return self.state.queued_count + self.refused.kept

    # ---- doubt

    @property
    def in_doubt(self) -> bool:
        return self._settled != self._doubts

    def doubt(self) -> None:
        self._doubts += 1
        self.wake.call()

    def tidy(self) -> None:
        """Forgets specs nobody needs, by taking a new picture when there are too many."""
        if len(self._specs) > MAX_SPECS + len(self.state.shapes) or self._names > MAX_NAMES:
            self.doubt()

    # ---- folding what was committed

    def fold(self, event: Event) -> None:
        if self.in_doubt:
            return
        try:
            self.state.fold(event)
        except Contradiction:
            log.exception("the scheduling state contradicts the store; taking a new picture")
            self.doubt()

    def queued(self, submitted: SubmittedTasks, submission: Submission) -> None:
        """A submission was committed."""
        shape = self._remember(submitted.spec_id, submission)
        at = submission.at
        self.fold(
            TasksQueued(shape, tuple([QueuedTask(task.id, 0, at) for task in submitted.tasks]))
        )
        self.forecasts.arrived(shape, at)
        self._metrics.submitted.inc(len(submitted.tasks))
        self.wake.call()

    def absorb(self, recording: Recording) -> None:
        """Reports, an expiry or a cancel were committed: fold them, tell those who wait, stop what was cancelled."""
        if recording.withdrawn:
            self.fold(TasksWithdrawn(recording.withdrawn))
            self.forecasts.gone(recording.withdrawn)
            self.refused.forget(recording.withdrawn)
        attained = self._attained(recording) if recording.requeued else {}
        if self._clock is not None and (
            recording.requeued or (recording.ended and self.rests.is_any)
        ):
            for node in self.rests.note(recording, self.state.held, self._clock()):
                log.warning("node %s gives back what it is given; it rests for a while", node)
                self._look_again(node)
        if self.failed_starts.is_any or recording.requeued:
            for node in self.failed_starts.note(recording, self.state.held, self._clock):
                self._look_again(node)
        if recording.released:
            if recording.ended:
                self._observe(recording)
            at = self._clock() if self._clock is not None else Instant(0)
            self.fold(TasksReleased(recording.released, at))
        if recording.requeued:
            self._requeue(recording, attained)
        self._publish(recording)
        self._stop(recording.to_stop, StopReason.CANCELLED)
        self._stop(recording.to_preempt, StopReason.PREEMPTED)
        if recording.released or recording.requeued or recording.withdrawn:
            self.wake.call()

    def _stop(self, holds: Sequence[tuple[NodeId, Hold]], reason: StopReason) -> None:
        """A node that is away is told when it connects."""
        for node, pairs in groupby(sorted(holds, key=itemgetter(0)), key=itemgetter(0)):
            channel = self.channels.get(node)
            if channel is not None:
                channel.stop(tuple(hold for _, hold in pairs), reason)

    def _observe(self, recording: Recording) -> None:
        held = self.state.held
        seen: dict[tuple[int, str], tuple[Shape, list[int]]] = {}
        for ended in recording.ended:
            line = held.get(ended.task)
            if line is not None and ended.duration > 0:
                model = model_of(self.state.nodes[line.node].node, line.allocation)
                which = (id(line.shape), model)
                seen.setdefault(which, (line.shape, []))[1].append(ended.duration)
        for (_, model), (shape, durations) in seen.items():
            self.fold(RunTimesObserved(shape, len(durations), Span(sum(durations)), model))
            self.forecasts.ended(shape, durations)

    def _look_again(self, id_: NodeId) -> None:
        entry = self.state.nodes.get(id_)
        if entry is not None and entry.node is not None:
            self.node_changed(entry.node)

    def _attained(self, recording: Recording) -> dict[TaskId, Span]:
        """What those that come back have run so far, where that counts."""
        found = {}
        for task in recording.requeued:
            line = self.state.held.get(task.task)
            lease = line.leases.get(task.task) if line is not None else None
            if lease is not None:
                found[task.task] = Span(lease.attained + task.ran)
        return found

    def _requeue(self, recording: Recording, attained: Mapping[TaskId, Span]) -> None:
        by_spec: dict[tuple[SpecId, tuple[NodeId, ...]], list[QueuedTask]] = {}
        for task in recording.requeued:
            ran = attained.get(task.task, Span(0))
            alike = (task.spec, self.failed_starts.tried(task.task))
            by_spec.setdefault(alike, []).append(
                QueuedTask(task.task, task.epoch, task.queued_at, ran)
            )
            self._metrics.requeued.labels(task.reason.value).inc()
        for (spec_id, _), tasks in by_spec.items():
            known = self._specs.get(spec_id)
            if known is None:
                self.doubt()
                return
            shape = self.failed_starts.shape_for(tasks[0].id, known[2])
            self.fold(TasksQueued(shape, tuple(tasks)))

    def _publish(self, recording: Recording) -> None:
        topics: set[int] = set(recording.started)
        topics.update(recording.logged, recording.released, recording.withdrawn, recording.noted)
        if recording.ended:
            counts: dict[str, int] = {}
            for ended in recording.ended:
                topics.add(ended.task)
                topics.add(ended.batch)
                counts[ended.status] = counts.get(ended.status, 0) + 1
            for status, count in counts.items():
                self._metrics.ended.labels(str(status)).inc(count)
        for hold in recording.unusable:
            log.warning("a checkpoint of task %s (epoch %s) was not taken", hold.task, hold.epoch)
        if recording.refused:
            self._metrics.refused.inc(len(recording.refused))
        self._hub.publish(topics)

    # ---- nodes

    def heard_from(self, node: NodeId, now: Instant) -> None:
        self.deadlines[node] = self._deadline(now)

    def _deadline(self, now: Instant) -> Instant:
        return Instant(self._lease_time(now) + self._ttl)

    def _lease_time(self, now: Instant) -> Instant:
        """What lease times are counted in. The time of day may be set forward past all of them, while every node beats and
        its agent holds on to what it has: that is no time that passed."""
        return now if self._passed is None else self._passed()

    def silent(self, now: Instant) -> Sequence[NodeId]:
        """Nodes not heard from for a whole lease time."""
        at = self._lease_time(now)
        return [node for node, deadline in self.deadlines.items() if deadline < at]

    def is_silent(self, node: NodeId, now: Instant) -> bool:
        deadline = self.deadlines.get(node)
        return deadline is not None and deadline < self._lease_time(now)

    def held_by(self, node: NodeId) -> set[TaskId]:
        """Tasks whose leases a node holds, as far as we know."""
        entry = self.state.nodes.get(node)
        if self.in_doubt or entry is None or not entry.lines:
            return set()
        return set().union(*(line.tasks for line in entry.lines.values()))

    def unstated(self, node: NodeId, stated: Sequence[TaskId]) -> set[TaskId]:
        """Tasks (no gangs) whose leases a node holds, as far as we know, and does not name."""
        return self.held_alone_by(node).difference(stated)

    def held_alone_by(self, node: NodeId) -> set[TaskId]:
        """Those of them that are no gangs: a member may have let go of what its gang still holds."""
        held = self.state.held
        return {task for task in self.held_by(node) if not held[task].members}

    def connect(self, channel: Channel, node: Node) -> None:
        self.channels[channel.node] = channel
        self._metrics.nodes.set(len(self.channels))
        self.node_changed(node)

    def forget_channel(self, channel: Channel) -> None:
        """This channel is over; a newer one of the same node is not touched."""
        if self.channels.get(channel.node) is channel:
            del self.channels[channel.node]
            self._metrics.nodes.set(len(self.channels))
            known = self.state.nodes.get(channel.node)
            if known is not None and known.node is not None:
                self.node_changed(known.node)

    def disconnect(self, node: NodeId, why: str, *, retry: bool = False) -> None:
        channel = self.channels.get(node)
        if channel is not None:
            channel.refuse("conflict", why, retry=retry)

    def node_changed(self, node: Node) -> None:
        """A node's committed row is as given; whether it is connected, we know ourselves."""
        self.fold(NodeChanged(self._with_connection(node)))
        self._hub.publish((node.id,))
        self.wake.call()

    def node_removed(self, node: NodeId) -> None:
        self.disconnect(node, "its owner removed this node")
        self.deadlines.pop(node, None)
        self.heard.pop(node, None)
        self.rests.forget(node)
        self.failed_starts.forget_node(node)
        self.fold(NodeRemoved(node))

    def _with_connection(self, node: Node) -> Node:
        connected = node.id in self.channels
        merit = self.merits.get(node.id, node.merit)
        node = self.rules.upon(node, self._ruled_at)
        resting = self.rests.why(node.id)
        if (node.connected, node.merit, node.resting) == (connected, merit, resting):
            return node
        return replace(node, connected=connected, merit=merit, resting=resting)

    # ---- specs and sending

    def _remember(self, id_: SpecId, submission: Submission) -> Shape:
        known = self._specs.get(id_)
        if known is None:
            user, spec = submission.user, submission.spec
            known = self._specs[id_] = (user, spec, shape_of(spec, user, submission.team))
            self._names += len(spec.inputs) + len(spec.outputs)
            if spec.secrets:
                self._with_secrets.add(id_)
            if spec.checkpoint:
                self._with_checkpoints.add(id_)
        return known[2]

    def _known_spec(self, id_: int) -> TaskSpec | None:
        known = self._specs.get(SpecId(id_))
        return None if known is None else known[1]

    async def _deliver(self, applied: AppliedPlan, shared: gangs.Shared, now: Instant) -> None:
        """All of it before the next await: a cancel must not overtake the grant it stops."""
        secrets, shut = self._sealer.opened(applied.secrets)
        lines, ended = (
            (applied.lines, []) if not shut else grant_delivery.without(applied.lines, shut)
        )
        by_node: dict[NodeId, list[GrantedLine]] = {}
        for line in lines:
            for node in gangs.nodes_of(line) if line.place.members else (line.place.node,):
                by_node.setdefault(node, []).append(line)
        for node_id, granted in by_node.items():
            channel = self.channels.get(node_id)
            entry = self.state.nodes.get(node_id)
            if channel is None:
                continue  # it gets them when it connects, or they expire
            owner = entry.node.owner if entry is not None and entry.node is not None else None
            lines_there = grant_delivery.wire_lines(granted, node_id, owner, shared)
            channel.grant(lines_there, self._known_spec, secrets)
        for node_id, finished in ended:
            self.absorb(await self._write(leases.record([(node_id, finished)], now)))

    async def _write(self, op: Operation[T]) -> T:
        try:
            return await self._store.write(op)
        except GpoolError as error:
            if error.status >= 500:  # the commit itself failed
                self.doubt()
            raise
        except BaseException:
            self.doubt()
            raise


@operation
def _survey(at: Instant) -> Operation[tuple[int, Picture]]:
    term = yield from leases.take_term(at)
    picture = yield from leases.picture()
    return term, picture
