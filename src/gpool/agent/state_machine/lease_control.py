"""Changes of the held leases by order of the server or the owner: granted, stopped, preempted, dropped, expired.

Pure; instructions are appended to `out`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gpool.agent.state_machine.dispatch import Dispatch
from gpool.agent.state_machine.instructions import NEVER, Instruction
from gpool.agent.state_machine.lease_queues import AgentLease, GrantTerms, LeaseQueue, Variables
from gpool.agent.state_machine.leases import AGENT_STOPPED, Leases
from gpool.agent.state_machine.outbox import Outbox
from gpool.agent.state_machine.transitions import LIVE, LeaseMove, LeaseState
from gpool.core.model import EndReason, TaskSpec
from gpool.wire.frames import HandedBack, Hold, Line, Released

SHUTDOWN_GRACE_US = 5_000_000  # between the SIGTERM of a stopping agent and the kill
RECLAIM_GRACE_US = 2_000_000  # for a task without a checkpoint: the owner waits for the GPU
NODE_ENDED_IT = frozenset({LeaseState.SHUTTING_DOWN, LeaseState.PREEMPTING})
"""States that a gang member keeps when the server stops it: this node's withdrawal is why the other members failed."""


class _GeneralEnd(NamedTuple):
    move: LeaseMove
    why: str
    states: frozenset[LeaseState]
    reason: EndReason


_EXPIRY = _GeneralEnd(
    LeaseMove.EXPIRED,
    "its lease time is over",
    frozenset({LeaseState.SENT, LeaseState.RUNNING, LeaseState.TIMING_OUT}),
    EndReason.LOST,
)
_SHUTDOWN = _GeneralEnd(LeaseMove.SHUT_DOWN, AGENT_STOPPED, LIVE, EndReason.PREEMPTED)


