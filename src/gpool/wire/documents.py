"""REST documents of `/v1`: they validate form; `server.actions` decides what is allowed.

One file because requests and responses share their parts.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
)

from gpool.core.gangs import MAX_NODES
from gpool.core.specs.fields import MAX_LABELS, MAX_REQUIREMENT_BYTES

MAX_BATCH = 10_000
"""Tasks per request; further requests add to the same batch."""

MAX_BODY_BYTES = 32 * 1024 * 1024
"""Body of a batch submission; every other body is limited to `MAX_SMALL_BODY_BYTES`."""

MAX_SMALL_BODY_BYTES = 1024 * 1024
MAX_ANONYMOUS_BODY_BYTES = 16 * 1024
"""Body of a request without a valid credential."""

MAX_ENV = 1000
"""Environment variables of a task."""

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Moment = Annotated[
    AwareDatetime,
    Field(ge=datetime(1970, 1, 1, tzinfo=UTC), le=datetime(9999, 1, 1, tzinfo=UTC)),
]
"""Time sent by a client, representable in every time zone."""


def instant_to_datetime(instant: int) -> datetime:
    return datetime.fromtimestamp(instant / 1_000_000, UTC)


class Document(BaseModel):
    """Request. Unknown fields are rejected, so that a typing error does not become a default."""

    model_config = ConfigDict(extra="forbid")


class Answer(BaseModel):
    """Response. Clients ignore unknown fields, so the server may add some."""

    model_config = ConfigDict(extra="ignore")


# ---- errors (RFC 9457)


class Problem(Answer):
    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: str
    instance: str = ""
    errors: list[dict[str, object]] = []


# ---- submission


class InputDocument(Document):
    path: str
    sha256: Sha256
    size_bytes: Annotated[int, Field(ge=0)]
    executable: bool = False


class CallDocument(Document):
    """Pickled `(args, kwargs)`, inline (base64) or as an artifact."""

    payload: str = ""
    payload_sha256: Sha256 | Literal[""] = ""


class FunctionDocument(Document):
    sha256: Sha256
    python: Annotated[str, StringConstraints(pattern=r"^3\.\d{1,2}$")]


class RecipeDocument(Document):
    """Environment spec: packages for a Python (PEP 508, from the node's own index), or an image."""

    python: Annotated[str, StringConstraints(max_length=20)] | None = None  # a minor, "3.12"
    packages: Annotated[
        list[Annotated[str, StringConstraints(max_length=MAX_REQUIREMENT_BYTES)]],
        Field(max_length=500),
    ] = []
    image: Annotated[str, StringConstraints(max_length=255)] | None = None


class TaskRequest(Document):
    """`POST /v1/tasks`: one command, or one function with one or many calls.

    `calls`: base64 strings (the common case) or `CallDocument`s. `copies`: submissions of the same command.
    `checkpoint`: directory beneath a command's work directory, saved every `checkpoint_every_s` and on preemption
    (SIGTERM, then `grace_s`), restored for the next attempt. `nodes` above 1: a gang on that many nodes of one site,
    started by `engine`; `on_loss`: policy when a node is lost. `on`: owners whose nodes may run it and so read its
    inputs and secrets: "anyone", or "me", "team" (yours and your teams'), "team:NAME", "user:NAME", several with commas;
    null: the pool's default, for tasks with secrets at most "team". `verify`: run it on nodes of that many owners, not
    the caller's, and accept the answer only if they agree; `compare`: by hash, or numbers in a function's value by a
    tolerance, absolute and relative; `comparator`: by a function, on nodes of further owners. `verify: "check"`: the
    function `check` decides on another owner's node. `secrets`: variables; null takes the value stored under this name
    (`PUT /v1/secrets/{name}`) now, of the team first.
    """

    name: Name | None = None
    command: Annotated[list[str], Field(min_length=1, max_length=1000)] | None = None
    function: FunctionDocument | None = None
    calls: (
        Annotated[list[str | CallDocument], Field(max_length=MAX_BATCH, fail_fast=True)] | None
    ) = None
    copies: Annotated[int, Field(ge=1, le=MAX_BATCH)] = 1
    gpu: str | int | float | None = None
    vram: str | None = None
    cpus: Annotated[float, Field(gt=0, le=1024)] | None = None  # with GPUs: their part of the node
    memory: str | None = None  # "4GB"; with GPUs: their part of the node
    disk: str | None = None
    tier: Literal["none", "container", "vm"] = "container"
    env: Annotated[dict[str, str], Field(max_length=MAX_ENV)] = {}
    secrets: Annotated[dict[str, SecretStr | None], Field(max_length=100)] = {}  # never shown
    inputs: Annotated[list[InputDocument], Field(max_length=10_000, fail_fast=True)] = []
    outputs: Annotated[list[str], Field(max_length=1000)] = []
    timeout_s: Annotated[float, Field(gt=0, le=30 * 86400)] = 86400.0
    retries: Annotated[int, Field(ge=0, le=20)] = 0
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    environment: Name = "default"
    batch: str | None = None  # add to this open batch
    more: bool = False  # the batch stays open for further calls
    team: str | None = None  # submit for this team; None: your own
    recipe: RecipeDocument | None = None
    network: Literal["none", "egress"] = "none"
    preload: Annotated[
        list[Annotated[str, StringConstraints(max_length=200)]], Field(max_length=50)
    ] = []  # modules to import before the start
    checkpoint: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None
    checkpoint_every_s: Annotated[float, Field(ge=1, le=30 * 86400)] = 600.0
    grace_s: Annotated[float, Field(ge=0, le=3600)] = 10.0
    preemptible: bool = False  # may be preempted and restarted; implied by a checkpoint
    by: Moment | None = None  # deadline: it precedes your other tasks when near
    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)] = (
        1  # simultaneously, each with all requested resources
    )
    engine: Literal["none", "torchrun", "ray"] = "none"
    on_loss: Literal["reform", "end"] = "reform"
    labels: Annotated[
        list[Annotated[str, StringConstraints(max_length=200)]], Field(max_length=MAX_LABELS)
    ] = []  # all required
    max_price: str | int | float | None = None  # "0.40/h": credits per hour on one node
    max_cost: str | int | float | None = None  # "2.00": credits of a task over all its attempts
    project: Annotated[str, StringConstraints(min_length=1, max_length=63)] | None = None  # label
    on: Annotated[str, StringConstraints(min_length=1, max_length=1500)] | None = None
    verify: Annotated[int, Field(ge=2, le=3)] | Literal["spot", "check"] | None = (
        None  # answers of different owners that must agree
    )
    check: Sha256 | None = None  # pickled check function of a function with verify "check"
    compare: Literal["hash"] | Annotated[float, Field(gt=0, lt=1)] = "hash"  # or a tolerance
    comparator: Sha256 | None = (
        None  # pickled function of two values that returns whether they agree
    )


