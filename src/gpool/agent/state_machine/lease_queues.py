"""What the session remembers: leases, the lines they stand in, and the runners that serve the lines.

Plain mutable records without behaviour towards the world; only `gpool.agent.state_machine.session` moves leases between them.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum

from gpool.agent.state_machine.log_buffer import LogBuffer
from gpool.core.model import Allocation, InputFile, Network, Phase, Slice, TaskKind, TaskSpec, Tier
from gpool.wire.frames import Rendezvous

NEVER = 1 << 62
"""Later than any boot clock."""

REMEMBERED = 50_000
"""Past leases remembered at least (and at most twice as many)."""


class Fate(IntEnum):
    """What is to become of a lease once its run is over; `NONE` (false) while nobody interfered."""

    NONE = 0
    STOPPED = 1  # the server asked: `Released` once nothing of it runs
    TIMED_OUT = 2
    SHUTDOWN = 3  # the owner stops the agent: requeued by the server
    FORGOTTEN = 4  # dropped or handed back: never reported again
    LET_GO = 5  # the lease time was over: `Finished` as lost once nothing of it runs
    PREEMPTED = 6  # for others, or for the owner: saved, ended, requeued by the server


class Ending(IntEnum):
    """How a command is being ended; what is stronger overrides."""

    NO = 0
    SAVING = 1  # with a farewell: it may be warned, its checkpoint is saved
    AT_ONCE = 2


class Place(IntEnum):
    WAITING = 0  # in its line
    SENT = 1  # with a runner
    COMMAND = 2  # its line's command


Variables = tuple[tuple[str, str], ...]


def digest_of(secrets: Variables) -> str:
    """Tells secrets apart without holding them."""
    told = "".join(f"{len(word)}:{word}" for pair in secrets for word in pair)
    return hashlib.sha256(told.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True)
class RunnerKey:
    """Calls with equal keys may share a runner, one after another."""

    user: int
    owner: bool
    environment: str
    env: tuple[tuple[str, str], ...]
    secrets: str  # a hash of them, or nothing
    python: str | None
    tier: Tier
    cpu_milli: int
    memory_bytes: int
    slices: tuple[Slice, ...]
    network: Network = Network.NONE
    preload: tuple[str, ...] = ()  # with it, each function has a process of its own


class Order:
    """What the leases of one granted line have in common."""

    __slots__ = ("allocation", "gang", "is_function", "key", "owner", "secrets", "spec", "user")

    def __init__(
        self,
        allocation: Allocation,
        user: int,
        owner: bool,
        spec: TaskSpec,
        secrets: Variables = (),
        gang: Rendezvous | None = None,
    ) -> None:
        self.allocation = allocation
        self.user = user
        self.owner = owner
        self.spec = spec
        self.secrets = secrets
        self.gang = gang
        self.is_function = spec.kind is TaskKind.FUNCTION
        self.key = RunnerKey(
            user,
            owner,
            spec.environment,
            spec.env,
            digest_of(secrets) if secrets else "",
            spec.requirements.python,
            spec.requirements.tier,
            allocation.cpu_milli,
            allocation.memory_bytes,
            allocation.slices,
            spec.requirements.network,
            spec.preload,
        )


class Held:
    """One lease this agent has."""

    __slots__ = (
        "checkpoint",
        "epoch",
        "fate",
        "line",
        "log",
        "order",
        "payload",
        "payload_sha256",
        "place",
        "task",
    )

    def __init__(
        self,
        task: int,
        epoch: int,
        order: Order,
        line: Line,
        payload: bytes,
        payload_sha256: str,
        checkpoint: tuple[InputFile, ...] = (),
    ) -> None:
        self.task = task
        self.epoch = epoch
        self.order = order
        self.line = line
        self.payload = payload
        self.payload_sha256 = payload_sha256
        self.checkpoint = checkpoint
        self.place = Place.WAITING
        self.fate = Fate.NONE
        self.log: LogBuffer | None = None

    def __repr__(self) -> str:
        return f"{self.task}:{self.epoch} ({self.place.name.lower()}, {self.fate.name.lower()})"


class RunnerState(Enum):
    STARTING = "starting"
    READY = "ready"
    ENDING = "ending"


class Runner:
    """One runner sandbox. `sent` are the calls it has, in order; the first is the one that runs."""

    __slots__ = (
        "announced",
        "head_begun",
        "head_since",
        "idle_since",
        "key",
        "line",
        "mean_us",
        "number",
        "sent",
        "state",
    )

    def __init__(self, number: int, key: RunnerKey, line: Line) -> None:
        self.number = number
        self.key = key
        self.line = line
        self.state = RunnerState.STARTING
        self.sent: deque[Held] = deque()
        self.head_since = 0  # when the first call was handed over
        self.head_begun = 0  # ... or the runner was started for it: its time-out counts from here
        self.announced = False  # the head's `Started` was said
        self.idle_since = NEVER  # since when it has nothing to do
        self.mean_us = -1  # of a call; -1: not known yet

    def serves(self, order: Order) -> bool:
        return order.is_function and order.key == self.key

    @property
    def is_wanted(self) -> bool:
        """It has calls, or the next in its line is one for it. A runner can start, or idle, for nobody any more."""
        waiting = self.line.waiting
        return bool(self.sent) or (bool(waiting) and self.serves(waiting[0].order))


class Line:
    """The leases of one allocation: at most one of them runs.

    `runner` and `command` stay until their sandbox is really gone, so nothing starts beside a dying one.
    """

    __slots__ = (
        "announced",
        "command",
        "command_begun",
        "command_ending",
        "command_since",
        "failures",
        "granted_at",
        "next_at",
        "number",
        "phase",
        "phase_since",
        "phase_told",
        "runner",
        "waiting",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.waiting: deque[Held] = deque()
        self.runner: Runner | None = None
        self.command: Held | None = None
        self.command_begun = NEVER  # its time-out counts from here, whatever the phase
        self.command_since = NEVER  # when it really started
        self.command_ending = Ending.NO
        self.announced = False
        self.phase = Phase.START  # of the command, or of the runner that starts
        self.phase_since = 0
        self.phase_told = False
        self.failures = 0  # runners in a row that never became ready
        self.granted_at = 0  # when a lease last joined
        self.next_at = NEVER  # when `Ticked` has something to do here

    def reach(self, now: int, phase: Phase) -> None:
        self.phase, self.phase_since, self.phase_told = phase, now, phase is Phase.RUN

    @property
    def is_spent(self) -> bool:
        return not self.waiting and self.runner is None and self.command is None


class Past:
    """The latest epoch of each task that is over here: a late copy of its grant must not start it again."""

    __slots__ = ("_newer", "_older")

    def __init__(self) -> None:
        self._newer: dict[int, int] = {}
        self._older: dict[int, int] = {}

    def add(self, task: int, epoch: int) -> None:
        if epoch > self._newer.get(task, 0):
            self._newer[task] = epoch
        if len(self._newer) > REMEMBERED:
            self._older, self._newer = self._newer, {}

    def covers(self, task: int, epoch: int) -> bool:
        return self._newer.get(task, 0) >= epoch or self._older.get(task, 0) >= epoch


def wrongs(
    held: Mapping[int, Held], lines: Mapping[int, Line], runners: Mapping[int, Runner]
) -> list[str]:
    """What must never be so and is, in sentences."""
    found: list[str] = []
    stands: dict[int, int] = {}
    for line in lines.values():
        runner, command = line.runner, line.command
        if command is not None and runner is not None:
            found.append(f"line {line.number} runs a command and a runner")
        if line.is_spent:
            found.append(f"line {line.number} has nothing left and is still there")
        if runner is not None and runners.get(runner.number) is not runner:
            found.append(f"line {line.number} has a runner that is not known")
        sent = runner.sent if runner is not None else ()
        for lease in (*line.waiting, *sent, *([command] if command else [])):
            stands[id(lease)] = stands.get(id(lease), 0) + 1
            if lease.fate is not Fate.FORGOTTEN and held.get(lease.task) is not lease:
                found.append(f"{lease} stands in line {line.number} and is not held")
    for lease in held.values():
        if stands.get(id(lease), 0) != 1:
            found.append(f"{lease} stands in {stands.get(id(lease), 0)} places")
    for runner in runners.values():
        if runner.line.runner is not runner:
            found.append(f"runner {runner.number} serves no line")
    return found
