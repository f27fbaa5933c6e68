"""Frames of the agent's channel: msgpack over one WebSocket, many leases or reports in each.

Connection: `Challenge` from the server, `Prove`, then `Proven` with a short-lived token; near its expiry these three
pass again. The transport handles them and adds the token to every `Reports`. Then `Hello`, and `Welcome` or `Refused`.
The agent keeps reports until `Recorded` names their sequence number and repeats them after a reconnect; the store's
fencing makes repetition harmless.

One file because both directions share their parts.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from gpool.core.gpu_verification import GpuVerdict, MeasuredSpeed, Opening, Size
from gpool.core.model import (
    Allocation,
    EndReason,
    Fault,
    InputFile,
    Offer,
    OutputFile,
    Phase,
    TaskSpec,
)

PROTOCOL = 1
OLDEST_PROTOCOL = 1
"""Newest and oldest version of the channel that this release speaks. A new version is needed only when the meaning of
a frame changes; fields, words and kinds of frames are added within one (`tolerance`)."""
MAX_FRAME_BYTES = 8 * 1024 * 1024
MAX_SPEC_BYTES = 3 * 1024 * 1024
"""Largest spec: with a frame's share of payloads it must fit into a frame."""
MAX_PROOF_BYTES = 1024
"""Largest frame from an unauthenticated peer."""

CHANNEL_PATH = "/v1/nodes/channel"
NODE_HEADER = "Gpool-Node"
"""Node id claimed by the connecting agent; the challenge asks for its proof."""


class _Frame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Positional on the wire: fields are only added at the end, with a default."""


class Hold(msgspec.Struct, frozen=True, array_like=True):
    task: int
    epoch: int


# ---- reports of an agent; each item is fenced by (task, epoch)


class Started(_Frame, frozen=True):
    """Omitted if the sandbox ended before the batch was sent: `Finished` implies it."""

    task: int
    epoch: int


class SignedGpu(msgspec.Struct, frozen=True, array_like=True):
    """A GPU as the node's signature names it (`wallet.receipt_keys.ReceiptGpu`)."""

    gpu: str
    model: str
    slice: str


class WorkSignature(msgspec.Struct, frozen=True, array_like=True):
    """The node's signature of the work of a priced lease (`wallet.receipt_keys.ReceiptWork`).

    `path`: from the work to the root that was signed, if several works were signed together.
    """

    signature: bytes
    gpus: tuple[SignedGpu, ...] = ()
    path: bytes = b""


class Finished(_Frame, frozen=True):
    """The attempt ended and its sandbox is gone: the allocation is free."""

    task: int
    epoch: int
    reason: EndReason
    exit_code: int | None = None
    value: bytes = b""  # a function's value or exception, when small; never decoded on its way
    value_sha256: str = ""  # ... or the artifact that holds it
    error_text: str = ""  # for people: traceback or message
    duration_us: int = 0  # as the agent measured it; a hint, billing uses the server's times
    outputs: tuple[OutputFile, ...] = ()
    fault: Fault | None = None  # set for a failed start; older agents never send it
    work: WorkSignature | None = None  # of a priced lease


class Released(_Frame, frozen=True):
    """Nothing of a stopped lease (cancelled or stale) runs any more."""

    task: int
    epoch: int
    work: WorkSignature | None = None  # of a priced lease that had begun


class HandedBack(_Frame, frozen=True):
    task: int
    epoch: int


class LogChunk(_Frame, frozen=True):
    """`sequence` counts from 0 within the epoch."""

    task: int
    epoch: int
    sequence: int
    stream: int  # 1 stdout, 2 stderr
    data: bytes


class Reached(_Frame, frozen=True):
    """The attempt entered a long phase; `Started` means `run`, short phases are omitted."""

    task: int
    epoch: int
    phase: Phase


class Checkpointed(_Frame, frozen=True):
    task: int
    epoch: int
    files: tuple[OutputFile, ...]  # paths beneath the work directory


class Progressed(_Frame, frozen=True):
    """How far the task says it is, at most one a second; see `core.specs.progress`."""

    task: int
    epoch: int
    millionths: int
    text: str = ""


ReportItem = (
    Started | Finished | Released | HandedBack | LogChunk | Reached | Checkpointed | Progressed
)


# ---- agent to server


class Hello(_Frame, frozen=True):
    protocol: int
    boot: str  # id of this start of the agent; sorts after earlier starts
    offer: Offer
    beat: int  # the hello is a heartbeat too
    holds: tuple[Hold, ...]  # all its leases, running or queued
    oldest_protocol: int = 0  # of the versions it speaks, up to `protocol`; 0: that one alone


