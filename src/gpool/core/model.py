"""Values shared by all packages: tasks, nodes, GPUs, allocations. Frozen, without behaviour.
One file because the values refer to one another and every package imports several of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from gpool.core.gpu_health import Health
from gpool.core.ids import BatchId, GpuId, NodeId, SpecId, TaskId, UserId

Instant = NewType("Instant", int)
"""Microseconds since 1970 in UTC, by the server's clock."""

Span = NewType("Span", int)
"""Microseconds."""

SECOND = Span(1_000_000)
KIB, MIB, GIB = 1024, 1024**2, 1024**3
INLINE_LIMIT_BYTES = 64 * KIB
"""Largest function argument or value sent inside a frame; larger ones are artifacts."""


class Permission(StrEnum):
    CONSUMER = "consumer"
    PROVIDER = "provider"
    OPERATOR = "operator"


class Tier(StrEnum):
    NONE = "none"
    CONTAINER = "container"
    VM = "vm"

    @property
    def strength(self) -> int:
        return {"none": 0, "container": 1, "vm": 2}[self.value]


class Sharing(StrEnum):
    EXCLUSIVE = "exclusive"  # no sharing
    MIG = "mig"  # hardware slices: strangers may be neighbours
    MPS = (
        "mps"  # limits kept by the driver; one's fatal fault ends the others: one user's tasks only
    )
    TIMESLICE = "timeslice"  # time slices; a watchdog kills a task that exceeds its memory


class Network(StrEnum):
    NONE = "none"  # no network at all
    EGRESS = "egress"  # the public internet; never private, link-local or metadata addresses


class Engine(StrEnum):
    NONE = "none"  # the command runs on every member, with its rank in a variable
    TORCHRUN = "torchrun"
    RAY = "ray"  # a private cluster; the command runs on rank 0 only


class OnLoss(StrEnum):
    REFORM = "reform"  # requeue the whole gang
    END = "end"  # fail the gang


class Phase(StrEnum):
    """The time-out covers all phases."""

    FETCH = "fetch"  # inputs
    BUILD = "build"  # the environment
    START = "start"  # the sandbox
    RUN = "run"
    COLLECT = "collect"  # outputs


class TaskKind(StrEnum):
    COMMAND = "command"
    FUNCTION = "function"


class TaskStatus(StrEnum):
    QUEUED = "queued"
    LEASED = "leased"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in FINAL

    @property
    def text(self) -> str:
        return STATUS_TEXT[self]


FINAL = frozenset({TaskStatus.SUCCEEDED, TaskStatus.FAILED, TaskStatus.CANCELLED})
STATUS_TEXT = {
    TaskStatus.QUEUED: "waiting",
    TaskStatus.LEASED: "processing",
    TaskStatus.RUNNING: "processing",
    TaskStatus.SUCCEEDED: "completed",
    TaskStatus.FAILED: "failed",
    TaskStatus.CANCELLED: "cancelled",
}


class EndReason(StrEnum):
    """The first group is final; the second requeues the task."""

    EXITED = "exited"  # a command's own exit, any code
    RETURNED = "returned"  # a function returned a value
    RAISED = "raised"  # a function raised
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    OUT_OF_MEMORY = "out_of_memory"
    BAD_INPUT = "bad_input"  # an input artifact is missing or does not match its hash
    BAD_OUTPUT = "bad_output"  # a named output is missing, special, or over its quota
    LOSES_NODES = "loses_nodes"
    SANDBOX_FAILED = "sandbox_failed"  # a fault of gpool or the node
    NO_QUORUM = "no_quorum"  # a verified task's siblings gave different answers
    OUT_OF_FUNDS = "out_of_funds"  # its max_cost, or its payer's funds or budget, is used up

    LOST = "lost"  # the node missed its heartbeats until the lease expired
    HANDED_BACK = "handed_back"  # the agent returned it unstarted
    PREEMPTED = "preempted"
    NODE_FAILED = "node_failed"  # the node could not start it and blames itself


class Fault(StrEnum):
    """A node's own diagnosis after a failed start."""

    UNCLEAR = "unclear"  # its self-check found nothing, or did not run
    NODE = "node"  # it cannot start any sandbox of that kind at present
    PART = "part"  # a part (for example a GPU) is faulty and no longer offered


class Availability(StrEnum):
    AVAILABLE = "available"
    PAUSED = "paused"  # no new leases; running tasks continue
    DRAINING = "draining"  # no new leases; paused after the last lease ends


