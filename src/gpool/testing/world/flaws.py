"""Known bugs, planted by putting a broken part in the place of a real one. Each must be found: else the World is blind.

No flaw is an `if` in production code. `parts_with(flaw)` gives what a World is built from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from gpool.agent.state_machine.agent_state import AgentState
from gpool.agent.state_machine.instructions import (
    NEVER,
    CommandCheckpointed,
    CommandEnded,
    Event,
    FrameArrived,
    Instruction,
    StartCommand,
)
from gpool.agent.state_machine.lease_queues import EndedLeases
from gpool.core.ids import NodeId, TaskId
from gpool.core.model import EndReason, Instant, Offer, Span, TaskSpec
from gpool.core.scheduler.state.events import Event as SchedulingEvent
from gpool.core.scheduler.state.events import TasksLeased, TasksQueued
from gpool.server.nodes.connection import Channel, Secrets
from gpool.server.scheduling.scheduler import Scheduler
from gpool.server.server import Answered, Once, Server
from gpool.server.store.operations.leases import leases
from gpool.server.store.protocol import Operation, Relation, Row, Statement
from gpool.server.store.values import AppliedPlan, Recording, User
from gpool.testing.world.disk import Asked, Disk
from gpool.testing.world.machine import Machine
from gpool.testing.world.parts import Parts
from gpool.wire.frames import (
    Checkpointed,
    Grants,
    HandedBack,
    Hello,
    Line,
    Recorded,
    Released,
    ReportItem,
    Reports,
    Stop,
    StopReason,
)

T = TypeVar("T")


class Flaw(StrEnum):
    FENCE_OFF = "fence_off"
    ACKNOWLEDGE_BEFORE_COMMIT = "acknowledge_before_commit"
    GRANT_BEFORE_COMMIT = "grant_before_commit"
    REPORT_ACKNOWLEDGED_BEFORE_RECORDED = "report_acknowledged_before_recorded"
    KEY_SAVED_AFTER_EFFECT = "key_saved_after_effect"
    AGENT_NEVER_LETS_GO = "agent_never_lets_go"
    LEASE_COUNTED_FROM_RECEIPT = "lease_counted_from_receipt"
    SERVER_EXPIRES_EARLY = "server_expires_early"
    RESTART_FORGETS_TTL = "restart_forgets_ttl"
    FREED_AT_CANCEL = "freed_at_cancel"
    RELEASED_BEFORE_DEAD = "released_before_dead"
    GRANT_STARTS_TWICE = "grant_starts_twice"
    REPORTS_NOT_REPEATED = "reports_not_repeated"
    LOST_GRANTS_NOT_REPEATED = "lost_grants_not_repeated"
    REQUEUE_NOT_FOLDED = "requeue_not_folded"
    SANDBOX_OUTLIVES_AGENT = "sandbox_outlives_agent"
    LETS_GO_IN_SILENCE = "lets_go_in_silence"  # this one was real once
    OFFER_SAID_TOO_EARLY = "offer_said_too_early"  # this one, too
    CHECKPOINT_NOT_RESTORED = "checkpoint_not_restored"
    CHECKPOINT_ACKNOWLEDGED_AND_LOST = "checkpoint_acknowledged_and_lost"
    OLD_CHECKPOINT_SAID_AGAIN = "old_checkpoint_said_again"
    PREEMPTION_COUNTED_AS_FAILURE = "preemption_counted_as_failure"
    PREEMPTED_BEFORE_DEAD = "preempted_before_dead"
    GANG_WRITTEN_IN_PART = "gang_written_in_part"
    GANG_COUNTED_ON_ONE_NODE = "gang_counted_on_one_node"
    GANG_OVER_WITH_ONE_MEMBER = "gang_over_with_one_member"
    GANG_NEVER_GRANTED = "gang_never_granted"
    GANG_FENCE_OFF = "gang_fence_off"


# ---- the store


class EarlyAnswers(Disk):
    """Answers before the commit: a crash in between takes back what was promised."""

    def executed(self, group: list[Asked]) -> None:
        self._answer([asked for asked in group if self.is_early(asked)])

    def is_early(self, asked: Asked) -> bool:
        return asked.error is None

    def _answer(self, group: list[Asked]) -> None:
        super()._answer([asked for asked in group if not asked.future.done()])


class EarlyGrants(EarlyAnswers):
    """Only plans are answered early: leases are sent that may never have been."""

    def is_early(self, asked: Asked) -> bool:
        return isinstance(asked.value, AppliedPlan)


class FreesAtCancel(Disk):
    """A cancelled lease holds nothing from the moment of the cancel, whatever still runs."""

    async def write(self, operation: Operation[T]) -> T:
        return await super().write(_rewritten(operation, _free_at_cancel))


def _free_at_cancel(sql: str) -> str:
    return sql.replace("SET status = 'cancelled',", "SET status = 'cancelled', holding = 0,")


class WritesInPart(Disk):
    """Leaves the last member out when it writes a gang."""

    async def write(self, operation: Operation[T]) -> T:
        return await super().write(_with(operation, "INSERT INTO members", lambda rows: rows[:-1]))


class NeverGrants(Disk):
    """Writes no grant of a gang, which has no node of its own; it stays queued."""

    async def write(self, operation: Operation[T]) -> T:
        grants = "UPDATE tasks SET status = 'leased'"
        return await super().write(_with(operation, grants, _of_one_node))


def _of_one_node(rows: Sequence[Row]) -> Sequence[Row]:
    return [row for row in rows if row[2] is not None]


class OverWithOne(Disk):
    """Takes a gang for over once one of its members is: the others run on."""

    async def write(self, operation: Operation[T]) -> T:
        return await super().write(_rewritten(operation, _all_members))


def _all_members(sql: str) -> str:
    return sql.replace("AND members.rank = c.rank ", "")


def _with(
    operation: Operation[T], begins: str, keep: Callable[[Sequence[Row]], Sequence[Row]]
) -> Operation[T]:
    """Statements that begin so are given only some of their rows."""
    answer: list[Row] | None = None
    try:
        while True:
            statement = operation.send(answer)  # type: ignore[arg-type]
            if statement.sql.startswith(begins):
                kept = {
                    name: Relation(relation.columns, keep(relation.rows))
                    for name, relation in statement.relations.items()
                }
                statement = Statement(statement.sql, statement.parameters, kept)
            answer = yield statement
    except StopIteration as stop:
        value: T = stop.value
        return value


def _rewritten(operation: Operation[T], rewrite: Callable[[str], str]) -> Operation[T]:
    answer: list[Row] | None = None
    try:
        while True:
            statement = operation.send(answer)  # type: ignore[arg-type]
            answer = yield Statement(
                rewrite(statement.sql), statement.parameters, statement.relations
            )
    except StopIteration as stop:
        value: T = stop.value
        return value


# ---- the server


class ForgetfulServer(Server):
    """Saves an Idempotency-Key in a transaction of its own, after the effect."""

    async def write_once(
        self, user: User, once: Once | None, operation: Operation[T], encode: Callable[[T], bytes]
    ) -> Answered[T]:
        if once is None:
            value = await self.write(operation)
            return Answered(value, encode(value))
        saved = await self.store.read(_saved(user.id, once.key))
        if saved is not None:
            return Answered(None, saved)
        value = await self.write(operation)
        body = encode(value)
        await self.write(_save(user.id, once, body, self.now))
        return Answered(value, body)


def _saved(user: int, key: str) -> Operation[bytes | None]:
    rows = yield Statement(
        "SELECT answer FROM idempotency WHERE user_id = :user AND key = :key",
        {"user": user, "key": key},
    )
    return bytes(rows[0][0]) if rows else None


def _save(user: int, once: Once, body: bytes, at: Instant) -> Operation[None]:
    yield Statement(
        "INSERT INTO idempotency (user_id, key, fingerprint, answer, created_at) "
        "VALUES (:user, :key, :fingerprint, :answer, :at) ON CONFLICT DO NOTHING",
        {"user": user, "key": once.key, "fingerprint": once.fingerprint, "answer": body, "at": at},
    )


class FencelessChannel(Channel):
    """Takes every report for one about the current lease, whoever has it."""

    async def _record(self, frame: Reports) -> None:
        for recording in await self._server.write(_unfenced(frame.items, self._server.now)):
            self._server.scheduler.absorb(recording)
        if not self.closed:
            self._send(Recorded(frame.sequence))


def _unfenced(items: Sequence[ReportItem], at: Instant) -> Operation[list[Recording]]:
    recordings = []
    for item in items:
        rows = yield Statement(
            "SELECT epoch, node_id FROM tasks WHERE id = :task", {"task": item.task}
        )
        if rows and rows[0][1] is not None:
            current = msgspec.structs.replace(item, epoch=rows[0][0])
            recordings.append((yield from leases.record(NodeId(rows[0][1]), (current,), at)))
    return recordings


class GangFencelessChannel(Channel):
    """Takes every report about a member of a gang for one about the present epoch."""

    async def _record(self, frame: Reports) -> None:
        epochs = await self._server.write(_epochs([item.task for item in frame.items]))
        items = tuple(
            msgspec.structs.replace(item, epoch=epochs.get(item.task, item.epoch))
            for item in frame.items
        )
        await super()._record(msgspec.structs.replace(frame, items=items))


def _epochs(tasks: Sequence[int]) -> Operation[dict[int, int]]:
    found: dict[int, int] = {}
    for task in tasks:
        rows = yield Statement("SELECT epoch FROM gangs WHERE task_id = :task", {"task": task})
        if rows:
            found[task] = rows[0][0]
    return found


class HastyChannel(Channel):
    """Says `Recorded` and then records."""

    async def _record(self, frame: Reports) -> None:
        if not self.closed:
            self._send(Recorded(frame.sequence))
        now = self._server.now
        self._server.scheduler.absorb(
            await self._server.write(leases.record(self.node, frame.items, now))
        )


class DeafChannel(Channel):
    """Does not offer again, when an agent says hello, what it never got."""

    _greets = False

    async def greet(self, hello: Hello) -> None:
        self._greets = True
        await super().greet(hello)
        self._greets = False

    def grant(
        self, lines: Iterable[Line], spec_of: Callable[[int], TaskSpec | None], secrets: Secrets
    ) -> None:
        if not self._greets:
            super().grant(lines, spec_of, secrets)


class ImpatientScheduler(Scheduler):
    """Gives a node up after half the time it promised."""

    def heard_from(self, node: NodeId, now: Instant) -> None:
        self.deadlines[node] = Instant(now + Span(self._ttl // 2))


class AmnesiacScheduler(Scheduler):
    """After a restart it takes every node for lost at once."""

    async def rebuild(self, now: Instant) -> None:
        known = set(self.deadlines)
        await super().rebuild(now)
        for node in self.deadlines:
            if node not in known:
                self.deadlines[node] = Instant(now - 1)


class FreeingScheduler(Scheduler):
    """Goes with `FreesAtCancel`."""

    def absorb(self, recording: Recording) -> None:
        stopped = tuple(TaskId(hold.task) for _, hold in recording.to_stop)
        super().absorb(replace(recording, released=recording.released + stopped))


class LosingScheduler(Scheduler):
    """Does not fold what came back to the queue."""

    def fold(self, event: SchedulingEvent) -> None:
        if not (isinstance(event, TasksQueued) and any(task.epoch for task in event.tasks)):
            super().fold(event)


class ForgetfulOfMembers(Scheduler):
    """Takes only a gang's first node for held."""

    def fold(self, event: SchedulingEvent) -> None:
        super().fold(replace(event, members=()) if isinstance(event, TasksLeased) else event)


