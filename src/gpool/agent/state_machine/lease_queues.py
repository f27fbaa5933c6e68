"""The records of the state machine: held leases, lease queues of allocations, their runners.

Only `dispatch`, `leases`, `lease_control` and `sandbox_events` change them.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum

from gpool.agent.state_machine.instructions import NEVER
from gpool.agent.state_machine.outbox import LogBuffer
from gpool.agent.state_machine.transitions import (
    STEPS,
    STORY_LENGTH,
    IllegalTransition,
    LeaseMove,
    LeaseState,
    LeaseTransition,
    Story,
    transitions_of,
)
from gpool.core.model import Allocation, InputFile, Network, Phase, Slice, TaskKind, TaskSpec, Tier
from gpool.wire.frames import Rendezvous

REMEMBERED = 50_000
"""Ended leases remembered at least (and at most twice as many)."""


class Ending(IntEnum):
    NO = 0
    SAVING = 1  # SIGTERM and grace, then a last checkpoint
    AT_ONCE = 2


Variables = tuple[tuple[str, str], ...]


def digest_of(secrets: Variables) -> str:
    text = "".join(f"{len(word)}:{word}" for pair in secrets for word in pair)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True)
class RunnerKey:
    user: int
    owner: bool
    environment: str
    env: tuple[tuple[str, str], ...]
    secrets: str  # their digest, or empty
    python: str | None
    tier: Tier
    cpu_milli: int
    memory_bytes: int
    slices: tuple[Slice, ...]
    network: Network = Network.NONE
    preload: tuple[str, ...] = ()  # if set, each call runs in a process of its own


class GrantTerms:
    __slots__ = (
        "allocation",
        "gang",
        "is_function",
        "key",
        "owner",
        "receipts",
        "secrets",
        "spec",
        "user",
    )

    def __init__(
        self,
        allocation: Allocation,
        user: int,
        owner: bool,
        spec: TaskSpec,
        secrets: Variables = (),
        gang: Rendezvous | None = None,
        receipts: str = "",
    ) -> None:
        """`receipts`: the pool's name in receipts, if the leases are priced."""
        self.allocation = allocation
        self.user = user
        self.owner = owner
        self.spec = spec
        self.secrets = secrets
        self.gang = gang
        self.receipts = receipts
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


class AgentLease:
    """`move` is the only way to change its state."""

    __slots__ = (
        "_story",
        "checkpoint",
        "epoch",
        "is_ending",
        "log",
        "payload",
        "payload_sha256",
        "queue",
        "state",
        "task",
        "terms",
    )

    def __init__(
        self,
        task: int,
        epoch: int,
        terms: GrantTerms,
        queue: LeaseQueue,
        payload: bytes,
        payload_sha256: str,
        checkpoint: tuple[InputFile, ...] = (),
    ) -> None:
        self.task = task
        self.epoch = epoch
        self.terms = terms
        self.queue = queue
        self.payload = payload
        self.payload_sha256 = payload_sha256
        self.checkpoint = checkpoint
        self.state = LeaseState.QUEUED
        self.is_ending = False  # ended, or about to be, by something else than its own end
        self.log: LogBuffer | None = None
        self._story: Story = ()

    def __repr__(self) -> str:
        return f"lease {self.task}:{self.epoch} ({self.state})"

    def move(self, now: int, move: LeaseMove, reason: str = "") -> None:
        """Raise `IllegalTransition` for a move not in `transitions.TABLE`."""
        step = STEPS.get((self.state, move))
        if step is None:
            steps = "; ".join(map(str, self.story())) or "granted, no transition yet"
            raise IllegalTransition(f"{self!r} cannot be {move} at {now}; its story: {steps}")
        row, self.state, self.is_ending = step
        if len(self._story) == 3 * STORY_LENGTH:
            self._story = self._story[3:]
        self._story += (now, row, reason)

    def story(self) -> list[LeaseTransition]:
        return transitions_of(self._story)

    @property
    def reason(self) -> str:
        return str(self._story[-1]) if self._story else ""


class RunnerState(Enum):
    STARTING = "starting"
    READY = "ready"
    ENDING = "ending"


