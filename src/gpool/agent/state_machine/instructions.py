"""The events that go into the state machine and the instructions that come out; the daemon executes them in order.

Events are past participles, instructions imperatives; all are plain values. Times are microseconds of the agent's boot
clock (which counts while the machine is suspended), never the server's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
from gpool.wire.frames import AgentFrame, GpuReading, Rendezvous, ServerFrame

NEVER = 1 << 62
"""Later than any boot clock."""

# ---- events


@dataclass(frozen=True, slots=True)
class Connected:
    """The channel is open; no frame was exchanged yet."""


@dataclass(frozen=True, slots=True)
class Disconnected: ...


@dataclass(frozen=True, slots=True)
class FrameArrived:
    frame: ServerFrame


@dataclass(frozen=True, slots=True)
class Ticked: ...


@dataclass(frozen=True, slots=True)
class OfferDetected:
    offer: Offer


@dataclass(frozen=True, slots=True)
class ReadingsTaken:
    readings: tuple[GpuReading, ...]


@dataclass(frozen=True, slots=True)
class CommandReached:
    task: int
    epoch: int
    phase: Phase


@dataclass(frozen=True, slots=True)
class CommandCheckpointed:
    task: int
    epoch: int
    files: tuple[OutputFile, ...]


@dataclass(frozen=True, slots=True)
class ProgressReported:
    """Progress of a command or a call, as `core.specs.progress.checked` returns it."""

    task: int
    epoch: int
    millionths: int
    text: str


@dataclass(frozen=True, slots=True)
class ReclaimAsked:
    """The owner reclaims these GPUs (None: the whole machine); tasks there are preempted."""

    gpus: frozenset[int] | None
    why: str


@dataclass(frozen=True, slots=True)
class RunsLimited:
    """The owner's limit on a run's duration (None: no limit); longer runs are preempted."""

    longest_us: int | None


@dataclass(frozen=True, slots=True)
class CommandStarted:
    task: int
    epoch: int


@dataclass(frozen=True, slots=True)
class CommandPrinted:
    task: int
    epoch: int
    stream: int
    data: bytes


@dataclass(frozen=True, slots=True)
class CommandEnded:
    """The attempt is over and its sandbox gone; if it exited by itself, its outputs are uploaded."""

    task: int
    epoch: int
    reason: EndReason
    exit_code: int | None
    error_text: str
    duration_us: int
    outputs: tuple[OutputFile, ...] = ()
    fault: Fault | None = None  # set if the command was never started


@dataclass(frozen=True, slots=True)
class RunnerReached:
    runner: int
    phase: Phase


@dataclass(frozen=True, slots=True)
class RunnerReady:
    runner: int


@dataclass(frozen=True, slots=True)
class CallAnswered:
    task: int
    epoch: int
    raised: bool
    value: bytes
    value_sha256: str
    error_text: str
    duration_us: int
    output: tuple[tuple[int, bytes], ...]
    reason: EndReason | None = (
        None  # set if there is no answer: input missing, value or process lost
    )
    exit_code: int | None = None
    fault: Fault | None = None  # set if the call was never begun


@dataclass(frozen=True, slots=True)
class CallsAnswered:
    runner: int
    answers: tuple[CallAnswered, ...]


@dataclass(frozen=True, slots=True)
class CallPrinted:
    runner: int
    task: int
    epoch: int
    stream: int
    data: bytes


@dataclass(frozen=True, slots=True)
class RunnerEnded:
    """The runner is gone; its unanswered calls have no result.

    `retired`: it ended itself as planned between two calls; no unanswered call had begun.
    """

    runner: int
    reason: EndReason
    exit_code: int
    detail: str
    retired: bool = False
    fault: Fault | None = None  # set if the runner never became ready


@dataclass(frozen=True, slots=True)
class ShutdownAsked: ...


Event = (
    Connected
    | Disconnected
    | FrameArrived
    | Ticked
    | OfferDetected
    | ReadingsTaken
    | ReclaimAsked
    | RunsLimited
    | CommandReached
    | CommandCheckpointed
    | ProgressReported
    | CommandStarted
    | CommandPrinted
    | CommandEnded
    | RunnerReached
    | RunnerReady
    | CallsAnswered
    | CallPrinted
    | RunnerEnded
    | ShutdownAsked
)


# ---- instructions


@dataclass(frozen=True, slots=True)
class Send:
    """Drop the frame if the channel is closed: the state machine repeats important frames."""

    frame: AgentFrame


@dataclass(frozen=True, slots=True)
class StartCommand:
    task: int
    epoch: int
    spec: TaskSpec
    allocation: Allocation
    owner: bool
    secrets: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    checkpoint: tuple[InputFile, ...] = ()  # placed over the inputs
    user: int = 0
    gang: Rendezvous | None = None


@dataclass(frozen=True, slots=True)
class EndCommand:
    """Kill the attempt's sandbox and remove it; `CommandEnded` follows with this reason.

    Preempted with a `grace_us`, it gets SIGTERM first and that much time. If preempted or timed out, its checkpoint is saved
    before the end is reported, and an earlier exit of its own is reported instead. Any other reason acts at once and
    cancels a running grace.
    """

    task: int
    epoch: int
    reason: EndReason
    grace_us: int = 0


@dataclass(frozen=True, slots=True)
class StartRunner:
    runner: int  # a number that is never used again
    user: int
    owner: bool
    spec: TaskSpec  # for environment, variables, python
    allocation: Allocation
    secrets: tuple[tuple[str, str], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class RunnerCall:
    task: int
    epoch: int
    function_sha256: str
    payload: bytes
    payload_sha256: str
    trace: str = ""  # of the spec


@dataclass(frozen=True, slots=True)
class SendCalls:
    runner: int
    calls: tuple[RunnerCall, ...]


@dataclass(frozen=True, slots=True)
class EndRunner:
    runner: int


@dataclass(frozen=True, slots=True)
class ExitDaemon: ...


Instruction = Send | StartCommand | EndCommand | StartRunner | SendCalls | EndRunner | ExitDaemon
