"""The agent's channel: msgpack frames over one WebSocket, many leases or reports in each.

First the connection itself: the server sends a `Challenge`, the agent answers `Prove`, and is given `Proven` with a
short-lived token; near the token's end the same three pass again. Whoever carries the frames deals with these and puts
the token on every `Reports`; behind it nobody sees them.

Then the agent speaks first with `Hello`; the server answers `Welcome` or `Refused`. From then on either side sends when
it has something. Reports are kept by the agent until `Recorded` names their sequence number and sent again after a
reconnect; the store's fence makes the repetition harmless. Lease time: see `gpool.agent.state_machine.agent_state`.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

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
from gpool.core.trust.gpu_verification import Measured, Opening, Size, Verdict

PROTOCOL = 1
MAX_FRAME_BYTES = 8 * 1024 * 1024
MAX_SPEC_BYTES = 3 * 1024 * 1024
"""One spec on the wire: with a frame's share of payloads it must fit into a frame."""
MAX_PROOF_BYTES = 1024
"""A frame from somebody who has proved nothing yet."""

CHANNEL_PATH = "/v1/nodes/channel"
NODE_HEADER = "Gpool-Node"
"""Who the dialling agent says it is; the challenge asks it to prove that."""


class _Frame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Positional on the wire: fields are only ever added at the end, with a default."""


class Hold(msgspec.Struct, frozen=True, array_like=True):
    """A lease the agent has."""

    task: int
    epoch: int


# ---- what an agent reports; each item is fenced by (task, epoch)


class Started(_Frame, frozen=True):
    """The sandbox runs. Left out for what ended before the batch was sent: `Finished` implies it."""

    task: int
    epoch: int


class Finished(_Frame, frozen=True):
    """The attempt ended and its sandbox is gone: the allocation is free for the next in line."""

    task: int
    epoch: int
    reason: EndReason
    exit_code: int | None = None
    value: bytes = b""  # a function's pickled value or exception, when small
    value_sha256: str = ""  # ... or the artifact that holds it
    error_text: str = ""  # for people: traceback or message
    duration_us: int = 0  # as the agent measured it; a hint, billing uses the server's times
    outputs: tuple[OutputFile, ...] = ()
    fault: Fault | None = None  # set where it could not be started; older agents never say it


class Released(_Frame, frozen=True):
    """A stopped lease (cancelled or stale) is really over: nothing of it runs any more."""

    task: int
    epoch: int


class HandedBack(_Frame, frozen=True):
    """A lease that stood in line and was not started is given back."""

    task: int
    epoch: int


class LogChunk(_Frame, frozen=True):
    """Output of a running attempt. `sequence` counts from 0 within the epoch."""

    task: int
    epoch: int
    sequence: int
    stream: int  # 1 stdout, 2 stderr
    data: bytes


class Reached(_Frame, frozen=True):
    """The attempt came to a phase that takes its time; `Started` says `run`, short phases are left out."""

    task: int
    epoch: int
    phase: Phase


class Checkpointed(_Frame, frozen=True):
    """The checkpoint directory as it was: uploaded under this lease, for the next attempt to begin with."""

    task: int
    epoch: int
    files: tuple[OutputFile, ...]  # paths beneath the work directory


ReportItem = Started | Finished | Released | HandedBack | LogChunk | Reached | Checkpointed


# ---- agent to server


class Hello(_Frame, frozen=True):
    protocol: int
    boot: str  # of this start of the agent; sorts after those of its earlier starts
    offer: Offer
    beat: int  # the hello is a beat too
    holds: tuple[Hold, ...]  # everything it has, running or in line


class GpuReading(msgspec.Struct, frozen=True, array_like=True):
    """What a GPU did since the last beat. None: it does not say."""

    gpu: int  # its index
    utilisation_percent: int | None = None
    memory_bytes: int | None = None
    power_mw: int | None = None
    temperature_c: int | None = None


class TaskReading(msgspec.Struct, frozen=True, array_like=True):
    """The same of one running attempt, over all its GPUs."""

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
    token: str = ""  # of `Proven`; put on by the connection


class OfferChanged(_Frame, frozen=True):
    """The machine changed: a GPU appeared or fell off, the owner's limits moved."""

    offer: Offer


class GpuMeasured(_Frame, frozen=True):
    """What `MeasureGpu` asked for."""

    uuid: str
    measured: Measured


class GpuCommitted(_Frame, frozen=True):
    """A trial's first step is done; see `gpool.core.trust.gpu_verification`."""

    trial: int
    root: bytes


class GpuAnswered(_Frame, frozen=True):
    trial: int
    roots: tuple[bytes, ...]


class GpuOpened(_Frame, frozen=True):
    trial: int
    openings: tuple[Opening, ...]


class GpuUnable(_Frame, frozen=True):
    """The agent cannot measure or examine this GPU; `trial` is 0 for a measurement."""

    trial: int
    uuid: str
    why: str


FromGpu = GpuMeasured | GpuCommitted | GpuAnswered | GpuOpened | GpuUnable

AgentFrame = Hello | Beat | Reports | OfferChanged | FromGpu


class Prove(_Frame, frozen=True):
    """The signature of a challenge's statement; see `gpool.transfer.node_proofs`."""

    nonce: str
    signature: str


# ---- server to agent


