"""A state machine under test: feeds events, obeys nothing, and checks at the end what must never happen."""

from __future__ import annotations

from typing import TypeVar

from gpool.agent.state_machine.agent_state import AgentState
from gpool.agent.state_machine.instructions import (
    CallAnswered,
    CallsAnswered,
    Connected,
    EndCommand,
    EndRunner,
    Event,
    FrameArrived,
    Instruction,
    RunnerEnded,
    Send,
    SendCalls,
    ShutdownAsked,
    StartCommand,
    StartRunner,
    Ticked,
)
from gpool.core.model import (
    Allocation,
    EndReason,
    Offer,
    Requirements,
    Slice,
    Span,
    TaskKind,
    TaskSpec,
)
from gpool.wire.frames import (
    Beat,
    BeatSeen,
    Grants,
    Hold,
    Lease,
    Line,
    Recorded,
    ReportItem,
    Reports,
    ServerFrame,
    Stop,
    StopReason,
    Welcome,
)

SECOND = 1_000_000
TTL, MARGIN, BEAT = 30 * SECOND, 5 * SECOND, 8 * SECOND
OFFER = Offer(4000, 8 << 30, 1 << 40)
T = TypeVar("T")


def function(name: str = "f", **changes: object) -> TaskSpec:
    return TaskSpec(
        TaskKind.FUNCTION, name, Requirements(python="3.11"), function_sha256=name * 64, **changes
    )  # type: ignore[arg-type]


def command(timeout: int = 3600 * SECOND) -> TaskSpec:
    return TaskSpec(TaskKind.COMMAND, "true", command=("true",), timeout=Span(timeout))


def allocation(number: int = 0, gpu: int | None = None) -> Allocation:
    slices = () if gpu is None else (Slice(gpu, 1 << 30, 1000),)
    return Allocation(number, 1000, 1 << 30, slices)


def answer(task: int, epoch: int = 1, **changes: object) -> CallAnswered:
    fields: dict[str, object] = {
        "raised": False,
        "value": b"v",
        "value_sha256": "",
        "error_text": "",
        "duration_us": 50,
        "output": (),
    }
    return CallAnswered(task, epoch, **(fields | changes))  # type: ignore[arg-type]


class Case:
    """Every instruction is checked as it comes; reports are recorded at once unless `recording` is off."""

    def __init__(self) -> None:
        self.state = AgentState("boot", OFFER)
        self.now = 1000
        self.recording = True
        self.reported: list[ReportItem] = []
        self.runners: set[int] = set()
        self.commands: set[tuple[int, int]] = set()
        self.specs: dict[TaskSpec, int] = {}

    def feed(self, event: Event, after: int = 1) -> list[Instruction]:
        self.now += after
        out = self.state.handle(self.now, event)
        self.check(event, out)
        sent = [s.frame for s in out if isinstance(s, Send) and isinstance(s.frame, Reports)]
        for frame in sent:
            self.reported += frame.items
        if self.recording:
            for frame in sent:
                out += self.feed(FrameArrived(Recorded(frame.sequence)), after=0)
            if isinstance(event, ShutdownAsked):  # the server confirms the last heartbeat
                for beat in frames(Beat, out):
                    out += self.feed(FrameArrived(BeatSeen(beat.number)), after=0)
        return out

    def check(self, event: Event, out: list[Instruction]) -> None:
        match event:
            case RunnerEnded():
                self.runners.discard(event.runner)
        for instruction in out:
            match instruction:
                case StartRunner():
                    assert instruction.runner not in self.runners
                    self.runners.add(instruction.runner)
                case SendCalls() | EndRunner():
                    assert instruction.runner in self.runners, "an instruction to an unknown runner"
                case StartCommand():
                    self.commands.add((instruction.task, instruction.epoch))
                case EndCommand():
                    assert (instruction.task, instruction.epoch) in self.commands
        assert self.state.violations() == []

    def arrive(self, frame: ServerFrame, after: int = 1) -> list[Instruction]:
        return self.feed(FrameArrived(frame), after)

    def welcome(self, drop: tuple[Hold, ...] = (), *, joint: bool = False) -> list[Instruction]:
        hello = self.feed(Connected())[0]
        assert isinstance(hello, Send)
        beat = hello.frame.beat  # type: ignore[union-attr]
        return self.arrive(Welcome(1, beat, TTL, MARGIN, BEAT, drop, 1, joint))

    def grant(
        self,
        spec: TaskSpec,
        *tasks: int,
        number: int = 0,
        epoch: int = 1,
        user: int = 7,
        gpu: int | None = None,
    ) -> list[Instruction]:
        known = self.specs.setdefault(spec, len(self.specs) + 1)
        leases = tuple(Lease(task, epoch, b"args") for task in tasks)
        line = Line(allocation(number, gpu), user, False, known, leases)
        return self.arrive(Grants(0, ((known, spec),), (line,)))

    def grant_lines(self, *lines: tuple[TaskSpec, int, int, int]) -> list[Instruction]:
        """Several lines in one frame, each (spec, task, number, gpu)."""
        known = [self.specs.setdefault(spec, len(self.specs) + 1) for spec, _, _, _ in lines]
        granted = tuple(
            Line(allocation(number, gpu), 7, False, id_, (Lease(task, 1, b"args"),))
            for id_, (_, task, number, gpu) in zip(known, lines, strict=True)
        )
        specs = tuple((id_, spec) for id_, (spec, _, _, _) in zip(known, lines, strict=True))
        return self.arrive(Grants(0, specs, granted))

    def stop(self, *tasks: int, epoch: int = 1) -> list[Instruction]:
        return self.arrive(Stop(tuple(Hold(t, epoch) for t in tasks), StopReason.CANCELLED))

    def answered(self, runner: int, *tasks: int, **changes: object) -> list[Instruction]:
        return self.feed(CallsAnswered(runner, tuple(answer(t, **changes) for t in tasks)))

    def runner_ended(
        self,
        runner: int,
        reason: EndReason = EndReason.EXITED,
        code: int = 1,
        *,
        retired: bool = False,
    ) -> list[Instruction]:
        return self.feed(RunnerEnded(runner, reason, code, "said so", retired=retired))

    def pass_time(self, span: int) -> list[Instruction]:
        """Tick whenever the state machine wants it, as the daemon does."""
        out: list[Instruction] = []
        until = self.now + span
        for _ in range(10_000):
            at = self.state.wakes_at
            if at is None or at > until:
                break
            self.now = max(self.now, at)
            out += self.feed(Ticked(), after=0)
        else:
            raise AssertionError("the state machine never stops asking to be woken")
        self.now = until
        return out

    def take_reports(self) -> list[ReportItem]:
        items, self.reported = self.reported, []
        return items


def of(kind: type[T], out: list[Instruction]) -> list[T]:
    return [instruction for instruction in out if isinstance(instruction, kind)]


def calls(out: list[Instruction]) -> list[int]:
    return [call.task for send in of(SendCalls, out) for call in send.calls]


def frames(kind: type[T], out: list[Instruction]) -> list[T]:
    return [send.frame for send in of(Send, out) if isinstance(send.frame, kind)]
