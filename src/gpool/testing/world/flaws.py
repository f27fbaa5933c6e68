"""Known bugs, planted by replacing a component of the World, which must find each.

One file because each flaw is a small class, and the table at the end names all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any, Literal, NamedTuple, TypeVar

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
from gpool.server.identity.sealer import Sealer
from gpool.server.metrics import Metrics
from gpool.server.nodes.connection import NodeChannel
from gpool.server.nodes.registry import NodeRegistry, OpenSecrets
from gpool.server.scheduling.picture import StatePicture
from gpool.server.scheduling.prices import PlanPrices
from gpool.server.scheduling.scheduler import Scheduler
from gpool.server.server import Server
from gpool.server.store.operations.leases import leases
from gpool.server.store.protocol import Operation, Relation, Row, Statement
from gpool.server.store.rows import select, values
from gpool.server.store.values import AppliedPlan, Recording
from gpool.testing.world.database import PendingOperation, SimulatedDisk
from gpool.testing.world.host import Parts
from gpool.testing.world.machine import SimulatedMachine
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
    LETS_GO_IN_SILENCE = "lets_go_in_silence"  # once a real bug
    OFFER_SAID_TOO_EARLY = "offer_said_too_early"  # once a real bug
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
    SUBMISSIONS_PLANNED_BESIDE_A_PASS = "submissions_planned_beside_a_pass"


# ---- the store


class EarlyAnswers(SimulatedDisk):
    """A crash before the commit loses acknowledged writes."""

    def executed(self, group: list[PendingOperation]) -> None:
        self._answer([asked for asked in group if self.is_early(asked)])

    def is_early(self, asked: PendingOperation) -> bool:
        return asked.error is None

    def _answer(self, group: list[PendingOperation]) -> None:
        super()._answer([asked for asked in group if not asked.future.done()])


class EarlyGrants(EarlyAnswers):
    """Sends grants before the commit that makes them durable."""

    def is_early(self, asked: PendingOperation) -> bool:
        return isinstance(asked.value, AppliedPlan)


class FreesAtCancel(SimulatedDisk):
    """Releases a cancelled lease while its attempt still runs."""

    async def write(self, operation: Operation[T]) -> T:
        return await super().write(rewritten(operation, _free_at_cancel))


def _free_at_cancel(sql: str) -> str:
    return sql.replace("SET status = 'cancelled',", "SET status = 'cancelled', holding = 0,")


class WritesInPart(SimulatedDisk):
    """Writes a gang without its last member."""

    async def write(self, operation: Operation[T]) -> T:
        return await super().write(
            replaced_rows(operation, "INSERT INTO members", lambda rows: rows[:-1])
        )


class NeverGrants(SimulatedDisk):
    async def write(self, operation: Operation[T]) -> T:
        grants = "UPDATE tasks SET status = 'leased'"
        return await super().write(replaced_rows(operation, grants, _of_one_node))


def _of_one_node(rows: Sequence[Row]) -> Sequence[Row]:
    return [row for row in rows if row[2] is not None]


class OverWithOne(SimulatedDisk):
    """Ends a gang with its first ended member; the others run on."""

    async def write(self, operation: Operation[T]) -> T:
        return await super().write(rewritten(operation, _all_members))


def _all_members(sql: str) -> str:
    return sql.replace("AND members.rank = c.rank ", "")


def replaced_rows(
    operation: Operation[T], begins: str, keep: Callable[[Sequence[Row]], Sequence[Row]]
) -> Operation[T]:
    answer: object = None
    try:
        while True:
            statement = operation.send(answer)
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


def rewritten(operation: Operation[T], rewrite: Callable[[str], str]) -> Operation[T]:
    answer: object = None
    try:
        while True:
            statement = operation.send(answer)
            sql = rewrite(statement.sql)
            if sql != statement.sql:  # others are recognised by identity
                statement = Statement(sql, statement.parameters, statement.relations)
            answer = yield statement
    except StopIteration as stop:
        value: T = stop.value
        return value


# ---- the server


class ForgetfulServer(Server):
    """Saves an idempotency key in a separate transaction, after the effect."""

    async def write(self, operation: Operation[T]) -> T:
        answers: list[Statement] = []
        value = await super().write(_without_answers(operation, answers))
        for statement in answers:
            await super().write(_run(statement))
        return value


def _without_answers(operation: Operation[T], answers: list[Statement]) -> Operation[T]:
    answer: object = None
    try:
        while True:
            statement = operation.send(answer)
            if statement.sql.startswith("INSERT INTO idempotency"):
                sql = f"{statement.sql} WHERE true ON CONFLICT DO NOTHING"
                answers.append(replace(statement, sql=sql))
                answer = []
            else:
                answer = yield statement
    except StopIteration as stop:
        value: T = stop.value
        return value


def _run(statement: Statement) -> Operation[None]:
    yield statement


class FencelessChannel(NodeChannel):
    async def _record(self, frame: Reports) -> None:
        for recording in await self._server.write(_unfenced(frame.items, self._server.now)):
            self._server.picture.absorb(recording)
        if not self.closed:
            self._send(Recorded(frame.sequence))


class _LeaseFence(NamedTuple):
    epoch: int
    node: NodeId | None


def _unfenced(items: Sequence[ReportItem], at: Instant) -> Operation[list[Recording]]:
    recordings = []
    for item in items:
        rows = yield from select(
            _LeaseFence,
            "SELECT epoch, node_id FROM tasks WHERE id = :task",
            {"task": item.task},
        )
        for epoch, node in rows:
            if node is not None:
                current = msgspec.structs.replace(item, epoch=epoch)
                recordings.append((yield from leases.record([(node, (current,))], at)))
    return recordings


class GangFencelessChannel(NodeChannel):
    """Accepts every report of a gang's member as one of the current epoch."""

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
        sql = "SELECT epoch FROM gangs WHERE task_id = :task"
        for epoch in (yield from values(int, sql, {"task": task})):
            found[task] = epoch
    return found