class LeaseControl:
    def __init__(self, outbox: Outbox, leases: Leases, dispatch: Dispatch) -> None:
        self._outbox = outbox
        self._leases = leases
        self._dispatch = dispatch

    # ---- leases arrive

    def take(
        self,
        now: int,
        grants: Iterable[Line],
        specs: Mapping[int, TaskSpec],
        secrets: Mapping[int, Variables],
        out: list[Instruction],
    ) -> None:
        """Append leases to their queues; skip known ones, return those whose spec, secrets or gang are missing."""
        touched: dict[int, LeaseQueue] = {}
        for grant in grants:
            spec = specs.get(grant.spec)
            if spec is None:
                self.decline(now, (grant,))
                continue
            number = grant.allocation.number
            queue = touched.get(number) or self._dispatch.queues.get(number) or LeaseQueue(number)
            touched[number] = queue
            known = secrets.get(grant.spec, ())
            without_gang = spec.requirements.nodes > 1 and grant.gang is None
            if without_gang or len(known) < len(spec.secrets):
                self.decline(now, (grant,))
                continue
            terms = GrantTerms(
                grant.allocation, grant.user, grant.owner, spec, known, grant.gang, grant.receipts
            )
            for lease in grant.leases:
                task, epoch = lease.task, lease.epoch
                older = self._leases.held.get(task)
                if older is not None and older.epoch >= epoch:
                    continue
                if self._leases.ended.covers(task, epoch):
                    continue
                if older is not None:  # a newer lease of the same task: the older ends first
                    self.drop(now, ((task, older.epoch),), out)
                held = AgentLease(
                    task,
                    epoch,
                    terms,
                    queue,
                    lease.payload,
                    lease.payload_sha256,
                    lease.checkpoint,
                )
                self._leases.held[task] = held
                queue.waiting.append(held)
            queue.granted_at = now
        for number, queue in touched.items():
            self._dispatch.queues[number] = queue
            self._dispatch.advance(now, queue, out)

    def decline(self, now: int, grants: Iterable[Line]) -> None:
        """Return leases that came too late, are not lent any more, or cannot be run."""
        for grant in grants:
            for lease in grant.leases:
                if lease.task not in self._leases.held:
                    self._refuse(now, HandedBack(lease.task, lease.epoch))

    def _refuse(self, now: int, report: HandedBack | Released) -> None:
        """Report a lease and remember it: its grant may still arrive and must not start."""
        if not self._leases.ended.covers(report.task, report.epoch):
            self._leases.ended.add(report.task, report.epoch)
            self._outbox.add(now, report)

    # ---- the server ends leases

    def stop(self, now: int, holds: Iterable[Hold], out: list[Instruction]) -> None:
        touched: dict[int, LeaseQueue] = {}
        for hold in holds:
            lease = self._leases.get(hold.task, hold.epoch)
            if lease is None:  # the stop overtook its grant, or the grant was lost
                self._refuse(now, Released(hold.task, hold.epoch))
                continue
            touched[lease.queue.number] = lease.queue
            if lease.state is LeaseState.QUEUED:
                self._leases.release(now, lease)
            elif lease.terms.gang is None or lease.state not in NODE_ENDED_IT:
                lease.move(now, LeaseMove.STOPPED)
        self._enforce(now, touched.values(), EndReason.CANCELLED, out)

    def preempt(
        self,
        now: int,
        holds: Iterable[Hold],
        why: str,
        out: list[Instruction],
        most_grace_us: int = NEVER,
    ) -> None:
        """Running leases get SIGTERM and grace, queued ones are returned."""
        queues: list[LeaseQueue] = []
        for hold in holds:
            lease = self._leases.get(hold.task, hold.epoch)
            if lease is None:
                self._refuse(now, HandedBack(hold.task, hold.epoch))
                continue
            queues.append(lease.queue)
            self._preempt_or_return(now, lease, why)
        self._enforce(now, queues, EndReason.PREEMPTED, out, most_grace_us)

    def drop(self, now: int, leases: Iterable[tuple[int, int]], out: list[Instruction]) -> None:
        """Drop every report too: the leases are not this node's any more."""
        touched: dict[int, LeaseQueue] = {}
        gone = set(leases)
        for task, epoch in gone:
            lease = self._leases.get(task, epoch)
            if lease is not None:
                touched[lease.queue.number] = lease.queue
                self._leases.drop(now, lease)
            else:
                self._leases.ended.add(task, epoch)
        if gone:
            self._outbox.drop(gone)
        self._enforce(now, touched.values(), EndReason.LOST, out)

    # ---- the owner, the clock or the agent's end ends leases

    def reclaim(
        self, now: int, gpus: frozenset[int] | None, why: str, out: list[Instruction]
    ) -> None:
        queues = [queue for queue in self._dispatch.queues.values() if queue.uses(gpus)]
        for queue in queues:
            for lease in (*queue.waiting, *([queue.command] if queue.command else [])):
                self._preempt_or_return(now, lease, why)
            if queue.runner is not None:
                for lease in queue.runner.sent:
                    self._preempt_or_return(now, lease, why)
                self._dispatch.end_runner(queue.runner, out)
        self._enforce(now, queues, EndReason.PREEMPTED, out, RECLAIM_GRACE_US)

    def expire(self, now: int, out: list[Instruction]) -> None:
        """The lease time is over: return queued leases, report running ones lost once ended."""
        self._outbox.drop(set(self._leases.ids()))
        self._end_all(now, _EXPIRY, out)

    def shut_down(self, now: int, out: list[Instruction]) -> None:
        """The agent stops: return queued leases; only tasks with a checkpoint get a grace."""
        self._end_all(now, _SHUTDOWN, out)

    def _end_all(self, now: int, end: _GeneralEnd, out: list[Instruction]) -> None:
        for queue in list(self._dispatch.queues.values()):
            self._leases.return_unstarted(now, list(queue.waiting), end.why)
            queue.waiting.clear()
            running = [queue.command] if queue.command is not None else []
            if queue.runner is not None:
                running += queue.runner.sent
                self._dispatch.end_runner(queue.runner, out)
            for lease in running:
                if lease.state in end.states:
                    lease.move(now, end.move, end.why)
            grace_us = 0
            if queue.command is not None and end.reason is EndReason.PREEMPTED:
                spec = queue.command.terms.spec
                grace_us = min(spec.grace, SHUTDOWN_GRACE_US) if spec.checkpoint else 0
            self._dispatch.end_command(queue, end.reason, out, grace_us)
            self._dispatch.settle(queue)

    # ---- shared

    def _preempt_or_return(self, now: int, lease: AgentLease, why: str) -> None:
        if lease.state is LeaseState.QUEUED:
            self._leases.return_unstarted(now, (lease,), why)
        elif not lease.is_ending:
            lease.move(now, LeaseMove.PREEMPTED, why)

    def _enforce(
        self,
        now: int,
        queues: Iterable[LeaseQueue],
        reason: EndReason,
        out: list[Instruction],
        most_grace_us: int = NEVER,
    ) -> None:
        for queue in list(queues):
            if any(lease.is_ending for lease in queue.waiting):
                kept = [lease for lease in queue.waiting if not lease.is_ending]
                queue.waiting.clear()
                queue.waiting.extend(kept)
            command = queue.command
            if command is not None and command.is_ending:
                spec = command.terms.spec
                grace_us = spec.grace if reason is EndReason.PREEMPTED else 0
                if not spec.checkpoint:
                    grace_us = min(grace_us, most_grace_us)
                self._dispatch.end_command(queue, reason, out, grace_us)
            self._dispatch.advance(now, queue, out)