# ---- the agent


class ClingingAgentState(AgentState):
    """Never lets go."""

    def _expire(self, now: int, out: list[Instruction]) -> None:  # noqa: ARG002
        self._timer.deadline = NEVER


class SilentAgentState(AgentState):
    """Lets go of its leases and tells nobody."""

    def _expire(self, now: int, out: list[Instruction]) -> None:
        leases = self._leases.ids()
        super()._expire(now, out)
        self._control.drop(now, leases, out)


class ReceiptAgentState(AgentState):
    """Counts its lease time from when the confirmation came, not from when the beat went."""

    def handle(self, now: int, event: Event) -> list[Instruction]:
        timer = self._timer
        before = timer.confirmed_at
        out = super().handle(now, event)
        if timer.confirmed_at is not None and timer.confirmed_at != before:
            timer.confirmed_at = now
            timer.deadline = now + timer.term
        return out


class RestartingAgentState(AgentState):
    """Forgets which leases are over: a late copy of their grant starts them again."""

    def handle(self, now: int, event: Event) -> list[Instruction]:
        if isinstance(event, FrameArrived) and isinstance(event.frame, Grants):
            self._leases.ended = EndedLeases()
        return super().handle(now, event)


class LyingAgentState(AgentState):
    """Says `Released` as soon as it is asked to stop, and kills afterwards."""

    def handle(self, now: int, event: Event) -> list[Instruction]:
        if isinstance(event, FrameArrived) and isinstance(event.frame, Stop):
            for hold in event.frame.holds:
                if (hold.task, hold.epoch) in self._leases.ids():
                    self._outbox.add(now, Released(hold.task, hold.epoch))
        return super().handle(now, event)