class GpuReading(msgspec.Struct, frozen=True, array_like=True):
    """Since the last heartbeat. None: not reported."""

    gpu: int  # its index
    utilisation_percent: int | None = None
    memory_bytes: int | None = None
    power_mw: int | None = None
    temperature_c: int | None = None


class TaskReading(msgspec.Struct, frozen=True, array_like=True):
    """Telemetry of one attempt over all its GPUs."""

    task: int
    epoch: int
    utilisation_percent: int | None = None
    memory_bytes: int | None = None
    power_mw: int | None = None
    temperature_c: int | None = None


class Beat(_Frame, frozen=True):
    number: int
    holds: tuple[Hold, ...]
    readings: tuple[GpuReading, ...] = ()
    tasks: tuple[TaskReading, ...] = ()


class Reports(_Frame, frozen=True):
    sequence: int
    items: tuple[ReportItem, ...]
    token: str = ""  # of `Proven`; added by the transport


class OfferChanged(_Frame, frozen=True):
    """A GPU appeared or disappeared, the owner's limits changed, or the agent stops (`leaving`)."""

    offer: Offer
    leaving: bool = False


class GpuMeasured(_Frame, frozen=True):
    uuid: str
    measured: MeasuredSpeed


class GpuCommitted(_Frame, frozen=True):
    """Step 1 of a verification is done; see `gpool.core.gpu_verification`."""

    trial: int
    root: bytes


class GpuAnswered(_Frame, frozen=True):
    trial: int
    roots: tuple[bytes, ...]


class GpuOpened(_Frame, frozen=True):
    trial: int
    openings: tuple[Opening, ...]


class GpuUnable(_Frame, frozen=True):
    """Cannot measure or verify this GPU; `trial` is 0 for a measurement."""

    trial: int
    uuid: str
    why: str


FromGpu = GpuMeasured | GpuCommitted | GpuAnswered | GpuOpened | GpuUnable

AgentFrame = Hello | Beat | Reports | OfferChanged | FromGpu


class Prove(_Frame, frozen=True):
    """Signature of a challenge's statement; see `gpool.transfer.node_proofs`."""

    nonce: str
    signature: str


# ---- server to agent


class StopReason(StrEnum):
    CANCELLED = "cancelled"
    STALE = "stale"
    PREEMPTED = "preempted"
    RECLAIMED = "reclaimed"  # the owner takes the GPU back


class Welcome(_Frame, frozen=True):
    node: int
    beat: int  # the hello's heartbeat number
    ttl_us: int
    margin_us: int
    beat_every_us: int
    drop: tuple[Hold, ...]  # held leases that are no longer its own: stop, report nothing
    protocol: int = 1  # version of this connection, the newest that both speak
    joint_signatures: bool = (
        False  # the server verifies signatures of several works (`WorkSignature.path`)
    )


class BeatSeen(_Frame, frozen=True):
    number: int
    drop: tuple[Hold, ...] = ()


class Lease(msgspec.Struct, frozen=True, array_like=True):
    task: int
    epoch: int
    payload: bytes = b""  # the pickled (args, kwargs) of a function, when small
    payload_sha256: str = ""  # ... or the artifact that holds it
    checkpoint: tuple[InputFile, ...] = ()  # checkpoint of the last attempt


class Secret(msgspec.Struct, frozen=True, array_like=True):
    """Secret variable of a spec's tasks: never in a log, an error or its own `repr`."""

    spec: int
    name: str
    value: str

    def __repr__(self) -> str:
        return f"Secret({self.spec}, {self.name!r}, …)"


class Rendezvous(msgspec.Struct, frozen=True, array_like=True):
    """Facts about the gang for one member; see `gpool.core.gangs`."""

    rank: int
    peers: tuple[tuple[str, int], ...]  # by rank: host and UDP port
    secret: bytes  # per gang and epoch, the same for all members
    link: str = ""  # a `GangLink` that every member's node offered; empty: relay

    def __repr__(self) -> str:
        return f"Rendezvous({self.rank}, {self.peers}, …)"


class Line(msgspec.Struct, frozen=True, array_like=True):
    """Leases to queue, in this order, on one allocation; for a gang its one member here."""

    allocation: Allocation
    user: int
    owner: bool  # the user owns this node (the `process` runtime asks)
    spec: int
    leases: tuple[Lease, ...]
    gang: Rendezvous | None = None
    receipts: str = (
        ""  # the pool's name in receipts, if the leases are priced: their ends are signed
    )