class RunnerRecord:
    """`sent`: its calls, in order; the first one runs."""

    __slots__ = (
        "announced",
        "head_begun",
        "head_since",
        "idle_since",
        "key",
        "mean_us",
        "number",
        "queue",
        "sent",
        "state",
    )

    def __init__(self, number: int, key: RunnerKey, queue: LeaseQueue) -> None:
        self.number = number
        self.key = key
        self.queue = queue
        self.state = RunnerState.STARTING
        self.sent: deque[AgentLease] = deque()
        self.head_since = 0  # when the first call was sent
        self.head_begun = 0  # ... or the runner was started for it: its time-out counts from here
        self.announced = False  # the first call's `Started` was reported
        self.idle_since = NEVER
        self.mean_us = -1  # mean duration of a call; -1: not known yet

    def serves(self, terms: GrantTerms) -> bool:
        return terms.is_function and terms.key == self.key

    @property
    def is_wanted(self) -> bool:
        waiting = self.queue.waiting
        return bool(self.sent) or (bool(waiting) and self.serves(waiting[0].terms))


class LeaseQueue:
    """The leases of one allocation, prefetched by the server; at most one runs.

    `runner` and `command` stay set until their sandbox is gone, so nothing starts beside a dying one.
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
        "phase_reported",
        "phase_since",
        "runner",
        "waiting",
    )

    def __init__(self, number: int) -> None:
        self.number = number  # of the allocation
        self.waiting: deque[AgentLease] = deque()
        self.runner: RunnerRecord | None = None
        self.command: AgentLease | None = None
        self.command_begun = NEVER  # its time-out counts from here, whatever the phase
        self.command_since = NEVER  # when its process started
        self.command_ending = Ending.NO
        self.announced = False  # the command's `Started` was reported
        self.phase = Phase.START  # of the command, or of the runner that starts
        self.phase_since = 0
        self.phase_reported = False
        self.failures = 0  # runners in a row that never became ready
        self.granted_at = 0  # when a lease was last added
        self.next_at = NEVER  # when `Ticked` has something to do here

    def reach(self, now: int, phase: Phase) -> None:
        self.phase, self.phase_since, self.phase_reported = phase, now, phase is Phase.RUN

    @property
    def is_spent(self) -> bool:
        return not self.waiting and self.runner is None and self.command is None

    @property
    def current(self) -> AgentLease | None:
        if self.command is None and self.runner is not None and self.runner.sent:
            return self.runner.sent[0]
        return self.command

    def uses(self, gpus: frozenset[int] | None) -> bool:
        if gpus is None:
            return True
        lease = self.command or next(iter(self.waiting), None)
        slices = lease.terms.allocation.slices if lease is not None else ()
        if self.runner is not None:
            slices = self.runner.key.slices
        return any(part.gpu_index in gpus for part in slices)


class EndedLeases:
    """The latest epoch of each task that ended here: a late copy of its grant must not start it again."""

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


def invariant_violations(
    held: Mapping[int, AgentLease],
    queues: Mapping[int, LeaseQueue],
    runners: Mapping[int, RunnerRecord],
) -> list[str]:
    found: list[str] = []
    positions: dict[int, int] = {}
    for queue in queues.values():
        runner, command = queue.runner, queue.command
        if command is not None and runner is not None:
            found.append(f"queue {queue.number} has a command and a runner")
        if queue.is_spent:
            found.append(f"queue {queue.number} is spent and was not removed")
        if runner is not None and runners.get(runner.number) is not runner:
            found.append(f"queue {queue.number} has an unregistered runner")
        sent = runner.sent if runner is not None else ()
        for lease in (*queue.waiting, *sent, *([command] if command else [])):
            positions[id(lease)] = positions.get(id(lease), 0) + 1
            if lease.state is not LeaseState.DROPPED and held.get(lease.task) is not lease:
                found.append(f"{lease} is in queue {queue.number} and is not held: {lease.story()}")
    for lease in held.values():
        if positions.get(id(lease), 0) != 1:
            found.append(f"{lease} is in {positions.get(id(lease), 0)} queues: {lease.story()}")
    for runner in runners.values():
        if runner.queue.runner is not runner:
            found.append(f"runner {runner.number} serves no queue")
    return found