class SubmittedDocument(Answer):
    """202: durable. `ids` in the order of the calls. `on`: owners whose nodes may run them; absent: anyone."""

    batch: str
    first_position: int
    ids: list[str]
    on: str = "anyone"


# ---- tasks


class GpuSliceDocument(Answer):
    index: int
    memory_bytes: int
    share: float


class OutputDocument(Answer):
    path: str
    sha256: str
    size_bytes: int
    executable: bool


class CheckpointDocument(Answer):
    """Newest checkpoint, saved by the attempt with this epoch."""

    saved_at: AwareDatetime
    size_bytes: int
    files: int
    epoch: int


class MemberDocument(Answer):
    """Gang member on one node: `leased`, `running`, or its end reason."""

    rank: int
    node: str
    node_name: str | None = None
    status: str
    exit_code: int | None = None


class VerificationDocument(Answer):
    """Siblings of a verified task. `agreed`, `differed`: known when it has ended; `no_answer`: replaced ones.

    `outcome`: `open`, `accepted`, `no_quorum`, `not_compared` (the comparator failed), `cancelled`, or, when the node of
    an unchecked result was caught later, `withdrawn` (`rerun`: the task that runs it again) or `refunded`. `needed` is 1
    for spot checks.
    """

    needed: int
    tolerance: float | None = None
    waiting: int = 0
    running: int = 0
    answered: int = 0
    agreed: int = 0
    differed: int = 0
    no_answer: int = 0
    outcome: str = "open"
    rerun: str | None = None
    cost_microcredits: int | None = None  # of all siblings, held charges included


