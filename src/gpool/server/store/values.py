"""Values of the operations on tasks, leases and nodes. Depends on no operation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gpool.core.gangs import GangOrder
from gpool.core.ids import BatchId, NodeId, SpecId, TaskId, UserId
from gpool.core.model import (
    Allocation,
    AttemptRow,
    Availability,
    EndReason,
    Fault,
    Instant,
    Node,
    OutputFile,
    Permission,
    Shape,
    Span,
    TaskRow,
    TaskSpec,
    TaskStatus,
)
from gpool.core.money.budgets import BudgetWarning
from gpool.core.money.transfers import TransferOutcome
from gpool.core.scheduler.order.limits import Holder
from gpool.core.scheduler.state.events import GangPart, Leased, Placement, TasksLeased
from gpool.server.store.generated_rows import TasksRecord
from gpool.wire.frames import Hold, Lease

# ---- users


@dataclass(frozen=True, slots=True)
class User:
    id: UserId
    name: str
    permissions: frozenset[Permission]
    created_at: Instant


# ---- batches


@dataclass(frozen=True, slots=True)
class Batch:
    id: BatchId
    user: UserId
    name: str
    total: int
    done: int
    closed: bool
    created_at: Instant
    team: int | None = None


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Finished task of a batch. `sequence` numbers the ends of a batch: 1, 2, … without gaps."""

    sequence: int
    position: int
    task: TaskId
    status: TaskStatus
    reason: EndReason
    exit_code: int | None
    value: bytes
    value_sha256: str
    error_text: str
    node: NodeId | None = None
    node_name: str | None = None
    node_owner: UserId | None = None  # None: never leased, a gang, or the node was removed
    printed: bool = False


# ---- sealed fields, as stored; the store never opens them


@dataclass(frozen=True, slots=True)
class DataKey:
    id: bytes
    wrapped: bytes = field(repr=False)
    created_at: Instant
    retired_at: Instant | None = None  # None: it seals new fields


@dataclass(frozen=True, slots=True)
class SealedField:
    table: str
    row: str
    column: str
    sealed: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class SealedSecrets:
    fields: Mapping[SpecId, tuple[tuple[str, bytes], ...]] = field(default_factory=dict, repr=False)
    keys: tuple[DataKey, ...] = ()


NO_SECRETS = SealedSecrets()

# ---- leases

Peers = tuple[tuple[str, int], ...]
"""(host, port) on which each member of a gang listens, by rank."""


class GangMeeting(NamedTuple):
    """The way in which the members of a gang reach each other."""

    peers: Peers = ()
    link: str = ""  # a `GangLink`; empty: relay


NO_MEETING = GangMeeting()


@dataclass(frozen=True, slots=True)
class GrantedLine:
    """The leases of a `Place` that could be granted: some or all, of a gang all."""

    place: Placement
    leases: tuple[tuple[SpecId, Lease], ...]
    meeting: GangMeeting = NO_MEETING


@dataclass(frozen=True, slots=True)
class UnfundedPlace:
    """Tasks that were not granted because `payer` cannot set `needed` micro-credits aside."""

    tasks: tuple[TaskId, ...]
    payer: Holder
    outcome: TransferOutcome
    needed: int


@dataclass(frozen=True, slots=True)
class AppliedPlan:
    lines: tuple[GrantedLine, ...]
    refused: tuple[TaskId, ...]  # not queued any more, or at another epoch
    deposed: bool = False  # another scheduler has taken the term; nothing was written
    secrets: SealedSecrets = NO_SECRETS
    unfunded: tuple[UnfundedPlace, ...] = ()  # tasks that stay queued for lack of funds
    warnings: tuple[BudgetWarning, ...] = ()


@dataclass(frozen=True, slots=True)
class HeldLease:
    task: TaskId
    epoch: int
    user: UserId
    status: TaskStatus
    spec: SpecId
    allocation: Allocation
    payload: bytes
    payload_sha256: str
    gang: HeldMember | None = None  # set: a member of a gang, and `status` is the member's


@dataclass(frozen=True, slots=True)
class HeldMember:
    rank: int
    meeting: GangMeeting
    secret_sealed: bytes = field(repr=False)
    call: GangOrder | None = None


@dataclass(frozen=True, slots=True)
class HeldGang:
    """Gang that holds allocations: the lease of rank 0, then the other members by rank."""

    node: NodeId
    lease: HeldLease
    members: tuple[GangPart, ...]

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return (self.node, *(part.node for part in self.members))

    def leased(self, shape: Shape, known: tuple[Instant, Leased] | None) -> TasksLeased:
        at, leases = (Instant(0), ()) if known is None else (known[0], (known[1],))
        lease = self.lease
        return TasksLeased(
            self.node, lease.allocation, shape, (lease.task,), self.members, at, leases
        )


# ---- ends


@dataclass(frozen=True, slots=True)
class Requeued:
    task: TaskId
    epoch: int
    spec: SpecId
    user: UserId
    queued_at: Instant
    reason: EndReason
    ran: Span  # in the attempt that ended
    node: NodeId  # of that attempt
    fault: Fault | None = None  # set: the node could not start the task
    team: int | None = None


@dataclass(frozen=True, slots=True)
class EndedTask:
    task: TaskId
    batch: BatchId
    user: UserId
    status: TaskStatus
    duration: Span  # measured by the agent
    epoch: int = 0
    team: int | None = None


