"""Random lives of the state machine: frames lost, doubled and out of order, sandboxes dying, time jumping."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpool.agent.state_machine.agent_state import AgentState
from gpool.agent.state_machine.instructions import (
    CallsAnswered,
    CommandEnded,
    CommandPrinted,
    CommandStarted,
    Connected,
    Disconnected,
    EndCommand,
    EndRunner,
    Event,
    FrameArrived,
    RunnerCall,
    RunnerEnded,
    RunnerReady,
    Send,
    SendCalls,
    ShutdownAsked,
    StartCommand,
    StartRunner,
    Ticked,
)
from gpool.core.model import EndReason, Span
from gpool.wire.frames import (
    Beat,
    BeatSeen,
    Finished,
    Grants,
    HandedBack,
    Hello,
    Hold,
    Lease,
    Line,
    Recorded,
    Released,
    ReportItem,
    Reports,
    ServerFrame,
    Stop,
    StopReason,
    Welcome,
)
from tests.agent.state_machine.state_case import (
    BEAT,
    MARGIN,
    OFFER,
    SECOND,
    TTL,
    allocation,
    answer,
    command,
    function,
)

TERM = TTL - MARGIN
SPECS = (
    command(timeout=20 * SECOND),
    function(timeout=Span(20 * SECOND)),
    function("g", environment="other"),
)
Lease_ = tuple[int, int]


def is_giving_up(item: ReportItem) -> bool:
    """What may be said of a lease that was let go: that it is over, without a result."""
    if isinstance(item, Finished):
        return item.reason in (EndReason.LOST, EndReason.PREEMPTED)
    return isinstance(item, HandedBack | Released)


class SessionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.state = AgentState("boot", OFFER)
        self.now = 0
        self.connected = False
        self.inbound: list[ServerFrame] = []
        self.beats: dict[int, int] = {}
        self.confirmed: int | None = None
        self.epochs: dict[int, int] = {}
        self.places: dict[Lease_, int] = {}
        self.forgotten: set[Lease_] = set()
        self.runners: dict[int, list[RunnerCall]] = {}
        self.ready: set[int] = set()
        self.dying_runners: set[int] = set()
        self.commands: dict[Lease_, bool] = {}  # whether it is being ended
        self.saving: set[tuple[int, int]] = set()  # commands that are given time to save
        self.just_ended: int | Lease_ | None = None

    # ---- the machinery

    def feed(self, event: Event) -> None:
        before = set(self.state._leases.ids())
        overdue = self.confirmed is not None and self.now >= self.confirmed + TERM
        if overdue:
            self.forgotten |= before
            self.confirmed = None
        if isinstance(event, FrameArrived):
            self.note_confirmation(event.frame)
        out = self.state.handle(self.now, event)
        if overdue:
            left = before & set(self.state._leases.ids())
            assert all(self.state._leases.held[task].is_ending for task, _ in left), (
                "one is not ended"
            )
            ended = {i.runner for i in out if isinstance(i, EndRunner)} | self.dying_runners
            assert set(self.runners) <= ended | {
                i.runner for i in out if isinstance(i, StartRunner)
            } or isinstance(event, RunnerEnded)
        for instruction in out:
            match instruction:
                case Send(frame=Reports() as reports):
                    for item in reports.items:
                        lease = (item.task, item.epoch)
                        assert lease not in self.forgotten or is_giving_up(item), (
                            f"{item} of a forgotten lease"
                        )
                    if self.connected:
                        self.inbound.append(Recorded(reports.sequence))
                case Send(frame=Hello() as hello):
                    self.beats[hello.beat] = self.now
                    self.inbound.append(Welcome(1, hello.beat, TTL, MARGIN, BEAT, ()))
                case Send(frame=Beat() as beat):
                    self.beats[beat.number] = self.now
                    self.inbound.append(BeatSeen(beat.number))
                case StartCommand():
                    lease = (instruction.task, instruction.epoch)
                    assert lease not in self.forgotten
                    self.assert_free(self.places[lease])
                    assert instruction.task not in {task for task, _ in self.commands}
                    self.commands[lease] = False
                case EndCommand():
                    lease = (instruction.task, instruction.epoch)
                    if lease == self.just_ended:  # let go before its end was looked at
                        continue
                    saves = instruction.reason in (EndReason.PREEMPTED, EndReason.TIMED_OUT)
                    called_off = lease in self.saving and not saves  # a farewell that may not go on
                    assert self.commands[lease] is False or called_off, "ended twice, or unknown"
                    self.commands[lease] = True
                    self.saving.add(lease) if saves else self.saving.discard(lease)
                case StartRunner():
                    assert instruction.runner not in self.runners
                    self.runners[instruction.runner] = []
                case SendCalls():
                    assert instruction.runner in self.ready - self.dying_runners
                    for call in instruction.calls:
                        lease = (call.task, call.epoch)
                        assert lease not in self.forgotten
                        self.assert_free(self.places[lease], instruction.runner)
                        self.runners[instruction.runner].append(call)
                case EndRunner():
                    if instruction.runner == self.just_ended:
                        continue
                    assert instruction.runner in self.runners
                    assert instruction.runner not in self.dying_runners
                    self.dying_runners.add(instruction.runner)

    def assert_free(self, place: int, runner: int = 0) -> None:
        """Nothing else with work runs on the allocation."""
        assert all(self.places[lease] != place for lease in self.commands)
        for number, sent in self.runners.items():
            if number != runner:
                assert all(self.places[c.task, c.epoch] != place for c in sent)

    def note_confirmation(self, frame: ServerFrame) -> None:
        number = {Welcome: "beat", BeatSeen: "number", Grants: "beat"}.get(type(frame))
        if number is None or (isinstance(frame, Welcome) and not self.connected):
            return
        sent_at = self.beats.get(getattr(frame, number))
        if sent_at is not None and (self.confirmed is None or sent_at > self.confirmed):
            self.beats = {n: at for n, at in self.beats.items() if at > sent_at}
            self.confirmed = sent_at

    # ---- the channel

    @initialize()
    def begin(self) -> None:
        self.connect()
        self.feed(FrameArrived(self.inbound.pop(0)))

    @rule()
    def connect(self) -> None:
        if self.connected:
            self.feed(Disconnected())
        self.connected = True
        self.feed(Connected())

    @rule()
    def disconnect(self) -> None:
        self.connected = False
        self.inbound.clear()
        self.feed(Disconnected())

    @precondition(lambda self: self.inbound and self.connected)
    @rule(data=st.data(), again=st.booleans())
    def deliver(self, data: st.DataObject, again: bool) -> None:
        place = data.draw(st.integers(0, len(self.inbound) - 1))
        frame = self.inbound[place] if again else self.inbound.pop(place)
        self.feed(FrameArrived(frame))

    @precondition(lambda self: self.inbound)
    @rule()
    def lose(self) -> None:
        self.inbound.pop(0)

    # ---- the server

    @precondition(lambda self: self.connected)
    @rule(
        place=st.integers(0, 2),
        spec=st.integers(0, 2),
        tasks=st.sets(st.integers(1, 12), min_size=1, max_size=6),
        user=st.integers(7, 8),
        gpu=st.sampled_from([None, None, 0]),
    )
    def grant(self, place: int, spec: int, tasks: set[int], user: int, gpu: int | None) -> None:
        leases = []
        for task in sorted(tasks):
            epoch = self.epochs[task] = self.epochs.get(task, 0) + 1
            self.places[task, epoch] = place
            leases.append(Lease(task, epoch, b"args"))
        line = Line(allocation(place, gpu), user, False, spec, tuple(leases))
        beat = max(self.beats, default=0)
        self.inbound.append(Grants(beat, tuple(enumerate(SPECS)), (line,)))

    @precondition(lambda self: self.epochs and self.connected)
    @rule(data=st.data(), kind=st.sampled_from(["stop", "drop", "refuse"]))
    def take_back(self, data: st.DataObject, kind: str) -> None:
        tasks = data.draw(st.sets(st.sampled_from(sorted(self.epochs)), min_size=1))
        holds = tuple(Hold(task, self.epochs[task]) for task in sorted(tasks))
        match kind:
            case "stop":
                self.inbound.append(Stop(holds, StopReason.CANCELLED))
            case "drop":
                self.inbound.append(BeatSeen(0, holds))
            case _:
                self.inbound.append(Recorded(0, holds))

    # ---- the sandboxes

    @precondition(lambda self: set(self.runners) - self.ready - self.dying_runners)
    @rule()
    def runner_ready(self) -> None:
        runner = min(set(self.runners) - self.ready - self.dying_runners)
        self.ready.add(runner)
        self.feed(RunnerReady(runner))

    @precondition(lambda self: any(self.runners.values()))
    @rule(count=st.integers(1, 8), data=st.data())
    def calls_answered(self, count: int, data: st.DataObject) -> None:
        runner = data.draw(st.sampled_from(sorted(r for r, sent in self.runners.items() if sent)))
        sent = self.runners[runner]
        done, self.runners[runner] = sent[:count], sent[count:]
        output = ((1, b"hi"),) if count == 3 else ()
        answers = tuple(answer(c.task, c.epoch, output=output) for c in done)
        self.feed(CallsAnswered(runner, answers))

    @precondition(lambda self: self.runners)
    @rule(data=st.data(), code=st.sampled_from([0, 1, 137]))
    def runner_ended(self, data: st.DataObject, code: int) -> None:
        first = sorted(self.dying_runners) or sorted(self.runners)
        runner = data.draw(st.sampled_from(first))
        del self.runners[runner]
        self.ready.discard(runner)
        self.dying_runners.discard(runner)
        self.just_ended = runner
        self.feed(RunnerEnded(runner, EndReason.EXITED, code, ""))
        self.just_ended = None

    @precondition(lambda self: self.commands)
    @rule(data=st.data())
    def command_runs(self, data: st.DataObject) -> None:
        task, epoch = data.draw(st.sampled_from(sorted(self.commands)))
        self.feed(CommandStarted(task, epoch))
        self.feed(CommandPrinted(task, epoch, 1, b"line\n"))

    @precondition(lambda self: self.commands)
    @rule(data=st.data())
    def command_ended(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.commands)))
        reason = EndReason.LOST if self.commands.pop(lease) else EndReason.EXITED
        self.just_ended = lease
        self.feed(CommandEnded(*lease, reason, 0, "", 5))
        self.just_ended = None

    # ---- time

    @rule(span=st.sampled_from([1, 6_000, 100_000, SECOND, 3 * SECOND, 9 * SECOND]))
    def time_passes(self, span: int) -> None:
        until = self.now + span
        for _ in range(1000):
            at = self.state.wakes_at
            if at is None or at > until:
                break
            self.now = max(self.now, at)
            self.feed(Ticked())
        else:
            raise AssertionError("the state machine never stops asking to be woken")
        self.now = until

    @rule()
    def freeze(self) -> None:
        """The machine sleeps past every lease; nothing ticks."""
        self.now += TTL

    @precondition(lambda self: self.now > 60 * SECOND)
    @rule()
    def shut_down(self) -> None:
        self.feed(ShutdownAsked())

    @invariant()
    def nothing_is_wrong(self) -> None:
        assert self.state.violations() == []


TestSessionMachine = SessionMachine.TestCase
TestSessionMachine.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