class HastyChannel(NodeChannel):
    """Acknowledges reports before they are recorded."""

    async def _record(self, frame: Reports) -> None:
        if not self.closed:
            self._send(Recorded(frame.sequence))
        now = self._server.now
        self._server.picture.absorb(
            await self._server.write(leases.record([(self.node, frame.items)], now))
        )


class DeafChannel(NodeChannel):
    """Does not repeat grants that a connecting agent never received."""

    _greets = False

    async def greet(self, hello: Hello) -> None:
        self._greets = True
        await super().greet(hello)
        self._greets = False

    def grant(
        self, lines: Iterable[Line], spec_of: Callable[[int], TaskSpec | None], secrets: OpenSecrets
    ) -> None:
        if not self._greets:
            super().grant(lines, spec_of, secrets)


class EarlyExpiry(NodeRegistry):
    """Expires a node after half of its lease time."""

    def extend_deadline(
        self,
        node: NodeId,
        now: Instant,
        heard_at: Instant | None = None,  # noqa: ARG002 - as the registry's
    ) -> None:
        self._deadlines[node] = Instant(now + Span(self._ttl // 2))


class ExpiryAtRestart(NodeRegistry):
    def ensure_deadline(self, node: NodeId, now: Instant) -> None:
        self._deadlines.setdefault(node, Instant(now - 1))


class ReleasesAtCancel(StatePicture):
    def absorb(self, recording: Recording, *, is_own: bool = True) -> None:
        stopped = tuple(TaskId(hold.task) for _, hold in recording.to_stop)
        super().absorb(replace(recording, released=recording.released + stopped), is_own=is_own)


class ForgetsRequeued(StatePicture):
    def fold(self, event: SchedulingEvent) -> None:
        if not (isinstance(event, TasksQueued) and any(task.epoch for task in event.tasks)):
            super().fold(event)


class ForgetsMembers(StatePicture):
    """Counts only a gang's first node as held."""

    def fold(self, event: SchedulingEvent) -> None:
        super().fold(replace(event, members=()) if isinstance(event, TasksLeased) else event)


class OpenLock(asyncio.Lock):
    """Excludes nobody."""

    def locked(self) -> bool:
        return False

    async def acquire(self) -> Literal[True]:
        return True

    def release(self) -> None:
        return


class UnlockedScheduler(Scheduler):
    """Plans a submission while a pass waits for its commit: both take the same capacity."""

    def __init__(
        self,
        picture: StatePicture,
        sealer: Sealer,
        metrics: Metrics,
        prices: PlanPrices | None = None,
    ) -> None:
        super().__init__(picture, sealer, metrics, prices)
        self.planning = OpenLock()


# ---- the agent


class ClingingAgentState(AgentState):
    """Ignores its lease deadline."""

    def _expire(self, now: int, out: list[Instruction]) -> None:  # noqa: ARG002
        self._timer.deadline = NEVER


class SilentAgentState(AgentState):
    """Releases its leases without reporting it."""

    def _expire(self, now: int, out: list[Instruction]) -> None:
        leases = self._leases.ids()
        super()._expire(now, out)
        self._control.drop(now, leases, out)


class ReceiptAgentState(AgentState):
    """Counts its lease time from the confirmation of a heartbeat, not from its sending."""

    def handle(self, now: int, event: Event) -> list[Instruction]:
        timer = self._timer
        before = timer.confirmed_at
        out = super().handle(now, event)
        if timer.confirmed_at is not None and timer.confirmed_at != before:
            timer.confirmed_at = now
            timer.deadline = now + timer.term
        return out


class RestartingAgentState(AgentState):
    """Forgets ended leases: a late copy of their grant starts them again."""

    def handle(self, now: int, event: Event) -> list[Instruction]:
        if isinstance(event, FrameArrived) and isinstance(event.frame, Grants):
            self._leases.ended = EndedLeases()
        return super().handle(now, event)


class LyingAgentState(AgentState):
    """Reports `Released` first and kills afterwards."""

    def handle(self, now: int, event: Event) -> list[Instruction]:
        if isinstance(event, FrameArrived) and isinstance(event.frame, Stop):
            for hold in event.frame.holds:
                if (hold.task, hold.epoch) in self._leases.ids():
                    self._outbox.add(now, Released(hold.task, hold.epoch))
        return super().handle(now, event)


class OnceAgentState(AgentState):
    """Does not repeat unrecorded reports after a reconnect."""

    def handle(self, now: int, event: Event) -> list[Instruction]:
        if isinstance(event, FrameArrived) and not self._connection.welcomed:
            self._outbox._batches.clear()
        return super().handle(now, event)


class DeafToOwner(AgentState):
    """Considers an offer sent that changed between Hello and Welcome."""

    def _send_offer(self, out: list[Instruction]) -> None:
        super()._send_offer(out)
        self._connection.sent_offer = self._offer


class BlamingAgentState(AgentState):
    """Reports a preempted attempt as failed."""

    def handle(self, now: int, event: Event) -> list[Instruction]:
        if isinstance(event, CommandEnded) and event.reason is EndReason.PREEMPTED:
            event = replace(event, reason=EndReason.EXITED, exit_code=137)
        return super().handle(now, event)


class HastyAgentState(AgentState):
    """Reports the end of a preempted attempt before it ends."""

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
    """Reports the first checkpoint of a lease again after the second."""

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


class BlankMachine(SimulatedMachine):
    def start_command(self, order: StartCommand) -> None:
        super().start_command(replace(order, checkpoint=()))


class CarelessChannel(NodeChannel):
    """Acknowledges checkpoints and stores none."""

    async def _record(self, frame: Reports) -> None:
        kept = tuple(item for item in frame.items if not isinstance(item, Checkpointed))
        await super()._record(msgspec.structs.replace(frame, items=kept))


class UndeadMachine(SimulatedMachine):
    def _die(self, task: int, epoch: int) -> int:
        self._loop.after_us(
            self._dice.between(1_000_000, 4_000_000),
            self._oracle.attempt_ended,
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
    Flaw.SERVER_EXPIRES_EARLY: {"registry": EarlyExpiry},
    Flaw.RESTART_FORGETS_TTL: {"registry": ExpiryAtRestart},
    Flaw.FREED_AT_CANCEL: {"disk": FreesAtCancel, "picture": ReleasesAtCancel},
    Flaw.RELEASED_BEFORE_DEAD: {"agent_state": LyingAgentState},
    Flaw.GRANT_STARTS_TWICE: {"agent_state": RestartingAgentState},
    Flaw.REPORTS_NOT_REPEATED: {"agent_state": OnceAgentState},
    Flaw.LOST_GRANTS_NOT_REPEATED: {"channel": DeafChannel},
    Flaw.REQUEUE_NOT_FOLDED: {"picture": ForgetsRequeued},
    Flaw.SANDBOX_OUTLIVES_AGENT: {"machine": UndeadMachine},
    Flaw.LETS_GO_IN_SILENCE: {"agent_state": SilentAgentState},
    Flaw.OFFER_SAID_TOO_EARLY: {"agent_state": DeafToOwner},
    Flaw.CHECKPOINT_NOT_RESTORED: {"machine": BlankMachine},
    Flaw.CHECKPOINT_ACKNOWLEDGED_AND_LOST: {"channel": CarelessChannel},
    Flaw.OLD_CHECKPOINT_SAID_AGAIN: {"agent_state": RepeatingAgentState},
    Flaw.PREEMPTION_COUNTED_AS_FAILURE: {"agent_state": BlamingAgentState},
    Flaw.PREEMPTED_BEFORE_DEAD: {"agent_state": HastyAgentState},
    Flaw.GANG_WRITTEN_IN_PART: {"disk": WritesInPart},
    Flaw.GANG_COUNTED_ON_ONE_NODE: {"picture": ForgetsMembers},
    Flaw.GANG_OVER_WITH_ONE_MEMBER: {"disk": OverWithOne},
    Flaw.GANG_NEVER_GRANTED: {"disk": NeverGrants},
    Flaw.GANG_FENCE_OFF: {"channel": GangFencelessChannel},
    Flaw.SUBMISSIONS_PLANNED_BESIDE_A_PASS: {"scheduler": UnlockedScheduler},
}


def parts_with(flaw: Flaw | None) -> Parts:
    return Parts() if flaw is None else replace(Parts(), **_PARTS[flaw])