@dataclass(frozen=True, slots=True)
class GpuRequest:
    """Alternative of a GPU requirement: `count` whole GPUs, or (`count` 1) a slice of one by `share_milli` < 1000 (memory
    and compute alike) or by `vram_bytes`.
    """

    count: int = 1
    model: str | None = None  # normalised: letters and digits, upper case ("RTX4090")
    vendor: str | None = None  # "nvidia", "amd", "intel", "apple"
    min_memory_bytes: int | None = None
    max_memory_bytes: int | None = None
    share_milli: int = 1000
    vram_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Owners:
    """Owners whose nodes a task accepts: these users, and the members of these teams at the time of planning.

    `asked`: as the consumer wrote it ("me", "team:lab"), for messages; names may have changed since. With `node` and
    neither users nor teams, the consumer accepts anyone.
    """

    asked: str
    users: tuple[int, ...] = ()  # sorted
    teams: tuple[int, ...] = ()  # sorted
    node: int | None = None  # drawn by the server for a sibling: this node alone


@dataclass(frozen=True, slots=True)
class Requirements:
    """Hashable: equal requirements are one shape."""

    gpu: tuple[GpuRequest, ...] = ()  # alternatives, tried in order; empty: CPU only
    cpu_milli: int = 1000  # at least, with `cpu_by_gpus`
    memory_bytes: int | None = None  # None: the CPUs' part of the node's memory, at least
    disk_bytes: int | None = None
    tier: Tier = Tier.CONTAINER  # the weakest isolation the consumer accepts
    python: str | None = None  # "3.11": the minor a function was pickled with, or a recipe's
    network: Network = Network.NONE
    nodes: int = 1  # at once, each with all of the above: more than one is a gang
    labels: tuple[str, ...] = ()  # sorted; all of them must be among a node's
    max_price_microcredits: int | None = None  # an hour, for what it gets on one node
    on: Owners | None = None  # None: nodes of anyone
    cpu_by_gpus: bool = False  # more CPUs where they are free: the GPUs' part (`shares`) ...
    memory_by_gpus: bool = False  # ... and memory; only if `memory_bytes` is None
    siblings: int = 0  # answers that must agree: the task is placed nowhere, its siblings are


@dataclass(frozen=True, slots=True)
class InputFile:
    path: str  # relative, no "..", checked by core.paths
    sha256: str
    size_bytes: int
    executable: bool = False


@dataclass(frozen=True, slots=True)
class OutputFile:
    path: str
    sha256: str
    size_bytes: int
    executable: bool = False


@dataclass(frozen=True, slots=True)
class Recipe:
    """Environment spec in the normal form of `core.specs.fields`."""

    python: str | None = None  # a minor, "3.11"; None: the node's own
    packages: tuple[str, ...] = ()  # PEP 508, sorted
    image: str = ""  # for Docker: a name, best with its digest


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """Without the task's own arguments: one spec serves a whole batch."""

    kind: TaskKind
    name: str
    requirements: Requirements = Requirements()
    command: tuple[str, ...] = ()
    function_sha256: str = ""  # the pickled function, an artifact
    env: tuple[tuple[str, str], ...] = ()
    inputs: tuple[InputFile, ...] = ()
    outputs: tuple[str, ...] = ()  # paths or directories (ending in "/") beneath the work directory
    timeout: Span = Span(24 * 3600 * 1_000_000)
    retries: int = 0  # further tries after a failure of its own
    priority: int = 0  # higher first, -100..100
    environment: str = "default"
    secrets: tuple[str, ...] = ()  # names of variables whose values are kept apart, sealed
    recipe: Recipe | None = None  # of `environment`, when a node may have to make it
    preload: tuple[str, ...] = ()  # modules a warm sandbox of this environment has imported
    checkpoint: str = ""  # a directory beneath the work directory ("state/"), kept between attempts
    checkpoint_every: Span = Span(600 * 1_000_000)
    grace: Span = Span(10 * 1_000_000)  # between the warning signal and the kill
    preemptible: bool = False  # may be stopped for others; one with a checkpoint may as well
    by: Instant | None = None  # wanted by then: it goes before others when that is near
    engine: Engine = Engine.NONE  # of a gang
    on_loss: OnLoss = OnLoss.REFORM
    trace: str = ""  # W3C `traceparent` of the submission, if it was sampled
    tolerance: float | None = None  # of compared numbers; None: answers are compared by their hash
    check_sha256: str = ""  # pickled check function of `verify="check"`, an artifact
    comparator_sha256: str = ""  # pickled function that compares answers, an artifact


