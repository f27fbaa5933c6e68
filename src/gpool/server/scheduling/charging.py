"""The loop `charging`: extends reservations, settles meters, stops tasks without funds, continues blocked ones.

A running task is warned before its reservation, or its own max_cost, is used up: it saves its checkpoint within its
grace period and ends as `out_of_funds`. Level-triggered: each interval reads what is due, so nothing waits for a message.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpool.core.ids import TaskId
from gpool.core.model import SECOND, Instant, Span
from gpool.core.money.transfers import format_credits
from gpool.core.scheduler.state.events import TasksPreempted
from gpool.observability.logs import get_logger
from gpool.server.actions import audit
from gpool.server.scheduling.prices import PlanPrices
from gpool.server.server import Server
from gpool.server.store.operations.leases import grants
from gpool.server.store.operations.money import limits, meters
from gpool.server.wakeups import Wake
from gpool.wire.frames import Hold

log = get_logger(__name__)

EVERY_S = 1.0
ROWS = 500
"""Meters in one write."""

MARGIN = Span(7 * SECOND)
"""Added to the grace period of a task that is stopped: the longest time between two looks at its reservation, and 1 s."""

CAP_MARGIN = Span(2 * SECOND)
"""The same for a task's own max_cost, which is looked at in every interval."""

SWEEP_EVERY = Span(60 * SECOND)


class ChargeTasks:
    """Runs in the leader. Without meters and blocked tasks it costs two indexed reads in each interval."""

    name = "charging"

    def __init__(self, server: Server, prices: PlanPrices | None) -> None:
        self.wake = Wake()
        self.every_s = EVERY_S
        self._server, self._prices = server, prices
        self._swept = Instant(0)
        self._stopped: dict[
            TaskId, int
        ] = {}  # epochs; a new leader asks again, which changes nothing

    async def run_once(self, now: Instant) -> None:
        server = self._server
        if server.picture.is_stale:
            return
        if now - self._swept > SWEEP_EVERY:
            self._swept = now
            if await server.store.read(meters.has_unheld()):
                await server.write(meters.close_unheld(now))
        if await server.store.read(meters.due(now)):
            while await server.write(meters.settle(now, ROWS)) >= ROWS:
                pass
            await self._extend(now)
        await self._stop_capped(now)
        await self._release_blocked(now)
        await self._record_warnings(now)

    async def _extend(self, now: Instant) -> None:
        server = self._server
        count = ROWS
        while count >= ROWS:
            found = await server.write(meters.extend(now, ROWS))
            count = found.count
            if self._prices is not None:
                self._prices.add_warnings(found.warnings)
            short = [each for each in found.short if each.outcome is not None]
            if short:
                await self._stop_short(short, now)

    async def _stop_short(self, short: Sequence[meters.ShortReservation], now: Instant) -> None:
        """Stop what runs on allocations whose reservation ends before the next look."""
        ends = {(each.node, each.number): each for each in short}
        holds = {}
        for lease in await self._server.store.read(limits.running_on(short)):
            end = ends.get((lease.node_id, lease.number))
            if end is not None and end.until <= now + self._grace(lease) + MARGIN:
                holds[lease.id] = (Hold(lease.id, lease.epoch), str(end.outcome))
        await self._stop(holds, now)

    async def _stop_capped(self, now: Instant) -> None:
        holds = {}
        for task, leases in (await self._server.store.read(limits.capped_leases())).items():
            ends = min(limits.cap_at(lease, left) for lease, left in leases)
            lease = leases[0][0]
            if ends <= now + self._grace(lease) + CAP_MARGIN:
                holds[task] = (Hold(lease.id, lease.epoch), "max_cost")
        await self._stop(holds, now)

    def _grace(self, lease: limits.MeteredLease) -> int:
        spec = self._server.picture.specs.spec(lease.spec_id)
        return 0 if spec is None else spec.grace

    async def _stop(self, holds: dict[TaskId, tuple[Hold, str]], now: Instant) -> None:
        picture = self._server.picture
        held = picture.state.held
        new = {
            task: (hold, why)
            for task, (hold, why) in holds.items()
            if task in held and self._stopped.get(task) != hold.epoch
        }
        if not new:
            return
        kept = {task: epoch for task, epoch in self._stopped.items() if task in held}
        self._stopped = kept | {task: hold.epoch for task, (hold, _) in new.items()}
        wanted = [hold for hold, _ in new.values()]
        recording = await self._server.write(grants.stop_unfunded(wanted, picture.term, now))
        asked = tuple(dict.fromkeys(TaskId(hold.task) for _, hold in recording.to_preempt))
        for task in asked:
            log.info("task stopped: out of funds", task=task, why=new[task][1])
        picture.fold(TasksPreempted(asked))
        picture.absorb(recording)

    async def _release_blocked(self, now: Instant) -> None:
        picture = self._server.picture
        needs = picture.rejected.blocked_payers()
        if not needs:
            return
        found = await self._server.store.read(limits.funds(needs, now))
        able = {
            payer for payer, need in needs.items() if payer in found and found[payer].allows(need)
        }
        for queued in picture.rejected.release_payers(able):
            picture.fold(queued)
        if able:
            picture.changed.call()

    async def _record_warnings(self, now: Instant) -> None:
        while self._prices is not None and self._prices.warnings:
            warning = self._prices.warnings.popleft()
            spent, cap = format_credits(warning.spent), format_credits(warning.cap)
            log.warning("budget level reached", level=warning.level.value, spent=spent, cap=cap)
            facts = {"level": warning.level.value, "spent": spent, "cap": cap}
            about = f"account:{warning.account}"
            await audit.note(self._server, audit.entry(now, None, "budget.warning", about, **facts))
