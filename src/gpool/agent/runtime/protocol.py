"""The door to sandboxes. The daemon starts them through it and never looks behind it.

A runtime promises, whatever the task does:
- nothing of a sandbox survives `kill` or the agent's own death (kill -9 included) by more than two seconds;
- the task sees no variable, descriptor, file or process of the agent's, and no network;
- the agent never blocks on it, never follows its links and never unpickles its bytes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from gpool.core.model import EndReason, Fault, Network, OutputFile, Slice, Tier


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What one sandbox may take."""

    cpu_milli: int
    memory_bytes: int
    processes: int = 512
    disk_bytes: int = 10 * 1024**3
    open_files: int = 1024
    io_bytes_per_s: int | None = None  # of the disk, each way; None: no cap


@dataclass(frozen=True, slots=True)
class StagedInput:
    """A file from the artifact cache to be laid into the work directory before the start."""

    path: str
    source: Path
    executable: bool


ENVIRONMENT_AT = "/opt/gpool/env"
"""Where an environment lies inside; it was built at this path, so its scripts' first lines are right."""


@dataclass(frozen=True, slots=True)
class PreparedEnvironment:
    """An environment that lies ready on this node, to be mounted read-only at `ENVIRONMENT_AT`."""

    name: str  # as in `TaskSpec.environment`
    root: Path  # a virtual environment; owned by nobody a task can be
    python: str  # the interpreter, inside: f"{ENVIRONMENT_AT}/bin/python"
    binds: Mapping[str, Path] = field(default_factory=dict)
    """What else must be seen for it, inside path -> host path, read-only (an interpreter of another minor)."""


@dataclass(frozen=True, slots=True)
class SandboxNetwork:
    """A network namespace made for one sandbox, to be entered before its own namespaces are made.

    Whoever opened the lane closes it after the sandbox is gone. `namespaces` are descriptors for `setns`, in this
    order (an unprivileged agent's lane lies in a user namespace of its own); they stay the opener's.
    """

    namespaces: tuple[int, ...]
    resolver: str  # the address of the only name server it can reach; goes into /etc/resolv.conf
    hosts: str = ""  # lines for /etc/hosts, beside loopback
    gang: bool = False  # leads to the other members of a gang: its sandbox may ask which interfaces there are


class GpuShare:
    """What one sandbox gets of real GPUs, got ready by `gpool.agent.sharing`; for this sandbox alone.

    A runtime that can tell which processes are its sandbox's says so by `watch`; whoever shares out the GPU may then
    end it, and leaves the reason in `exceeded`.
    """

    __slots__ = ("binds", "exceeded", "kill", "nodes", "owns", "variables")

    def __init__(
        self,
        nodes: tuple[str, ...] = (),
        variables: tuple[tuple[str, str], ...] = (),
        binds: tuple[tuple[str, Path], ...] = (),
    ) -> None:
        self.nodes = nodes  # devices
        self.variables = variables  # they win over the task's own
        self.binds = binds  # (inside, on the host), writable
        self.owns: Callable[[int], bool] | None = None
        self.kill: Callable[[], Awaitable[None]] | None = None
        self.exceeded = ""

    def watch(self, owns: Callable[[int], bool], kill: Callable[[], Awaitable[None]]) -> None:
        """It has started: whether a process of the host is one of its, and how to end it."""
        self.owns, self.kill = owns, kill


StartProgress = Callable[[str], None]
"""Hears what a start is busy with when it takes its time, a line at a time."""


def ignore_progress(_line: str) -> None:
    return


@dataclass(frozen=True, slots=True)
class CommandJob:
    """One command in a fresh sandbox."""

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = field(repr=False)  # secrets are among them
    inputs: tuple[StagedInput, ...]
    slices: tuple[Slice, ...]
    limits: SandboxLimits
    environment: PreparedEnvironment | None = None  # None: the agent's own Python with its packages
    network: SandboxNetwork | None = None  # None: no network
    image: str = ""  # for a runtime whose `images` is true
    progress: StartProgress = field(default=ignore_progress, repr=False, compare=False)
    gpu_share: GpuShare | None = None  # None: the slices' GPUs as they are


@dataclass(frozen=True, slots=True)
class RunnerJob:
    """A sandbox with our runner in it, for functions of one user and environment."""

    python: str  # "3.11"
    env: tuple[tuple[str, str], ...] = field(repr=False)  # secrets are among them
    slices: tuple[Slice, ...]
    limits: SandboxLimits
    environment: PreparedEnvironment | None = None
    network: SandboxNetwork | None = None
    image: str = ""
    preload: tuple[
        str, ...
    ] = ()  # modules imported before the first call; a failing one is skipped
    progress: StartProgress = field(default=ignore_progress, repr=False, compare=False)
    gpu_share: GpuShare | None = None