class Grants(_Frame, frozen=True):
    """`specs` holds each spec the first time this connection needs it, `secrets` their secrets."""

    beat: int  # last heartbeat received from the agent
    specs: tuple[tuple[int, TaskSpec], ...]
    lines: tuple[Line, ...]
    secrets: tuple[Secret, ...] = ()


class Stop(_Frame, frozen=True):
    holds: tuple[Hold, ...]
    reason: StopReason


class Recorded(_Frame, frozen=True):
    """Reports up to `sequence` are durable; `refused` were under a stale lease: drop them."""

    sequence: int
    refused: tuple[Hold, ...] = ()


class Refused(_Frame, frozen=True):
    """`code`: an error code; `retry`: whether a later try may succeed."""

    code: str
    detail: str
    retry: bool
    to: str = ""  # address of another server of the pool to try next; the agent uses only addresses it was given


class MeasureGpu(_Frame, frozen=True):
    """Run the benchmark; nothing else runs on the GPU."""

    uuid: str


class ExamineGpu(_Frame, frozen=True):
    """Step 1 of a verification: compute, keep, commit. Keys derive from seed, node, uuid and trial."""

    trial: int
    node: int
    uuid: str
    seed: bytes
    size: Size
    rounds: int


class AnswerNow(_Frame, frozen=True):
    """Step 2 of a verification; its deadline runs."""

    trial: int
    nonce: bytes


class OpenTiles(_Frame, frozen=True):
    trial: int
    tiles: tuple[int, ...]


class GpuJudged(_Frame, frozen=True):
    """End of a verification: free the memory."""

    trial: int
    verdict: GpuVerdict
    text: str


ToGpu = MeasureGpu | ExamineGpu | AnswerNow | OpenTiles | GpuJudged

ServerFrame = Welcome | BeatSeen | Grants | Stop | Recorded | Refused | ToGpu


class Challenge(_Frame, frozen=True):
    """Request to prove possession of the node's key; `purpose`: a `transfer.node_proofs.Purpose`."""

    nonce: str
    purpose: str


class Proven(_Frame, frozen=True):
    """Token bound to the node's key, valid for `lives_us` from `server_at_us` (the server's time)."""

    token: str
    server_at_us: int
    lives_us: int


FromAgent = AgentFrame | Prove
FromServer = ServerFrame | Challenge | Proven
"""All frames on the wire; without those of the connection it is an `AgentFrame` or a `ServerFrame`."""

_encoder = msgspec.msgpack.Encoder()
_agent_decoder: msgspec.msgpack.Decoder[AgentFrame] = msgspec.msgpack.Decoder(AgentFrame)
_server_decoder: msgspec.msgpack.Decoder[ServerFrame] = msgspec.msgpack.Decoder(ServerFrame)
_from_agent: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)
_from_server: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)

Malformed = msgspec.MsgspecError
"""Bytes that are not a frame."""


def common_protocol(newest: int, oldest: int) -> int | None:
    """Newest version that this release and a peer with these versions speak; None: none."""
    common = min(newest, PROTOCOL)
    return common if common >= max(oldest or newest, OLDEST_PROTOCOL) else None


def encode(frame: FromAgent | FromServer) -> bytes:
    return _encoder.encode(frame)


def weight_of(spec: TaskSpec) -> int:
    return len(_encoder.encode(spec))


def decode_from_agent(data: bytes) -> AgentFrame:
    try:
        return _agent_decoder.decode(data)
    except UnicodeDecodeError as error:  # msgspec does not make it its own error
        raise msgspec.DecodeError(str(error)) from error


def decode_from_server(data: bytes) -> ServerFrame:
    try:
        return _server_decoder.decode(data)
    except UnicodeDecodeError as error:  # msgspec does not make it its own error
        raise msgspec.DecodeError(str(error)) from error


def decode_any_from_agent(data: bytes) -> FromAgent:
    try:
        return _from_agent.decode(data)
    except UnicodeDecodeError as error:  # msgspec does not make it its own error
        raise msgspec.DecodeError(str(error)) from error


def decode_any_from_server(data: bytes) -> FromServer:
    try:
        return _from_server.decode(data)
    except UnicodeDecodeError as error:  # msgspec does not make it its own error
        raise msgspec.DecodeError(str(error)) from error