class OnceAgentState(AgentState):
    """Does not repeat, after a reconnect, what was not recorded."""

    def handle(self, now: int, event: Event) -> list[Instruction]:
        if isinstance(event, FrameArrived) and not self._connection.welcomed:
            self._outbox._batches.clear()
        return super().handle(now, event)


class DeafToOwner(AgentState):
    """An offer that changes between hello and welcome is taken for said."""

    def _send_offer(self, out: list[Instruction]) -> None:
        super()._send_offer(out)
        self._connection.sent_offer = self._offer


class BlamingAgentState(AgentState):
    """Reports what was preempted as killed: a failure of its own."""

    def handle(self, now: int, event: Event) -> list[Instruction]:
        if isinstance(event, CommandEnded) and event.reason is EndReason.PREEMPTED:
            event = replace(event, reason=EndReason.EXITED, exit_code=137)
        return super().handle(now, event)


class HastyAgentState(AgentState):
    """Says that a preempted attempt has ended, and ends it afterwards."""

    def handle(self, now: int, event: Event) -> list[Instruction]:
        match event:
            case FrameArrived(Stop(holds, StopReason.PREEMPTED)):
                for hold in holds:
                    if (hold.task, hold.epoch) in self._leases.ids():
                        self._outbox.add(now, HandedBack(hold.task, hold.epoch))
            case _:
                pass
        return super().handle(now, event)