class StartedTask(NamedTuple):
    task: TaskId
    epoch: int
    user: UserId
    team: int | None


@dataclass(frozen=True, slots=True)
class Recording:
    started: tuple[TaskId, ...] = ()
    ended: tuple[EndedTask, ...] = ()
    requeued: tuple[Requeued, ...] = ()
    released: tuple[TaskId, ...] = ()  # hold no allocation any more; includes `ended`, `requeued`
    withdrawn: tuple[TaskId, ...] = ()  # cancelled while queued
    to_stop: tuple[tuple[NodeId, Hold], ...] = ()  # cancelled while a node held them
    to_preempt: tuple[tuple[NodeId, Hold], ...] = ()  # asked to stop for other tasks
    logged: tuple[TaskId, ...] = ()
    noted: tuple[TaskId, ...] = ()  # reached a phase, or saved a checkpoint
    unusable: tuple[Hold, ...] = ()  # checkpoint rejected; the previous one stays
    refused: tuple[
        tuple[NodeId, Hold], ...
    ] = ()  # reported at an old epoch, or for another node's lease
    results: tuple[BatchResult, ...] = ()  # of those ended tasks that a request waits for
    begun: tuple[StartedTask, ...] = ()  # `started`, with the accounts
    overtaken: tuple[
        NodeId, ...
    ] = ()  # reported by an older connection: nothing of it was recorded

    @property
    def only_ends(self) -> bool:
        """Whether every task in it is over, or runs on: none is queued, withdrawn or to be stopped."""
        return not (self.requeued or self.withdrawn or self.to_stop or self.to_preempt)


# ---- queries


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    epoch: int
    saved_at: Instant
    size_bytes: int
    files: int


@dataclass(frozen=True, slots=True)
class AttemptNote:
    epoch: int
    note: str
    at: Instant


PREEMPTING = "preempting"
RECLAIMING = "reclaiming"
"""Asked to stop for the owner of its node, not for other tasks: the attempt is not charged."""
UNFUNDED = "unfunded"
"""Asked to stop because its max_cost, or its payer's funds or budget, is used up: the task ends."""


@dataclass(frozen=True, slots=True)
class MemberView:
    """Member of a gang's last lease; `status`: leased, running, or the reason of its end."""

    rank: int
    node: NodeId
    node_name: str | None
    allocation: Allocation
    status: str
    exit_code: int | None = None


class TaskCost(NamedTuple):
    """Micro-credits charged so far, over all attempts, and set aside beyond that."""

    charged: int
    reserved: int


@dataclass(frozen=True, slots=True)
class TaskView:
    row: TaskRow
    record: (
        TasksRecord  # the same columns as stored; `payload` is left out, in listings `value` too
    )
    spec: TaskSpec
    node_name: str | None
    outputs: tuple[OutputFile, ...]
    value: bytes
    note: str | None = None  # the last one of the attempt that a node holds
    checkpoint: SavedCheckpoint | None = None
    members: tuple[MemberView, ...] = ()  # of a gang; `row` has the node and allocation of rank 0
    node_owner: UserId | None = None  # None: as in `BatchResult`
    cost: TaskCost | None = None  # of a single task that was on a metered allocation

    @property
    def value_sha256(self) -> str:
        return self.record.value_sha256

    @property
    def log_sha256(self) -> str:
        return self.record.log_sha256

    @property
    def sequence(self) -> int:
        return self.record.sequence or 0


@dataclass(frozen=True, slots=True)
class TaskStory:
    row: TaskRow
    attempts: tuple[AttemptRow, ...]
    notes: tuple[AttemptNote, ...] = ()
    checkpoint: SavedCheckpoint | None = None


@dataclass(frozen=True, slots=True)
class LogLine:
    """Stored chunk of output. `cursor` grows with time and identifies the next page."""

    cursor: int
    epoch: int
    stream: int
    data: bytes


@dataclass(frozen=True, slots=True)
class NodeRow:
    node: Node
    last_beat_at: Instant | None
    created_at: Instant
    problems: tuple[str, ...] = ()  # for its owner to correct


@dataclass(frozen=True, slots=True)
class QueuedRow:
    task: TaskId
    epoch: int
    spec: SpecId
    user: UserId
    queued_at: Instant


@dataclass(frozen=True, slots=True)
class Picture:
    specs: tuple[tuple[SpecId, UserId, TaskSpec], ...]
    queued: tuple[QueuedRow, ...]
    held: tuple[tuple[NodeId, HeldLease], ...]
    nodes: tuple[NodeRow, ...]
    teams: Mapping[SpecId, int] = field(default_factory=dict)  # of the specs that belong to a team
    since: Mapping[TaskId, tuple[Instant, Instant]] = field(default_factory=dict)
    """(leased_at, queued_at) of held tasks."""
    ran: Mapping[TaskId, Span] = field(default_factory=dict)  # in earlier attempts
    unstarted: tuple[tuple[TaskId, NodeId], ...] = ()  # nodes that could not start the task
    preempting: tuple[TaskId, ...] = ()  # held, and asked to stop for other tasks
    gangs: tuple[HeldGang, ...] = ()  # not in `held`


@dataclass(frozen=True, slots=True)
class NodeCredentials:
    node: NodeId
    owner: UserId
    name: str
    availability: Availability
    public_key: str | None = None  # base64url; None: the node joined without a key
    may_lend: bool = (
        True  # False: its owner's account is disabled or lacks the permission `provider`
    )