class StopReason(StrEnum):
    CANCELLED = "cancelled"
    STALE = "stale"
    PREEMPTED = "preempted"
    RECLAIMED = "reclaimed"  # for the owner, who waits for the GPU


class Welcome(_Frame, frozen=True):
    node: int
    beat: int  # the hello's, seen
    ttl_us: int
    margin_us: int
    beat_every_us: int
    drop: tuple[Hold, ...]  # of what it holds: not its any more (stop, report nothing)


class BeatSeen(_Frame, frozen=True):
    number: int
    drop: tuple[Hold, ...] = ()


class Lease(msgspec.Struct, frozen=True, array_like=True):
    task: int
    epoch: int
    payload: bytes = b""  # the pickled (args, kwargs) of a function, when small
    payload_sha256: str = ""  # ... or the artifact that holds it
    checkpoint: tuple[InputFile, ...] = ()  # what the last attempt saved, to begin with


class Secret(msgspec.Struct, frozen=True, array_like=True):
    """A variable of a spec's tasks that is never shown: not in a log, not in an error, not in its own `repr`."""

    spec: int
    name: str
    value: str

    def __repr__(self) -> str:
        return f"Secret({self.spec}, {self.name!r}, …)"


class Rendezvous(msgspec.Struct, frozen=True, array_like=True):
    """What one member of a gang is told of the whole; see `gpool.core.rendezvous`."""

    rank: int
    peers: tuple[tuple[str, int], ...]  # by rank: host and UDP port at which its lane listens
    secret: bytes  # of this gang under this epoch, the same for all members

    def __repr__(self) -> str:
        return f"Rendezvous({self.rank}, {self.peers}, …)"


class Line(msgspec.Struct, frozen=True, array_like=True):
    """Leases to stand in line, in this order, on one allocation; of a gang just one, its member here."""

    allocation: Allocation
    user: int
    owner: bool  # the user owns this node (the `process` runtime asks)
    spec: int
    leases: tuple[Lease, ...]
    gang: Rendezvous | None = None


class Grants(_Frame, frozen=True):
    """`specs` holds each spec the first time this connection needs it, `secrets` theirs."""

    beat: int  # the agent's last beat that the server had received
    specs: tuple[tuple[int, TaskSpec], ...]
    lines: tuple[Line, ...]
    secrets: tuple[Secret, ...] = ()


class Stop(_Frame, frozen=True):
    holds: tuple[Hold, ...]
    reason: StopReason


class Recorded(_Frame, frozen=True):
    """Reports up to `sequence` are durable; `refused` were under an old lease: drop those."""

    sequence: int
    refused: tuple[Hold, ...] = ()


class Refused(_Frame, frozen=True):
    """The server will not talk; `code` is an error code, `retry` whether later may go better."""

    code: str
    detail: str
    retry: bool


class MeasureGpu(_Frame, frozen=True):
    """Run the benchmark on it; nothing else runs there just now."""

    uuid: str


class ExamineGpu(_Frame, frozen=True):
    """The first step of a proof of GPU: compute, keep, commit. The keys come from seed, node, uuid and trial."""

    trial: int
    node: int
    uuid: str
    seed: bytes
    size: Size
    rounds: int


class AnswerNow(_Frame, frozen=True):
    """The second step. The time runs."""

    trial: int
    nonce: bytes


class OpenTiles(_Frame, frozen=True):
    trial: int
    tiles: tuple[int, ...]


class GpuJudged(_Frame, frozen=True):
    """The trial is over: let the memory go."""

    trial: int
    verdict: Verdict
    text: str


ToGpu = MeasureGpu | ExamineGpu | AnswerNow | OpenTiles | GpuJudged

ServerFrame = Welcome | BeatSeen | Grants | Stop | Recorded | Refused | ToGpu


class Challenge(_Frame, frozen=True):
    """Prove that you hold your key, for this purpose (`transfer.proving.Purpose`), now."""

    nonce: str
    purpose: str


class Proven(_Frame, frozen=True):
    """A token bound to the node's key, good for `lives_us` from `server_at_us`, the server's time."""

    token: str
    server_at_us: int
    lives_us: int


FromAgent = AgentFrame | Prove
FromServer = ServerFrame | Challenge | Proven
"""What is on the wire; without what concerns the connection alone, it is an `AgentFrame` or a `ServerFrame`."""

_encoder = msgspec.msgpack.Encoder()
_agent_decoder: msgspec.msgpack.Decoder[AgentFrame] = msgspec.msgpack.Decoder(AgentFrame)
_server_decoder: msgspec.msgpack.Decoder[ServerFrame] = msgspec.msgpack.Decoder(ServerFrame)
_from_agent: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)
_from_server: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)

Malformed = msgspec.MsgspecError
"""What the decoders raise on bytes that are no frame."""


def encode(frame: FromAgent | FromServer) -> bytes:
    return _encoder.encode(frame)


def weight_of(spec: TaskSpec) -> int:
    """The bytes a spec takes in a frame."""
    return len(_encoder.encode(spec))


def decode_from_agent(data: bytes) -> AgentFrame:
    return _agent_decoder.decode(data)


def decode_from_server(data: bytes) -> ServerFrame:
    return _server_decoder.decode(data)


def decode_any_from_agent(data: bytes) -> FromAgent:
    """With what concerns the connection."""
    return _from_agent.decode(data)


def decode_any_from_server(data: bytes) -> FromServer:
    return _from_server.decode(data)
