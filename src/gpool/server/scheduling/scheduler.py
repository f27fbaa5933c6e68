"""Scheduling passes: plan on the picture, write the plan, fold the grants, deliver them to the nodes.

A plan is a proposal: the store checks each start again (`leases.apply_plan`), so a plan overtaken by a commit grants
less, never wrongly. Only `_plan` calls the planner. While nothing waits, small submissions are planned before they are
written (`propose`), so that tasks and leases are one commit; a pass and a proposal exclude each other, because the
store does not count capacity.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from time import thread_time

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import Instant
from gpool.core.scheduler.passes.plan import plan
from gpool.core.scheduler.place.index import PlacementIndex
from gpool.core.scheduler.state.events import (
    PassPlan,
    Placement,
    Preempt,
    QueuedTask,
    TasksPreempted,
    TasksQueued,
    TasksWithdrawn,
)
from gpool.core.scheduler.state.waiting import shape_of
from gpool.observability.logs import MOST_LOGGED, get_logger
from gpool.server.identity.sealer import Sealer
from gpool.server.metrics import Metrics
from gpool.server.nodes.registry import OpenSecrets
from gpool.server.scheduling import delivery
from gpool.server.scheduling.picture import StatePicture
from gpool.server.scheduling.prices import PlanPrices
from gpool.server.store.operations.leases import grants, leases
from gpool.server.store.operations.tasks.submissions import Submission
from gpool.server.store.protocol import brief
from gpool.server.store.values import AppliedPlan, GrantedLine
from gpool.wire.frames import Hold

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Proposal:
    """Starts of tasks that are about to be written, on the picture of `term`. `tasks` are in its queue already."""

    tasks: tuple[TaskId, ...]
    places: tuple[Placement, ...]
    term: int
    at: Instant


class Scheduler:
    """`prices`: of a pool whose tasks are charged."""

    def __init__(
        self,
        picture: StatePicture,
        sealer: Sealer,
        metrics: Metrics,
        prices: PlanPrices | None = None,
    ) -> None:
        self._picture = picture
        self.prices = prices
        self._sealer = sealer
        self._metrics = metrics
        self._index = PlacementIndex()
        self.planning = asyncio.Lock()  # held from a plan until its grants are folded

    async def run_once(self, now: Instant) -> int:
        async with self.planning:
            return await self._pass(now)

    async def _pass(self, now: Instant) -> int:
        picture = self._picture
        if picture.is_stale:
            await picture.rebuild(now)
        picture.advance(now)
        term = (
            picture.term
        )  # of the rows the plan is based on, whatever happens before it is written
        decided = self._plan(now)
        if decided.preemptions:
            await self._preempt(decided.preemptions, term, now)
        if not decided.places:
            return 0
        granted = await self._start(decided.places, term, now)
        self._metrics.granted.inc(granted)
        if granted and decided.is_partial:
            picture.changed.call()
        return granted

    def _plan(self, now: Instant) -> PassPlan:
        state, policy = self._picture.state, self._picture.policy
        began = thread_time()
        state.pass_time(now)
        if not state.queued_count:
            return PassPlan()
        decided = plan(state, self._index, now, policy.current, policy.orders)
        self._metrics.planning.inc(thread_time() - began)
        return decided

    async def _start(self, places: Sequence[Placement], term: int, now: Instant) -> int:
        picture = self._picture
        asked = sum(len(place.grants) for place in places)
        shared, sealed = await delivery.new_gang_secrets(self._sealer, places)
        specs = picture.specs
        funding = None if self.prices is None else self.prices.funding(places, picture.state)
        writing = leases.apply_plan(
            places, term, now, specs.with_secrets, specs.with_checkpoints, sealed, funding
        )
        applied = await picture.write(brief(writing, asked))
        if self.prices is not None:
            self.prices.add_warnings(applied.warnings)
        self._fold(places, applied, now)
        await self._deliver(applied, shared, now)
        return sum(len(line.leases) for line in applied.lines)

    # ---- starts in the commit of their submission

    def propose(self, submissions: Sequence[Submission], now: Instant) -> Proposal | None:
        """Plan tasks that are not yet written, if no task waits. The caller holds `planning` until `accept`.

        None: they wait for a pass, as do gangs, tasks with secrets, tasks that must preempt others and tasks on nodes
        with a price; the picture is as it was. The queue contains the tasks of a proposal until it is accepted or withdrawn; no pass runs meanwhile.
        """
        picture, state = self._picture, self._picture.state
        if picture.is_stale or picture.waiting or not picture.term:
            return None
        if any(each.secrets or each.spec.requirements.nodes > 1 for each in submissions):
            return None
        proposed: list[TaskId] = []
        for each in submissions:
            tasks = tuple([QueuedTask(task.id, 0, each.at) for task in each.tasks])
            state.fold(TasksQueued(shape_of(each.spec, each.user, each.team), tasks))
            proposed += [task.id for task in tasks]
        decided = self._plan(now)
        proposal = Proposal(tuple(proposed), decided.places, picture.term, now)
        is_priced = self.prices is not None and self.prices.is_any(decided.places, state)
        if decided.preemptions or not decided.places or is_priced:
            self.withdraw(proposal.tasks)
            return None
        return proposal

    def withdraw(self, tasks: tuple[TaskId, ...]) -> None:
        """Remove tasks of a proposal that were not written."""
        self._picture.fold(TasksWithdrawn(tasks))

    def accept(self, proposal: Proposal, applied: AppliedPlan) -> int:
        """Deliver and fold the starts of a written proposal, after its submissions were added."""
        self._send(applied.lines, {}, {})  # first: the node runs them while the rest is folded
        self._fold(proposal.places, applied, proposal.at)
        granted = sum(len(line.leases) for line in applied.lines)
        self._metrics.granted.inc(granted)
        return granted

    # ---- after the commit

    def _fold(self, places: Sequence[Placement], applied: AppliedPlan, now: Instant) -> None:
        picture = self._picture
        if applied.deposed:
            log.warning("another server took the scheduling term; rebuilding the picture")
            self._metrics.signals.planner.deposed.inc()
            picture.invalidate()
            return
        for line in applied.lines:
            tasks = tuple(TaskId(lease.task) for _, lease in line.leases)
            picture.forecasts.started(tasks, now)
            picture.fold(line.place.leased(tasks, now))
            for node in delivery.nodes_of(line):  # one that expired since the plan was made
                picture.nodes.ensure_deadline(node, now)
        if log.isEnabledFor(logging.DEBUG):
            _log_grants(applied)
        self._count_rejected(places, applied, now)

    def _count_rejected(
        self, places: Sequence[Placement], applied: AppliedPlan, now: Instant
    ) -> None:
        picture, counted = self._picture, self._metrics.signals.planner
        granted = {TaskId(lease.task) for line in applied.lines for _, lease in line.leases}
        counted.count_grants(places, granted, now)
        unfunded = {task for place in applied.unfunded for task in place.tasks}
        rejected = picture.rejected.count(places, granted | unfunded)
        if unfunded and not picture.is_stale:
            log.info("planned starts without funds", count=len(unfunded))
            picture.rejected.block(picture.state, applied.unfunded, now)
        if not rejected:
            return
        counted.rejected.inc(len(rejected))
        log.info("planned starts rejected", count=len(rejected), total=len(rejected) + len(granted))
        if picture.rejected.needs_rebuild(rejected):
            log.warning(
                "planned starts rejected repeatedly; rebuilding the picture", tasks=rejected[:10]
            )
            picture.invalidate()
        if not picture.is_stale:
            picture.rejected.pause(picture.state, rejected, now)

    async def _preempt(self, preemptions: Sequence[Preempt], term: int, now: Instant) -> None:
        """Ask unchanged victims to stop. They hold their slots until their nodes report the end."""
        picture = self._picture
        holds = [Hold(each.task, each.epoch) for each in preemptions]
        recording = await picture.write(grants.preempt_if_current(holds, term, now))
        asked = tuple(dict.fromkeys(TaskId(hold.task) for _, hold in recording.to_preempt))
        if len(asked) < len(holds):
            log.info("preemptions rejected", count=len(holds) - len(asked), total=len(holds))
        self._metrics.signals.planner.preempted.inc(len(asked))
        if asked:
            gainers = {each.task: each.beneficiary for each in preemptions}
            picture.fold(TasksPreempted(asked, tuple(gainers[task] for task in asked)))
        picture.absorb(recording)

    async def _deliver(
        self, applied: AppliedPlan, shared: delivery.GangSecrets, now: Instant
    ) -> None:
        """Send all grants before the next await: a cancellation must not overtake the grant it stops."""
        picture = self._picture
        secrets, undecryptable = self._sealer.opened(applied.secrets)
        lines, ended = delivery.deliverable(applied.lines, undecryptable)
        self._send(lines, shared, secrets)
        for node_id, finished in ended:
            picture.absorb(await picture.write(leases.record([(node_id, finished)], now)))

    def _send(
        self,
        lines: Sequence[GrantedLine],
        shared: delivery.GangSecrets,
        secrets: OpenSecrets,
    ) -> None:
        picture = self._picture
        by_node: dict[NodeId, list[GrantedLine]] = {}
        for line in lines:
            for node in delivery.nodes_of(line) if line.place.members else (line.place.node,):
                by_node.setdefault(node, []).append(line)
        for node_id, granted in by_node.items():
            connection = picture.nodes.connection(node_id)
            entry = picture.state.nodes.get(node_id)
            if connection is None:
                continue  # the node receives them when it connects, or they expire
            owner = entry.node.owner if entry is not None and entry.node is not None else None
            wire_lines = delivery.wire_lines(granted, node_id, owner, shared)
            connection.grant(wire_lines, picture.specs.spec, secrets)


def _log_grants(applied: AppliedPlan) -> None:
    for line in applied.lines:
        tasks = [lease.task for _, lease in line.leases]
        for node in delivery.nodes_of(line):
            log.debug("leases granted", node=node, count=len(tasks), tasks=tasks[:MOST_LOGGED])