class ReportedProgress(Answer):
    """As the task's code reported it; `at` by the server's clock."""

    fraction: float  # 0 to 1
    text: str = ""
    at: AwareDatetime


class TaskDocument(Answer):
    """`phase`: of the present attempt (fetch, build, start, run, collect). `cpus` to `on_loss`: as requested;
    `memory_bytes` and `disk_bytes` are null if not requested. `shares`: of "cpus" and "memory" those that were not
    requested by a task with GPUs, which gets its part of the node; `cpus` is then the least that it needs.
    `granted_cpus`, `granted_memory_bytes`: of the present or last lease, of a gang on one node; null before the first.
    """

    id: str
    name: str
    kind: Literal["command", "function"]
    status: str
    status_text: str
    created_at: AwareDatetime
    started_at: AwareDatetime | None = None
    finished_at: AwareDatetime | None = None
    batch: str
    position: int
    user: str
    team: str | None = None
    epoch: int
    node: str | None = None
    node_name: str | None = None
    slices: list[GpuSliceDocument] = []
    command: list[str] = []
    gpu: str | None = None
    priority: int = 0
    exit_code: int | None = None
    reason: str | None = None
    error_text: str | None = None
    tries: int = 0
    losses: int = 0
    outputs: list[OutputDocument] = []
    phase: str | None = None
    network: str = "none"
    environment: str = "default"
    preemptible: bool = False
    by: AwareDatetime | None = None
    checkpoint: CheckpointDocument | None = None
    nodes: int = 1  # simultaneous nodes
    members: list[MemberDocument] = []  # of a leased gang; `node` is rank 0's
    cpus: float = 1.0
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    tier: str = "container"
    timeout_s: float = 86400.0
    retries: int = 0
    labels: list[str] = []
    max_price: str | None = None  # "0.40/h"
    max_cost_microcredits: int | None = None
    cost_microcredits: int | None = None  # charged so far, over all attempts; null: no price
    reserved_microcredits: int | None = None  # set aside for its allocation beyond the cost
    engine: str = "none"
    on_loss: str = "reform"
    on: str = "anyone"  # owners whose nodes may run it, as requested or by default
    expired_at: AwareDatetime | None = None  # arguments, results, log and checkpoint were deleted
    shares: list[str] = []
    granted_cpus: float | None = None
    granted_memory_bytes: int | None = None
    closeness: str | None = None  # of its GPUs ("NVLink", "across sockets"), while it is leased
    verify: int | Literal["spot", "check"] | None = (
        None  # answers of different owners that must agree
    )
    verification: VerificationDocument | None = None  # not in listings
    progress: ReportedProgress | None = None  # of the present or last attempt; null: none reported


class BatchDocument(Answer):
    """`succeeded` to `running`: only if they were asked for (`counts=true`); the rest of `total` waits."""

    id: str
    name: str
    total: int
    done: int
    closed: bool
    created_at: AwareDatetime
    succeeded: int | None = None
    failed: int | None = None
    cancelled: int | None = None
    running: int | None = None


class TaskPage(Answer):
    """`batches`: those of the items, with `first=true`."""

    items: list[TaskDocument]
    next: str | None = None
    batches: list[BatchDocument] = []


class ResultDocument(Answer):
    """`GET /v1/tasks/{id}/result`, and each line of `GET /v1/batches/{id}/results` (NDJSON).

    `own_node`: `node` belongs to the calling account, so its owner is trusted with a pickle; false for another
    account's node, a removed node and a gang. `on`: owners whose nodes were accepted; null in the results of a batch.
    """

    id: str
    position: int
    sequence: int
    status: str
    reason: str | None = None
    exit_code: int | None = None
    value: str = ""  # base64 of the value or exception, as data (decision 0019) or pickled
    value_sha256: str = ""
    error_text: str = ""
    outputs: list[OutputDocument] = []
    node: str | None = None
    node_name: str | None = None
    own_node: bool = False
    on: str | None = None
    printed: bool = False  # it has output (`GET /v1/tasks/{id}/logs`)