class RepeatingAgentState(AgentState):
    """Says the first checkpoint of a lease again with the second."""

    def __init__(self, node_boot: str, offer: Offer) -> None:
        super().__init__(node_boot, offer)
        self._firsts: dict[tuple[int, int], CommandCheckpointed] = {}

    def handle(self, now: int, event: Event) -> list[Instruction]:
        out = super().handle(now, event)
        if isinstance(event, CommandCheckpointed):
            first = self._firsts.setdefault((event.task, event.epoch), event)
            if first is not event:
                out += super().handle(now, first)
        return out


class BlankMachine(Machine):
    """Starts every attempt with an empty directory."""

    def start_command(self, order: StartCommand) -> None:
        super().start_command(replace(order, checkpoint=()))


class CarelessChannel(Channel):
    """Acknowledges checkpoints, and keeps none."""

    async def _record(self, frame: Reports) -> None:
        kept = tuple(item for item in frame.items if not isinstance(item, Checkpointed))
        await super()._record(msgspec.structs.replace(frame, items=kept))


class UndeadMachine(Machine):
    """Its sandboxes live on when the agent dies."""

    def _die(self, task: int, epoch: int) -> int:
        self._loop.after_us(
            self._dice.between(1_000_000, 4_000_000),
            self._record.attempt_ended,
            self._node,
            task,
            epoch,
        )
        return 0