@dataclass(frozen=True, slots=True)
class SandboxExit:
    """How a sandbox ended. `exit_code` is 128+n for a signal n."""

    exit_code: int
    reason: EndReason = EndReason.EXITED  # or OUT_OF_MEMORY, SANDBOX_FAILED
    detail: str = ""
    retired: bool = False  # a runner that ended between two calls, as it had said it would
    fault: Fault | None = None  # set: nothing of the task ever ran in it


class CommandSandbox(Protocol):
    """A running command. `output` ends when the last writer is gone; `ended` after that."""

    def output(self) -> AsyncIterator[tuple[int, bytes]]:
        """(stream 1 or 2, bytes) as they come; back-pressure when not read."""
        ...

    async def ended(self) -> SandboxExit: ...

    async def kill(self) -> None:
        """Everything in it dies now; returns when it has. Idempotent."""
        ...

    async def warn(self) -> None:
        """SIGTERM to the command; it may go on, save and end by itself. Nothing happens when it has ended."""
        ...

    async def collect(self, wanted: Sequence[str], into: Path) -> list[OutputFile]:
        """Copies the wanted outputs to `into/<sha256>`, without following links; a checkpoint also while it runs.

        Raises `BadOutput` for what is missing, special, badly named or over the disk limit.
        """
        ...

    async def remove(self) -> None:
        """Work directory and everything else of it is gone afterwards. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """One function call for a runner. Exactly one of `arguments` and `arguments_file` is used."""

    number: int  # chosen by the caller, comes back with the answer
    function: str  # SHA-256 of a function that was `define`d
    arguments: bytes = b""
    arguments_file: Path | None = None


@dataclass(frozen=True, slots=True)
class CallAnswer:
    """What became of a call. `value` is pickled and never loaded here."""

    number: int
    raised: bool
    value: bytes
    error_text: str
    duration_us: int
    output: tuple[
        tuple[int, bytes], ...
    ]  # what it printed since the last `CallOutput`, (stream, bytes)
    value_file: Path | None = None  # instead of `value` when it is large: yours to move or remove
    ended: SandboxExit | None = None  # its process ended before it returned: there is no value


@dataclass(frozen=True, slots=True)
class CallOutput:
    """Live output of the call that runs now."""

    number: int
    stream: int
    data: bytes


class RunnerSandbox(Protocol):
    """A live runner: calls run one at a time, in the order sent."""

    async def define(self, function: str, pickled: bytes) -> None: ...

    async def send(self, calls: Sequence[FunctionCall]) -> None:
        """Queue calls; returns once they are written."""
        ...

    def events(self) -> AsyncIterator[Sequence[CallAnswer | CallOutput]]:
        """Batches as they come; ends when the sandbox is gone."""
        ...

    async def ended(self) -> SandboxExit: ...

    async def kill(self) -> None: ...

    async def remove(self) -> None: ...


class WarmRunner(RunnerSandbox, Protocol):
    """A runner that has imported its modules and is nobody's yet."""

    forks: bool
    """It keeps the modules apart from what calls do; false when one of them took hold of a GPU."""

    async def assign(self, variables: Sequence[tuple[str, str]]) -> None:
        """To one user's work, once: its limits hold from now on, its variables are there at the first call.

        Raises `SandboxFailed` when it is gone, or was assigned before.
        """
        ...

    def memory_used(self) -> int:
        """Bytes that all of it holds now; 0 where nobody counts."""
        ...


class BadOutput(Exception):
    """An output that cannot be collected; the text goes to the consumer."""


class SandboxFailed(Exception):
    """The sandbox could not be started; `reason` says where that is the task's own fault, `fault` what is known of the node."""

    reason = EndReason.SANDBOX_FAILED
    fault = Fault.UNCLEAR


class PartFailed(SandboxFailed):
    """A part of this node is out of order, or is not lent any more; the offer says so. The rest of the node is well."""

    fault = Fault.PART


@runtime_checkable
class SelfChecking(Protocol):
    """A runtime that knows better than by starting the simplest thing whether it can start anything."""

    async def wrong(self) -> str:
        """Why it cannot; empty: it can, as far as it knows."""
        ...


@runtime_checkable
class Warming(Protocol):
    """A runtime that can prepare a runner before it is known whose it will be."""

    async def warm_runner(self, job: RunnerJob, meanwhile: SandboxLimits) -> WarmRunner:
        """Everything as the job says but for its variables, which come with `assign`; until then under these limits."""
        ...


class Runtime(Protocol):
    """`name` is the word of the glossary; what it can give is said by the rest."""

    name: str
    tier: Tier
    images: bool  # it runs `image`s; otherwise `environment`s
    gives_up: bool  # a start may take long; cancelled, it ends soon and undoes itself

    @property
    def networks(self) -> frozenset[Network]: ...

    async def start_command(self, job: CommandJob) -> CommandSandbox: ...

    async def start_runner(self, job: RunnerJob) -> RunnerSandbox: ...

    async def sweep(self) -> None:
        """Remove what an earlier agent, killed without warning, left behind. Called once, before the first task."""
        ...

    async def close(self) -> None:
        """End every sandbox; nothing of the runtime is left, and it is of no use afterwards."""
        ...