class EventDocument(Answer):
    at: AwareDatetime
    event: str
    epoch: int
    node: str | None = None
    text: str


class EstimateDocument(Answer):
    """Median start, and the range of 80 % of starts."""

    model_config = ConfigDict(extra="ignore", serialize_by_alias=True, populate_by_name=True)

    at: AwareDatetime
    earliest: Annotated[AwareDatetime, Field(alias="from")]
    latest: Annotated[AwareDatetime, Field(alias="to")]


class SuggestionDocument(Answer):
    """Change that, planned on a copy of the queue, starts the task at once."""

    kind: str
    change: str  # to `gpool run`, e.g. "--gpu RTX4090"
    sentence: str


class ExplainDocument(Answer):
    id: str
    status: str
    sentence: str
    position: int | None = None  # rank among waiting tasks
    code: str = ""
    ahead: int | None = None
    tries: int = 0  # own failures so far
    losses: int = 0  # lost nodes
    estimate: EstimateDocument | None = None
    suggestions: list[SuggestionDocument] = []
    resources: list[str] = []  # CPUs, memory and GPUs, one line each; of a waiting task as expected


class QueueEntry(Answer):
    """Waiting task: position, expected start, reason; `explain` holds no suggestions here."""

    task: TaskDocument
    explain: ExplainDocument


class QueuePage(Answer):
    """Waiting tasks, oldest first. `running`: the newest leased and running tasks, on the first page only."""

    items: list[QueueEntry]
    next: str | None = None
    waiting: int  # number of waiting tasks, counted up to a limit
    running: list[TaskDocument] = []
    more_running: bool = False  # older running tasks are left out of `running`


class LogDocument(Answer):
    """`data` (base64): the bytes if they are not UTF-8 `text`: binary output, or a character split by the end of the
    chunk, which `text` has where it is complete.
    """

    cursor: int
    epoch: int
    stream: Literal["stdout", "stderr"]
    text: str
    data: str | None = None


class ProgressDocument(Answer):
    """Event of a followed log (`event: progress`)."""

    epoch: int
    status: str
    phase: str | None = None


class LogPage(Answer):
    items: list[LogDocument]
    next: int | None = None
    ended: bool


# ---- nodes and GPUs


# ---- server


class ArtifactDocument(Answer):
    sha256: str
    size_bytes: int


class DirectPart(Document):
    number: int = Field(ge=1, le=10_000)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class DirectUpload(Document):
    """Upload straight to the object store; `parts` are those to be sent next."""

    size_bytes: int = Field(ge=1, le=1 << 50)
    parts: list[DirectPart] = Field(default=[], max_length=64)


class DirectCompletion(Document):
    """SHA-256 of every part, in order."""

    part_sha256s: list[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]] = Field(max_length=10_000)


class SignedPart(Answer):
    """PUT the part's bytes to `url`, with exactly these headers."""

    number: int
    url: str
    headers: dict[str, str]


class DirectUploadDocument(Answer):
    """`part_bytes`: length of every part but the last; 0: upload through the server. `stored`: numbers of stored parts."""

    part_bytes: int
    stored: list[int]
    parts: list[SignedPart]


class StoredArtifactDocument(ArtifactDocument):
    """`used_as`: upload (no task names it), spec (function or input), payload, result, log, checkpoint or lease."""

    used_as: str


class ArtifactPage(Answer):
    """Artifacts of an account, largest first. `used_bytes`: all that its storage quota is charged for."""

    items: list[StoredArtifactDocument]
    next: str | None = None
    used_bytes: int


class StorageUse(Answer):
    """`used_as`: as of `StoredArtifactDocument`, `unfinished` (uploads in progress) or `rows` (tasks, inline data, output
    that is not sealed yet). `count`: number of artifacts or uploads; None for rows.
    """

    used_as: str
    count: int | None
    size_bytes: int


class StorageReport(Answer):
    """Everything that a storage quota is charged for, largest first; `limit_bytes` None: no limit."""

    used_bytes: int
    limit_bytes: int | None
    items: list[StorageUse]


class HealthDocument(Answer):
    status: Literal["ok", "starting", "stopping", "unavailable"]
    version: str
    detail: str | None = None  # why it is unavailable