_PARTS: dict[Flaw, dict[str, Any]] = {
    Flaw.FENCE_OFF: {"channel": FencelessChannel},
    Flaw.ACKNOWLEDGE_BEFORE_COMMIT: {"disk": EarlyAnswers},
    Flaw.GRANT_BEFORE_COMMIT: {"disk": EarlyGrants},
    Flaw.REPORT_ACKNOWLEDGED_BEFORE_RECORDED: {"channel": HastyChannel},
    Flaw.KEY_SAVED_AFTER_EFFECT: {"server": ForgetfulServer},
    Flaw.AGENT_NEVER_LETS_GO: {"agent_state": ClingingAgentState},
    Flaw.LEASE_COUNTED_FROM_RECEIPT: {"agent_state": ReceiptAgentState},
    Flaw.SERVER_EXPIRES_EARLY: {"scheduler": ImpatientScheduler},
    Flaw.RESTART_FORGETS_TTL: {"scheduler": AmnesiacScheduler},
    Flaw.FREED_AT_CANCEL: {"disk": FreesAtCancel, "scheduler": FreeingScheduler},
    Flaw.RELEASED_BEFORE_DEAD: {"agent_state": LyingAgentState},
    Flaw.GRANT_STARTS_TWICE: {"agent_state": RestartingAgentState},
    Flaw.REPORTS_NOT_REPEATED: {"agent_state": OnceAgentState},
    Flaw.LOST_GRANTS_NOT_REPEATED: {"channel": DeafChannel},
    Flaw.REQUEUE_NOT_FOLDED: {"scheduler": LosingScheduler},
    Flaw.SANDBOX_OUTLIVES_AGENT: {"machine": UndeadMachine},
    Flaw.LETS_GO_IN_SILENCE: {"agent_state": SilentAgentState},
    Flaw.OFFER_SAID_TOO_EARLY: {"agent_state": DeafToOwner},
    Flaw.CHECKPOINT_NOT_RESTORED: {"machine": BlankMachine},
    Flaw.CHECKPOINT_ACKNOWLEDGED_AND_LOST: {"channel": CarelessChannel},
    Flaw.OLD_CHECKPOINT_SAID_AGAIN: {"agent_state": RepeatingAgentState},
    Flaw.PREEMPTION_COUNTED_AS_FAILURE: {"agent_state": BlamingAgentState},
    Flaw.PREEMPTED_BEFORE_DEAD: {"agent_state": HastyAgentState},
    Flaw.GANG_WRITTEN_IN_PART: {"disk": WritesInPart},
    Flaw.GANG_COUNTED_ON_ONE_NODE: {"scheduler": ForgetfulOfMembers},
    Flaw.GANG_OVER_WITH_ONE_MEMBER: {"disk": OverWithOne},
    Flaw.GANG_NEVER_GRANTED: {"disk": NeverGrants},
    Flaw.GANG_FENCE_OFF: {"channel": GangFencelessChannel},
}


def parts_with(flaw: Flaw | None) -> Parts:
    """The real parts, but for the flaw."""
    return Parts() if flaw is None else replace(Parts(), **_PARTS[flaw])