@dataclass(frozen=True, slots=True)
class Shape:
    """Class of interchangeable queued tasks: one entry in the queue.

    `group` (function hash or command kind) separates unrelated run times. `level` grows with attained run time
    (`scheduler.order.orders`).
    """

    user: UserId
    requirements: Requirements
    priority: int
    kind: TaskKind
    environment: str
    group: str
    team: int | None = None  # whose quota it counts against too
    preemptible: bool = False
    level: int = 0
    by: Instant | None = None  # wanted by then
    checkpoint_every: Span | None = None  # None: it keeps none and begins anew after a loss
    data: str = ""  # inputs so large that it matters where they lie already: their hash ...
    data_bytes: int = 0  # ... and size
    avoids: tuple[
        NodeId, ...
    ] = ()  # could not be started there: others first, where others would do


@dataclass(frozen=True, slots=True)
class SliceProfile:
    """MIG slice; `starts` in memory slices."""

    name: str  # "1g.18gb"
    memory_bytes: int
    compute: int  # of the GPU's compute slices
    size: int  # of its memory slices
    starts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GpuDetails:
    """Empty, 0 or None: unknown."""

    source: str = ""  # who told: "nvml", "amd-smi", "sysfs" …
    driver: str = ""
    capability: str = ""  # "9.0", "gfx942"
    bus: str = ""  # "0000:19:00.0"
    pcie: str = ""  # "gen5 x16"
    power_limit_mw: int = 0
    clock_mhz: int = 0  # the most its processors run at
    links: tuple[tuple[int, int], ...] = ()  # (index of a peer, NVLinks to it)
    mig: bool | None = None  # None: it has no such mode
    mig_profiles: tuple[str, ...] = ()  # that can be made: "1g.18gb" …
    mig_instances: tuple[str, ...] = ()  # that are there
    numa: int | None = None  # NUMA node of its PCIe slot
    near: tuple[tuple[int, int], ...] = ()  # (index of a peer, `PciePath` to it)


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    uuid: str
    model: str
    vendor: str
    memory_bytes: int
    simulated: bool = False
    closed: str = ""  # why it takes nothing new just now: its owner's rules, or its health
    health: Health = Health.HEALTHY
    ails: str = ""  # what is wrong with it, when anything is
    details: GpuDetails | None = None
    sharing: Sharing = Sharing.TIMESLICE  # how slices of it are kept apart
    profiles: tuple[SliceProfile, ...] = ()  # with `mig`: smallest first
    untested: bool = False  # of a kind gpool never ran on: for its owner and the owner's teams only
    guest: bool = False  # passed through whole to a guest: for tasks of tier vm, which get no other
    price_microcredits: int | None = None  # an hour of all of it; None: the node's price


@dataclass(frozen=True, slots=True)
class RuntimeOffer:
    name: str
    tier: Tier
    networks: frozenset[Network] = frozenset({Network.NONE})
    images: bool = False  # it runs images; otherwise environments
    gpus: bool = True
    gangs: bool = True  # with egress, its sandboxes can also be members of gangs


@dataclass(frozen=True, slots=True)
class Offer:
    cpu_milli: int
    memory_bytes: int
    disk_bytes: int
    gpus: tuple[Gpu, ...] = ()
    pythons: frozenset[str] = frozenset()  # minors with a runner, e.g. {"3.11"}
    tiers: frozenset[Tier] = frozenset({Tier.CONTAINER})
    environments: frozenset[str] = frozenset({"default"})  # that lie ready
    builds: frozenset[str] = frozenset()  # kinds it can make: "pip", "image"
    networks: frozenset[Network] = frozenset({Network.NONE})
    audience: tuple[str, ...] = ()  # whose tasks: "me", "user:NAME", "team:NAME"; empty: anyone's
    closed: str = ""  # why it takes nothing new just now, by its owner's rules
    runtimes: tuple[RuntimeOffer, ...] = ()  # empty: one that gives all of the above together
    hostname: str = ""
    agent_version: str = ""
    site: str = ""  # nodes of one site reach each other directly; empty: no gangs
    address: str = ""  # by which the others of its site reach it, an IPv4 address
    gang_port: int = 0  # UDP; the member with allocation number n listens at this + n
    labels: frozenset[str] = frozenset()  # what its owner says of it: "ssd", "zone=a"
    price_microcredits: int = 0  # an hour of a whole GPU, or of the node where it has none
    gang_links: frozenset[str] = frozenset()  # `gangs.GangLink`s besides the relay
    min_charge_microcredits: int = 0  # of an allocation of which any time is charged
    free_for: tuple[str, ...] = ()  # "user:NAME", "team:NAME": whose tasks cost nothing
    notice_s: int = 0  # promised between closing by the owner's rules and reclaiming


