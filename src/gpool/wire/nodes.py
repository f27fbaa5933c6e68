"""REST documents of nodes, GPUs, and the tasks on a node as its owner sees them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    AwareDatetime,
    Field,
    StringConstraints,
)

from gpool.wire.documents import Answer, Document, Name


class MeasuredDocument(Answer):
    """Benchmark of a GPU by its agent; 0: not supported."""

    fp32_gigaflops: int
    tf32_gigaflops: int
    bf16_gigaflops: int
    int8_gigaops: int
    memory_bytes_per_s: int
    host_bytes_per_s: int


class GpuDetailsDocument(Answer):
    """As the driver or tool (`source`) reports them. `links`: NVLinks to other GPUs by index; `near`: PCIe paths to them,
    as `nvidia-smi topo -m` names them; `numa`: NUMA node.
    """

    source: str = ""
    driver: str = ""
    capability: str = ""
    bus: str = ""
    pcie: str = ""
    power_limit_watts: float | None = None
    clock_mhz: int | None = None
    links: dict[int, int] = {}
    mig: bool | None = None
    mig_profiles: list[str] = []
    mig_instances: list[str] = []
    numa: int | None = None
    near: dict[int, str] = {}


class ReadingDocument(Answer):
    """Telemetry of a GPU or task at one time. Null: not reported."""

    at: AwareDatetime
    utilisation_percent: int | None = None
    memory_used_bytes: int | None = None
    power_watts: float | None = None
    temperature_celsius: int | None = None


class TelemetryDocument(Answer):
    """Oldest first, since this server started."""

    id: str
    every_s: float
    readings: list[ReadingDocument]


class GpuDocument(Answer):
    """One GPU, or (kind `cpu`) a node's CPU slots.

    `closed`: why it takes no new task at present. `health`: as its agent reports, `ails`: the cause.
    `quarantined`: why it is out of the pool until its owner or an operator clears it. `verified`: it passed GPU
    verification; else model, memory and existence are its owner's word, as `tiers` and `labels` always are.
    `untested`: gpool was never run on its kind; it serves its owner and the owner's teams only. `unproven`: why it
    cannot be verified; it serves its owner, the owner's teams and tasks that name the owner (`on`).
    `uuid` and the PCI address in `details` are empty for all but the owner and operators.
    """

    id: str
    kind: Literal["gpu", "cpu"]
    node: str
    node_name: str
    index: int
    model: str
    vendor: str
    uuid: str
    memory_bytes: int
    memory_free_bytes: int
    share_free: float
    simulated: bool
    status: Literal["free", "shared", "busy", "paused", "quarantined", "offline"]
    available: bool
    tiers: list[str]
    flagged: str | None = None  # why it is not scheduled, regardless of its owner
    measured: MeasuredDocument | None = None
    closed: str | None = None
    health: Literal["healthy", "degraded", "quarantined"] = "healthy"
    ails: str | None = None
    quarantined: str | None = None
    details: GpuDetailsDocument | None = None
    reading: ReadingDocument | None = None
    price_microcredits: int = 0  # per hour for all of it
    labels: list[str] = []  # of its node; `certified:LABEL`: an operator's word
    verified: bool = False
    untested: bool = False
    unproven: str | None = None


class GpuPage(Answer):
    items: list[GpuDocument]
    next: str | None = None


class GpuPatch(Document):
    """Owners set `available`; operators resolve a dispute, or admit an unproven GPU, with `flagged: null`.

    `quarantined`: a reason, or null to clear it (refused while its agent reports it sick). `reclaim` with
    `available: false` preempts its tasks: checkpointed and requeued.
    """

    available: bool | None = None
    reclaim: bool = False
    quarantined: Annotated[str, StringConstraints(min_length=1, max_length=200)] | None = None
    flagged: None = None


class NodeDocument(Answer):
    """`audience`: allowed users ("me", "user:NAME", "team:NAME"; empty: anyone); null if not visible to the caller.

    `closed`: why the owner's policy admits no new task at present. `environments` are ready, kinds in `builds` can be
    built. `problems`: for owners and operators. `cordoned`: an operator's reason, possibly empty; null: not cordoned.
    """

    id: str
    name: str
    owner: str
    status: Literal["online", "offline"]
    availability: str
    created_at: AwareDatetime
    last_beat_at: AwareDatetime | None = None
    cpu_milli: int
    cpu_free_milli: int
    memory_bytes: int
    pythons: list[str]
    tiers: list[str]
    gpus: list[GpuDocument] = []
    running: int = 0
    networks: list[str] = []
    audience: list[str] | None = []
    closed: str | None = None
    environments: list[str] = []
    builds: list[str] = []
    problems: list[str] = []
    labels: list[str] = []
    price_microcredits: int = (
        0  # per hour of a GPU without its own price, or of a node without GPUs
    )
    min_charge_microcredits: int = 0  # of an allocation
    free_for: list[str] | None = []  # whose tasks cost nothing; null if not visible to the caller
    notice_s: int = 0  # promised before the owner's rules reclaim running tasks
    site: str | None = None  # nodes of one owner and site reach each other; null: no gangs
    cordoned: str | None = None


class NodePage(Answer):
    items: list[NodeDocument]
    next: str | None = None


class NodePatch(Document):
    availability: Literal["available", "paused", "draining"]


class InviteRequest(Document):
    expires_in_s: Annotated[int, Field(ge=60, le=7 * 86400)] = 3600


class InviteDocument(Answer):
    token: str
    link: str
    expires_at: AwareDatetime


class OfferedGpu(Document):
    index: Annotated[int, Field(ge=0, le=1023)]
    uuid: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    model: Name
    vendor: Literal["nvidia", "amd", "intel", "apple", "other"] = "other"
    memory_bytes: Annotated[int, Field(gt=0, le=1 << 50)]
    simulated: bool = False


class NodeProof(Document):
    """Signature of a challenge of `POST /v1/nodes/challenges`."""

    nonce: Annotated[str, StringConstraints(max_length=100)]
    signature: Annotated[str, StringConstraints(max_length=100)]


class NodeRequest(Document):
    """`POST /v1/nodes` (and `/v1/resources`, `/register_gpu`): join with a token or the owner's key.

    An agent sends its public key (Ed25519, base64url) with a proof of possession. A machine without a key is only
    listed: nothing is scheduled there.
    """

    name: Name
    token: str | None = None
    public_key: Annotated[str, StringConstraints(max_length=100)] | None = None
    proof: NodeProof | None = None
    cpu_milli: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    memory_bytes: Annotated[int, Field(ge=0, le=1 << 60)] = 0
    gpus: Annotated[list[OfferedGpu], Field(max_length=1024)] = []


class NodeJoined(Answer):
    """`server`: the server's name in the node's proofs."""

    id: str
    name: str
    server: str


class NodeChallenge(Answer):
    """`server`: the name for which the challenge is signed."""

    nonce: str
    server: str
    expires_in_s: int


class NodeTaskDocument(Answer):
    """A task as the node's owner sees it: whose, when, with which resources; no name, command or file.

    `cpus`, `memory_bytes`: as granted here; of a gang's member, as requested.
    """

    id: str
    user: str
    user_name: str
    team: str | None = None
    kind: str
    status: str
    leased_at: AwareDatetime | None = None
    started_at: AwareDatetime | None = None
    finished_at: AwareDatetime | None = None
    reason: str | None = None
    gpu: str | None = None
    cpus: float = 1.0
    memory_bytes: int | None = None
    tier: str = "container"
    network: bool = False  # it reaches the public internet
    image: str | None = None


class FailedCheckDocument(Answer):
    """An answer of the node that differed from the accepted one: the task, what was wanted and what was found."""

    task: str
    at: AwareDatetime
    wanted: str
    found: str


class NodeTasksDocument(Answer):
    """`running`: leases of the node, oldest first. `ended`: newest first, among the pool's newest 1,000,000 tasks.

    `failed_checks`: newest first. `banned_until`: it gets no verified tasks before then.
    """

    running: list[NodeTaskDocument]
    ended: list[NodeTaskDocument]
    failed_checks: list[FailedCheckDocument]
    banned_until: AwareDatetime | None = None
