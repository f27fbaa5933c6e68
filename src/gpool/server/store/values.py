"""What operations take and give. Plain values; the operations themselves are in `gpool.server.store.operations`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
from gpool.core.scheduler.state.events import Leased, Member, Place, TasksLeased
from gpool.server.store.sealed_values import NO_SECRETS, SealedSecrets
from gpool.wire.frames import Hold, Lease

# ---- people


@dataclass(frozen=True, slots=True)
class User:
    id: UserId
    name: str
    permissions: frozenset[Permission]
    created_at: Instant


# ---- submissions


@dataclass(frozen=True, slots=True)
class NewTask:
    id: TaskId
    position: int
    payload: bytes = b""
    payload_sha256: str = ""


@dataclass(frozen=True, slots=True)
class Submission:
    """Tasks of one spec for one batch, new or open. Artifacts it names must be there, and visible to the user."""

    batch: BatchId
    is_new_batch: bool
    closes_batch: bool
    spec_id: SpecId  # used when this user has no equal spec yet
    spec: TaskSpec
    user: UserId
    tasks: Sequence[NewTask]
    at: Instant
    team: int | None = None  # whose the tasks are; None: the user's own
    secrets: Sequence[tuple[str, bytes]] = ()  # (name, sealed for `spec_id`)
    secrets_mark: str = (
        ""  # equal for equal secrets of a user, and says nothing of them; "": never equal
    )


@dataclass(frozen=True, slots=True)
class Submitted:
    batch: BatchId
    spec_id: SpecId  # the one in force: of an equal earlier spec, if there was one
    first_position: int
    tasks: Sequence[NewTask]


@dataclass(frozen=True, slots=True)
class MissingArtifacts:
    """The submission names artifacts this user cannot see: nothing was written."""

    sha256s: tuple[str, ...]


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
    """One finished task of a batch, in the order of finishing (`sequence` 1, 2, … without gaps)."""

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
    node_owner: UserId | None = None  # None: no node had it, several had, or it was removed


# ---- leases

Peers = tuple[tuple[str, int], ...]
"""Of a gang, by rank: where each member's lane listens."""


@dataclass(frozen=True, slots=True)
class GrantedLine:
    """A `Place` as far as it could be written; a gang's is written whole."""

    place: Place
    leases: tuple[tuple[SpecId, Lease], ...]
    peers: Peers = ()


@dataclass(frozen=True, slots=True)
class AppliedPlan:
    lines: tuple[GrantedLine, ...]
    refused: tuple[TaskId, ...]  # not queued any more, or under another epoch
    deposed: bool = False  # the term is over: somebody else schedules, nothing was written
    secrets: SealedSecrets = NO_SECRETS


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease the store has open on a node."""

    task: TaskId
    epoch: int
    user: UserId
    status: TaskStatus
    spec: SpecId
    allocation: Allocation
    payload: bytes
    payload_sha256: str
    gang: HeldMember | None = None  # it is a member of one; `status` is then the member's


@dataclass(frozen=True, slots=True)
class HeldMember:
    """What a member is told of its gang; `call`: what the others and it are to do."""

    rank: int
    peers: Peers
    secret_sealed: bytes = field(repr=False)
    call: GangOrder | None = None


@dataclass(frozen=True, slots=True)
class HeldGang:
    """A gang that holds something: the task and rank 0's part of it, then the parts of the others."""

    node: NodeId
    lease: HeldLease
    members: tuple[Member, ...]

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return (self.node, *(part.node for part in self.members))

    def leased(self, shape: Shape, known: tuple[Instant, Leased] | None) -> TasksLeased:
        """The event of its having been leased; `known`: since when, where that counts."""
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
    node: NodeId  # whose doing it was
    fault: Fault | None = None  # set: it could not be started there


@dataclass(frozen=True, slots=True)
class Ended:
    task: TaskId
    batch: BatchId
    user: UserId
    status: TaskStatus
    duration: Span  # as the agent measured it


