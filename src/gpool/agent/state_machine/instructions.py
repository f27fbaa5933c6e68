"""The agent's vocabulary: events go into the session, instructions come out. The daemon obeys them in order.

Events are past participles, instructions imperatives; all carry plain values, so a test is a list in and a list out.
Times are microseconds of the agent's own boot clock (counts while the machine sleeps), never the server's.
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

# ---- events


@dataclass(frozen=True, slots=True)
class Connected:
    """The channel is open; nothing was said yet."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The channel is gone; the daemon dials again by itself."""


@dataclass(frozen=True, slots=True)
class FrameArrived:
    frame: ServerFrame


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed: `session.wakes_at` had come."""


@dataclass(frozen=True, slots=True)
class OfferDetected:
    """The machine was looked at again."""

    offer: Offer


@dataclass(frozen=True, slots=True)
class ReadingsTaken:
    """The GPUs' sensors were read; the next beat tells."""

    readings: tuple[GpuReading, ...]


@dataclass(frozen=True, slots=True)
class CommandReached:
    """The attempt came to this phase (`CommandStarted` says `run`)."""

    task: int
    epoch: int
    phase: Phase


@dataclass(frozen=True, slots=True)
class CommandCheckpointed:
    """The checkpoint was saved and uploaded."""

    task: int
    epoch: int
    files: tuple[OutputFile, ...]


@dataclass(frozen=True, slots=True)
class ReclaimAsked:
    """The owner wants these GPUs back (None: the whole machine); what runs there is warned, saved and ended."""

    gpus: frozenset[int] | None
    why: str


@dataclass(frozen=True, slots=True)
class RunsLimited:
    """The owner lets nothing run longer than this (None: as long as it likes); what does is preempted."""

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
    """The attempt is over and its sandbox gone; outputs are uploaded when it exited by itself."""

    task: int
    epoch: int
    reason: EndReason
    exit_code: int | None
    error_text: str
    duration_us: int
    outputs: tuple[OutputFile, ...] = ()
    fault: Fault | None = None  # set: it could not be started


@dataclass(frozen=True, slots=True)
class RunnerReached:
    """A starting runner came to this phase: its environment is built, or its sandbox started."""

    runner: int
    phase: Phase


@dataclass(frozen=True, slots=True)
class RunnerReady:
    """The runner of an allocation takes calls."""

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
        None  # set when the call did not answer: an input missing, a value lost, its process gone
    )
    exit_code: int | None = None
    fault: Fault | None = None  # set: it could not be begun


@dataclass(frozen=True, slots=True)
class CallsAnswered:
    """Answers of one runner, in the order they were given."""

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
    """The runner is gone, asked for or not; calls sent and unanswered did not answer.

    `retired`: it ended by its own intent, between two calls; none of the unanswered had begun.
    """

    runner: int
    reason: EndReason
    exit_code: int
    detail: str
    retired: bool = False
    fault: Fault | None = None  # of one that could not be started


@dataclass(frozen=True, slots=True)
class ShutdownAsked:
    """The owner stops the agent: hand back what is in line, end what runs."""


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
    """Put the frame on the channel; when it is down, drop it: the session sends again what matters."""

    frame: AgentFrame


@dataclass(frozen=True, slots=True)
class StartCommand:
    """Fetch the inputs, start a fresh sandbox, stream its output, collect and upload outputs, report each step."""

    task: int
    epoch: int
    spec: TaskSpec
    allocation: Allocation
    owner: bool
    secrets: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    checkpoint: tuple[InputFile, ...] = ()  # laid in after the inputs
    user: int = 0
    gang: Rendezvous | None = None


@dataclass(frozen=True, slots=True)
class EndCommand:
    """Kill the attempt's sandbox and remove it; `CommandEnded` follows with this reason.

    Preempted with a `grace_us`, it is sent SIGTERM first and has that long. Preempted or timed out, its checkpoint is
    saved before the end is told, and one that had exited by itself before tells that end. Any other reason is carried
    out at once, and so calls off a farewell that has begun.
    """

    task: int
    epoch: int
    reason: EndReason
    grace_us: int = 0


@dataclass(frozen=True, slots=True)
class StartRunner:
    """`RunnerReady` or `RunnerEnded` follows."""

    runner: int  # the session's number for it, never used again
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


@dataclass(frozen=True, slots=True)
class SendCalls:
    """Hand calls to a runner, fetching functions and large arguments first."""

    runner: int
    calls: tuple[RunnerCall, ...]


@dataclass(frozen=True, slots=True)
class EndRunner:
    """Kill the runner's sandbox; `RunnerEnded` follows."""

    runner: int


@dataclass(frozen=True, slots=True)
class Exit:
    """Everything has ended: the daemon may go."""


Instruction = Send | StartCommand | EndCommand | StartRunner | SendCalls | EndRunner | Exit