@dataclass(frozen=True, slots=True)
class Audience:
    """Users and teams that an owner accepts, besides the owner."""

    users: frozenset[int] = frozenset()
    teams: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Merit:
    """Coarse steps (`core.reliability`); never a reason to reject a node."""

    mtbf: Span = Span(64 * 3600 * 1_000_000)  # mean time between losses; this much of one not known
    is_proven: bool = False  # every GPU it lends passed its trial
    gigaflops: int = 0  # of its slowest GPU, as measured; 0: it was not
    memory_gb_per_s: int = 0  # likewise


@dataclass(frozen=True, slots=True)
class Node:
    id: NodeId
    owner: UserId
    name: str
    offer: Offer
    availability: Availability = Availability.AVAILABLE
    connected: bool = True
    gpus_withheld: frozenset[int] = (
        frozenset()
    )  # indexes that take nothing: set unavailable, or ...
    gpus_flagged: frozenset[int] = frozenset()  # ... bound to another owner, or not verified
    audience: Audience | None = None  # None: anyone
    cordoned: bool = False  # an operator lets nothing new start here, whatever its owner allows
    reserved_for: Audience | None = None  # just now, by an operator: for them and the owner alone
    merit: Merit = Merit()
    resting: str = ""  # why it is left alone for a while, though it would take more
    owner_teams: frozenset[int] = frozenset()  # teams that its owner is a member of
    gpus_unproven: frozenset[int] = (
        frozenset()
    )  # indexes that cannot be verified: not for strangers
    free_for: Audience | None = (
        None  # whose tasks cost nothing, besides the owner's; None: nobody's
    )


@dataclass(frozen=True, slots=True)
class Slice:
    gpu_index: int
    memory_bytes: int
    share_milli: int
    profile: str = ""  # of a hardware slice, which begins at `start`
    start: int = 0


@dataclass(frozen=True, slots=True)
class Allocation:
    """Resources on one node for leases of one user and shape; at most one of its leases runs, others queue.

    `number` is the smallest free one on its node, so that it can be rebuilt from the store.
    """

    number: int
    cpu_milli: int
    memory_bytes: int
    slices: tuple[Slice, ...] = ()
    disk_bytes: int = 0  # where disk was asked for


@dataclass(frozen=True, slots=True)
class TaskRow:
    id: TaskId
    batch: BatchId
    position: int  # place in its batch
    spec: SpecId
    user: UserId
    status: TaskStatus
    epoch: int  # of the current or last lease; 0: never leased
    created_at: Instant
    node: NodeId | None = None
    allocation: Allocation | None = None
    holding: bool = False  # the lease still holds its allocation
    leased_at: Instant | None = None
    started_at: Instant | None = None
    finished_at: Instant | None = None
    reason: EndReason | None = None
    exit_code: int | None = None
    error_text: str | None = None
    tries: int = 0  # failures of its own so far
    losses: int = 0  # different nodes lost while it ran
    queued_at: Instant | None = None  # since when it waits this time
    team: int | None = None  # whose it is; None: the user's own
    parent: TaskId | None = None  # the verified task of which it is a sibling


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """Attempt that did not end its task, kept for the task's history."""

    task: TaskId
    epoch: int
    node: NodeId
    leased_at: Instant
    started_at: Instant | None
    ended_at: Instant
    reason: EndReason
    detail: str = ""


__all__ = [
    "FINAL",
    "GIB",
    "INLINE_LIMIT_BYTES",
    "KIB",
    "MIB",
    "SECOND",
    "STATUS_TEXT",
    "Allocation",
    "AttemptRow",
    "Audience",
    "Availability",
    "BatchId",
    "EndReason",
    "Engine",
    "Fault",
    "Gpu",
    "GpuDetails",
    "GpuId",
    "GpuRequest",
    "Health",
    "InputFile",
    "Instant",
    "Merit",
    "Network",
    "Node",
    "NodeId",
    "Offer",
    "OnLoss",
    "OutputFile",
    "Owners",
    "Permission",
    "Phase",
    "Recipe",
    "Requirements",
    "RuntimeOffer",
    "Shape",
    "Sharing",
    "Slice",
    "SliceProfile",
    "Span",
    "SpecId",
    "TaskId",
    "TaskKind",
    "TaskRow",
    "TaskSpec",
    "TaskStatus",
    "Tier",
    "UserId",
]