@dataclass(frozen=True, slots=True)
class Recording:
    """What a batch of reports (or an expiry, or a cancel) changed."""

    started: tuple[TaskId, ...] = ()
    ended: tuple[Ended, ...] = ()
    requeued: tuple[Requeued, ...] = ()
    released: tuple[
        TaskId, ...
    ] = ()  # leases that no longer hold their allocation (all of the above that held one too)
    withdrawn: tuple[TaskId, ...] = ()  # cancelled while queued
    to_stop: tuple[tuple[NodeId, Hold], ...] = ()  # cancelled while a node held them
    to_preempt: tuple[tuple[NodeId, Hold], ...] = ()  # asked to make room
    logged: tuple[TaskId, ...] = ()
    noted: tuple[TaskId, ...] = ()  # came to a phase, or saved a checkpoint
    unusable: tuple[Hold, ...] = ()  # whose checkpoint was not taken; the one before it stays
    refused: tuple[Hold, ...] = ()  # under an old epoch, or another node's


# ---- queries


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """The newest of a task; what is in it, only the next attempt has to know."""

    epoch: int
    saved_at: Instant
    size_bytes: int
    files: int


@dataclass(frozen=True, slots=True)
class AttemptNote:
    """What was noted while an attempt ran: a phase it came to, or `PREEMPTING`."""

    epoch: int
    note: str
    at: Instant


PREEMPTING = "preempting"


@dataclass(frozen=True, slots=True)
class MemberView:
    """One member of a gang, of its last lease; `status` is leased, running, or why it ended."""

    rank: int
    node: NodeId
    node_name: str | None
    allocation: Allocation
    status: str
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class TaskView:
    """A task with what its documents show."""

    row: TaskRow
    spec: TaskSpec
    node_name: str | None
    outputs: tuple[OutputFile, ...]
    value: bytes
    value_sha256: str
    log_sha256: str
    sequence: int = 0  # among the ended of its batch; 0 until it has ended
    note: str | None = None  # the last of its attempt, while a node has it
    checkpoint: SavedCheckpoint | None = None
    members: tuple[MemberView, ...] = ()  # of a gang; node and allocation of `row` are rank 0's
    node_owner: UserId | None = None  # None: as in `BatchResult`


@dataclass(frozen=True, slots=True)
class TaskStory:
    """For `/events` and `explain`: the row and every earlier attempt."""

    row: TaskRow
    attempts: tuple[AttemptRow, ...]
    notes: tuple[AttemptNote, ...] = ()
    checkpoint: SavedCheckpoint | None = None


@dataclass(frozen=True, slots=True)
class LogLine:
    """A stored chunk of output. `cursor` grows with time; ask for what comes after it."""

    cursor: int
    epoch: int
    stream: int
    data: bytes


@dataclass(frozen=True, slots=True)
class NodeRow:
    node: Node
    last_beat_at: Instant | None
    created_at: Instant
    problems: tuple[str, ...] = ()  # what its owner has to look at


@dataclass(frozen=True, slots=True)
class QueuedRow:
    """What the scheduling state needs of a queued task."""

    task: TaskId
    epoch: int
    spec: SpecId
    user: UserId
    queued_at: Instant


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything the scheduling state is built from."""

    specs: tuple[tuple[SpecId, UserId, TaskSpec], ...]
    queued: tuple[QueuedRow, ...]
    held: tuple[tuple[NodeId, HeldLease], ...]
    nodes: tuple[NodeRow, ...]
    teams: Mapping[SpecId, int] = field(default_factory=dict)  # of the specs that are a team's
    since: Mapping[TaskId, tuple[Instant, Instant]] = field(default_factory=dict)
    """Of what is held: when it was leased, and when queued."""
    ran: Mapping[TaskId, Span] = field(default_factory=dict)  # in attempts before
    unstarted: tuple[tuple[TaskId, NodeId], ...] = ()  # where they could not be started
    preempting: tuple[TaskId, ...] = ()  # held, and asked to make room
    gangs: tuple[HeldGang, ...] = ()  # held by several nodes at once, and not in `held`


@dataclass(frozen=True, slots=True)
class NodeCredentials:
    node: NodeId
    owner: UserId
    name: str
    availability: Availability
    public_key: str | None = None  # base64url; None: it came without one
