"""Leases that their node should have ended: the server ends them, and counts it against the node.

A node that sends heartbeats keeps its leases, so without a limit it could keep a task, its slot and its consumer's GPU
quota for ever. The agent ends a task at its time-out and releases a cancelled one within seconds. The server waits
longer, since an agent may have to save a checkpoint or upload outputs first:

    lease                     ends after                                       as
    running                   started + time-out + grace + `collect_s`         timed out (retried if retries are left)
    preempted                 preempted + grace + `collect_s`                  lost: queued again
    cancelled                 cancelled + `release_s`                          cancelled: its slot is free
    first of its lease queue  first seen there + time-out + grace + `collect_s`   lost: queued again

Example with the defaults `release_s` = 300 and `collect_s` = 1800: a task with a time-out of 3 s starts at 12:00:00
on a node that ignores it. The consumer sees it as timed out at 12:30:13 at the latest plus one interval of the loop;
if the consumer cancels it at 12:01:00, its GPU does not count against the quota from 12:06:00 on.

The node is told with its next heartbeat to drop the lease; a report that still comes has no effect (the epoch is over).
It gets a backoff and a loss in its reliability record. Leases of others on the node are not touched. A member of a
gang cannot be ended alone, so its node is blocked until it is lost like a silent one (`loops.BlockOverdueNodes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import SECOND, EndReason, Instant, Span, TaskSpec
from gpool.observability.logs import get_logger
from gpool.server.server import Server
from gpool.server.settings import span
from gpool.server.store.operations.leases.overdue import (
    LeaseAge,
    OverdueLease,
    end_overdue,
    old_leases,
)
from gpool.server.wakeups import Wake

log = get_logger(__name__)

KEEPS_LEASES = "kept a lease past its end"
BLOCKED = (
    "it does not end a member of a gang in time; connect again when none of its processes runs"
)
LONGEST_INTERVAL_S = 60.0
_END_AT_ONCE = 500  # leases in one write

SpecOf = Callable[[int], TaskSpec | None]


@dataclass(frozen=True, slots=True)
class ReleaseLimits:
    release: Span
    collect: Span


class LeaseClock:
    """Ages of leases by elapsed time: stored times of day, less the steps by which the clock was set forward since.

    No age is longer than this process runs: the clock may have been set while no server ran.
    """

    def __init__(self) -> None:
        self._first: Instant | None = None  # elapsed time at the first call
        self._now = self._elapsed = Instant(0)
        self._steps: list[tuple[Instant, int]] = []

    def advance(self, now: Instant, elapsed: Instant) -> None:
        if self._first is None:
            self._first = elapsed
        elif (step := (now - self._now) - (elapsed - self._elapsed)) > SECOND:
            self._steps.append((now, step))
        self._now, self._elapsed = now, elapsed

    def age(self, since: Instant) -> int:
        first = self._elapsed if self._first is None else self._first
        stepped = sum(step for at, step in self._steps if at >= since)
        return min(self._now - since - stepped, self._elapsed - first)


class LeaseLimits:
    """Finds overdue leases. Remembers since when an unstarted lease is the first of its queue; a restart forgets it."""

    def __init__(self, limits: ReleaseLimits) -> None:
        self._limits = limits
        self._clock = LeaseClock()
        self._first_since: dict[tuple[NodeId, TaskId, int], Instant] = {}

    def overdue(
        self, leases: Iterable[LeaseAge], spec_of: SpecOf, now: Instant, elapsed: Instant
    ) -> list[OverdueLease]:
        """`leases` in the order of their lease queues. Leases whose spec is unknown are left to the next call."""
        self._clock.advance(now, elapsed)
        found: list[OverdueLease] = []
        first_since: dict[tuple[NodeId, TaskId, int], Instant] = {}
        for (_, number), group in groupby(
            leases, key=lambda each: (each.node_id, each.allocation_number)
        ):
            queue = list(group)
            is_busy = any(
                each.started_at is not None or each.cancelled_at is not None for each in queue
            )
            for lease in queue:
                begun = lease.started_at
                if begun is None and number is None:
                    begun = lease.leased_at  # members are never queued behind other leases
                elif begun is None and not is_busy:
                    key = (lease.node_id, lease.id, lease.epoch)
                    begun = first_since[key] = self._first_since.get(key, now)
                    is_busy = True
                end = self._end(lease, begun, spec_of(lease.spec_id))
                if end is not None:
                    found.append(end)
        self._first_since = first_since
        return found

    def _end(
        self, lease: LeaseAge, begun: Instant | None, spec: TaskSpec | None
    ) -> OverdueLease | None:
        limits, age = self._limits, self._clock.age
        if lease.cancelled_at is not None:
            if age(lease.cancelled_at) <= limits.release:
                return None
            return _overdue(lease, EndReason.LOST, "its node did not release it")
        if spec is None:
            return None
        saving = spec.grace + limits.collect
        if lease.preempted_at is not None and age(lease.preempted_at) > saving:
            text = f"its node did not stop it within {saving // SECOND} s of its preemption"
            return _overdue(lease, EndReason.LOST, text)
        if begun is None or age(begun) <= spec.timeout + saving:
            return None
        if lease.started_at is None:
            return _overdue(lease, EndReason.LOST, "its node did not start it within its time-out")
        text = f"it ran past its time-out of {spec.timeout / SECOND:g} s; its node did not end it, so the server did"
        return _overdue(lease, EndReason.TIMED_OUT, text)


def _overdue(lease: LeaseAge, reason: EndReason, text: str) -> OverdueLease:
    return OverdueLease(lease.node_id, lease.id, lease.epoch, reason, text)


class EndOverdueLeases:
    name = "overdue_leases"

    def __init__(self, server: Server) -> None:
        self.wake = Wake()
        settings = server.settings
        self.every_s = min(LONGEST_INTERVAL_S, max(settings.tick_s, settings.release_s / 4))
        self._server = server
        limits = ReleaseLimits(span(settings.release_s), span(settings.collect_s))
        self._shortest = min(limits.release, limits.collect)
        self._limits = LeaseLimits(limits)

    async def run_once(self, now: Instant) -> None:
        server = self._server
        if server.picture.is_stale:
            return  # the specs are those of the picture
        before = Instant(now - self._shortest)
        leases = await server.store.read(old_leases(before))
        elapsed = server.nodes.lease_time(now)
        found = self._limits.overdue(leases, server.picture.specs.spec, now, elapsed)
        members = {(each.node_id, each.id) for each in leases if each.allocation_number is None}
        single = [each for each in found if (each.node, each.task) not in members]
        for first in range(0, len(single), _END_AT_ONCE):
            await self._end(single[first : first + _END_AT_ONCE], now)
        for node in dict.fromkeys(each.node for each in found if (each.node, each.task) in members):
            if server.nodes.block(node):
                log.warning("node blocked", node=node, why=BLOCKED)
            server.nodes.disconnect(node, BLOCKED, retry=True)

    async def _end(self, overdue: Sequence[OverdueLease], now: Instant) -> None:
        server = self._server
        recording = await server.write(end_overdue(overdue, server.picture.term, now))
        ended = set(recording.released)
        nodes = dict.fromkeys(each.node for each in overdue if each.task in ended)
        for node in nodes:
            server.picture.add_loss(node)
        server.nodes.backoff.blame(nodes, now, KEEPS_LEASES)
        server.picture.absorb(recording)
        for node in nodes:
            log.warning("lease ended by the server; backoff begins", node=node, why=KEEPS_LEASES)
            server.picture.refresh_node(node)
