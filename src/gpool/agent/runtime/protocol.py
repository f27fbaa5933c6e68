"""The interface between the agent and its sandbox runtimes.

Guarantees of every runtime, whatever the task does:
- no process of a sandbox survives `kill`, or the agent's own death (kill -9 included), by more than two seconds;
- the task sees no variable, descriptor, file, process or network of the agent (tier `none` excepted);
- the agent never blocks on a sandbox, never follows its links and never unpickles its bytes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from gpool.core.model import EndReason, Fault, Gpu, Network, OutputFile, Slice, Tier

LEAST_TMPFS_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    cpu_milli: int
    memory_bytes: int
    processes: int = 512
    disk_bytes: int = 10 * 1024**3
    open_files: int = 65_536
    io_bytes_per_s: int | None = None  # disk reads, and disk writes; None: unlimited

    @property
    def tmpfs_bytes(self) -> int:
        """Size of `/tmp`, and of `/dev/shm`: half of the memory, in which their files count."""
        return max(LEAST_TMPFS_BYTES, self.memory_bytes // 2)

    @property
    def file_bytes(self) -> int:
        """Size of the largest single file. One limit serves all file systems: files in `/dev/shm` (an object store, a shared
        tensor) may be larger than the disk.
        """
        return max(self.disk_bytes, self.tmpfs_bytes)


@dataclass(frozen=True, slots=True)
class StagedInput:
    path: str
    source: Path
    executable: bool


TASK_VARIABLES = (("LANG", "C.UTF-8"), ("PYTHONUNBUFFERED", "1"))
"""Variables of every sandbox, which a task may override. Unbuffered: the lines printed before a kill are in the log."""


def thread_variables(limits: SandboxLimits, slices: Sequence[Slice]) -> tuple[tuple[str, str], ...]:
    """Number of threads of each process, which a task may override: its CPUs, divided by its GPUs if it has several.

    Numerical libraries would start a thread for each CPU of the machine, and all would share the task's CPU quota. A task
    with several GPUs usually has a process for each.
    """
    threads = limits.cpu_milli // 1000 // max(1, len(slices))
    return (("OMP_NUM_THREADS", str(max(1, threads))),)


WORK_AT = "/work"
"""Work directory of a command, as the sandbox sees it."""

PROGRESS_FILE, PROGRESS_VARIABLE = ".gpool-progress", "GPOOL_PROGRESS_FILE"
"""File of the work directory in which a command reports its progress, and the variable with its path."""
PROGRESS_AT = ((PROGRESS_VARIABLE, f"{WORK_AT}/{PROGRESS_FILE}"),)

ENVIRONMENT_AT = "/opt/gpool/env"
"""Mount point of an environment inside a sandbox. Environments are built at this path: their scripts name it."""


@dataclass(frozen=True, slots=True)
class PreparedEnvironment:
    """Mounted read-only at `ENVIRONMENT_AT`."""

    name: str  # as in `TaskSpec.environment`
    root: Path  # a virtual environment, owned by no uid that a task can have
    python: str  # the interpreter, inside: f"{ENVIRONMENT_AT}/bin/python"
    binds: Mapping[str, Path] = field(default_factory=dict)
    """Further read-only mounts, inside path -> host path (an interpreter of another minor version)."""


@dataclass(frozen=True, slots=True)
class SandboxNetwork:
    """A network namespace for one sandbox, entered before the sandbox makes its own; open until the sandbox is gone.

    `namespaces`: descriptors for `setns`, in this order (a rootless network lies in its own user namespace).
    """

    namespaces: tuple[int, ...]
    resolver: str  # address of the only reachable name server, for /etc/resolv.conf
    hosts: str = ""  # lines for /etc/hosts, after loopback
    devices: tuple[str, ...] = ()  # nodes of RDMA devices


class GpuShare:
    """A runtime that identifies its sandboxes' processes calls `watch`; sharing may then end the sandbox, with the reason in
    `exceeded`.
    """

    __slots__ = ("binds", "exceeded", "kill", "memory_bytes", "nodes", "owns", "variables")

    def __init__(
        self,
        nodes: tuple[str, ...] = (),
        variables: tuple[tuple[str, str], ...] = (),
        binds: tuple[tuple[str, Path], ...] = (),
    ) -> None:
        self.nodes = nodes  # device nodes
        self.variables = variables  # override the task's own
        self.binds = binds  # (inside, on the host), writable
        self.owns: Callable[[int], bool] | None = None
        self.kill: Callable[[], Awaitable[None]] | None = None
        self.exceeded = ""
        self.memory_bytes = 0  # limit of the sandbox's own memory; 0: not known

    def add(self, nodes: Sequence[str], variables: Sequence[tuple[str, str]]) -> None:
        """Add another vendor's GPUs; variables that are set stay."""
        self.nodes = tuple(dict.fromkeys((*self.nodes, *nodes)))
        self.variables = tuple(dict([*variables, *self.variables]).items())

    def watch(
        self,
        owns: Callable[[int], bool],
        kill: Callable[[], Awaitable[None]],
        memory_bytes: int = 0,
    ) -> None:
        """Register a started sandbox: `owns` tests a host pid, `kill` ends it, `memory_bytes` is its limit."""
        self.owns, self.kill, self.memory_bytes = owns, kill, memory_bytes


StartProgress = Callable[[str], None]
"""Receives one line of text per step of a slow start (an image pull)."""


def ignore_progress(_line: str) -> None:
    return


@dataclass(frozen=True, slots=True)
class CommandJob:
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = field(repr=False)  # contains secrets
    inputs: tuple[StagedInput, ...]
    slices: tuple[Slice, ...]
    limits: SandboxLimits
    environment: PreparedEnvironment | None = None  # None: the agent's own Python and packages
    network: SandboxNetwork | None = None  # None: no network
    image: str = ""  # for a runtime with `RuntimeAbility.IMAGES`
    progress: StartProgress = field(default=ignore_progress, repr=False, compare=False)
    gpu_share: GpuShare | None = None  # None: the slices' GPUs as they are


@dataclass(frozen=True, slots=True)
class RunnerJob:
    python: str  # "3.11"
    env: tuple[tuple[str, str], ...] = field(repr=False)  # contains secrets
    slices: tuple[Slice, ...]
    limits: SandboxLimits
    environment: PreparedEnvironment | None = None
    network: SandboxNetwork | None = None
    image: str = ""
    preload: tuple[str, ...] = ()
    """Modules imported before the first call; a failing import is skipped."""
    progress: StartProgress = field(default=ignore_progress, repr=False, compare=False)
    gpu_share: GpuShare | None = None


@dataclass(frozen=True, slots=True)
class SandboxExit:
    """`exit_code` is 128+n for a signal n."""

    exit_code: int
    reason: EndReason = EndReason.EXITED  # or OUT_OF_MEMORY, BAD_OUTPUT, SANDBOX_FAILED
    detail: str = ""
    retired: bool = False  # a runner that announced its end between two calls
    fault: Fault | None = None  # set: no process of the task ever ran


class CommandSandbox(Protocol):
    """`output` ends when the last writer is gone; `ended` after that."""

    def output(self) -> AsyncIterator[tuple[int, bytes]]:
        """Yield (stream 1 or 2, bytes); the command blocks while its output is not read."""
        ...

    async def ended(self) -> SandboxExit: ...

    async def kill(self) -> None:
        """Kill every process and return when all are gone. Idempotent."""
        ...

    async def warn(self) -> None:
        """Send SIGTERM to the command, which may save and exit. No effect after its end."""
        ...

    async def collect(self, wanted: Sequence[str], into: Path) -> list[OutputFile]:
        """Copy the wanted outputs to `into/<sha256>`; also while the command runs (a checkpoint). Follows no link.

        Raises `BadOutput`: missing, no plain file, badly named or over the disk limit.
        """
        ...

    async def read_end(self, name: str, most_bytes: int) -> bytes:
        """Last bytes of a plain file of the work directory, while the command runs; empty if there is none. Follows no link."""
        ...

    async def remove(self) -> None:
        """Kill and remove the work directory. Idempotent."""
        ...


class BuildSandbox(CommandSandbox, Protocol):
    async def take(self, directory: str, to: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """Exactly one of `arguments` and `arguments_file` is used."""

    number: int  # chosen by the caller, returned with the answer
    function: str  # SHA-256 of a function that was `define`d
    arguments: bytes = b""
    arguments_file: Path | None = None
    trace: str = ""  # W3C `traceparent`, which the call finds in its environment


@dataclass(frozen=True, slots=True)
class CallAnswer:
    """`value` is encoded data or a pickle; the agent loads neither."""

    number: int
    raised: bool
    value: bytes
    error_text: str
    duration_us: int
    output: tuple[tuple[int, bytes], ...]
    """(stream, bytes) printed since the last `CallOutput`."""
    value_file: Path | None = None  # instead of a large `value`; the receiver moves or removes it
    ended: SandboxExit | None = None  # the call's process ended before it returned: no value


@dataclass(frozen=True, slots=True)
class CallOutput:
    number: int
    stream: int
    data: bytes


@dataclass(frozen=True, slots=True)
class CallProgress:
    number: int
    millionths: int
    text: str


CallEvent = CallAnswer | CallOutput | CallProgress


class RunnerSandbox(Protocol):
    """Calls run one at a time, in the order sent."""

    async def define(self, function: str, pickled: bytes) -> None: ...

    async def send(self, calls: Sequence[FunctionCall]) -> None: ...

    def events(self) -> AsyncIterator[Sequence[CallEvent]]: ...

    async def ended(self) -> SandboxExit: ...

    async def kill(self) -> None: ...

    async def remove(self) -> None: ...


class WarmRunner(RunnerSandbox, Protocol):
    forks: bool
    """Each function runs in a forked child; false if an imported module opened a GPU."""

    async def assign(self, variables: Sequence[tuple[str, str]]) -> None:
        """Assign the runner to one user, once. Raises `SandboxFailed` when it is gone or already assigned."""
        ...

    def memory_used(self) -> int:
        """Bytes of all its processes; 0 if unknown."""
        ...


class BadOutput(Exception):
    """The text goes to the consumer."""


class SandboxFailed(Exception):
    """`reason` blames the task where it is at fault, `fault` the node."""

    reason = EndReason.SANDBOX_FAILED
    fault = Fault.UNCLEAR


class PartFailed(SandboxFailed):
    """A part of this node is broken or no longer lent, and the offer says so."""

    fault = Fault.PART


class RuntimeAbility(StrEnum):
    IMAGES = "images"  # runs container images; a runtime without it runs environments
    GPUS = "gpus"  # gives the sandbox the GPUs of its lease
    WARM_RUNNERS = "warm runners"  # `warm_runner` may be called
    EGRESS_ONLY = "egress only"  # its network leads outwards: nobody reaches a sandbox, so no gang
    CANCELLABLE_START = (
        "cancellable start"  # a slow start; on cancellation it ends soon and undoes itself
    )


class Runtime(Protocol):
    name: str
    tier: Tier
    abilities: frozenset[RuntimeAbility]

    @property
    def networks(self) -> frozenset[Network]: ...

    @property
    def containers(self) -> tuple[str, ...]:
        """Container ids: their processes descend from an engine. Thread-safe."""
        ...

    def use_gpus(self, gpus: Sequence[Gpu]) -> None:
        """Replace this machine's GPUs; running sandboxes keep theirs."""
        ...

    async def start_command(self, job: CommandJob) -> CommandSandbox: ...

    async def start_runner(self, job: RunnerJob) -> RunnerSandbox: ...

    async def warm_runner(self, job: RunnerJob, meanwhile: SandboxLimits) -> WarmRunner:
        """Start a runner without the job's variables, under the limits `meanwhile`; `assign` completes it. Raises `SandboxFailed`
        without `RuntimeAbility.WARM_RUNNERS`.
        """
        ...

    async def self_check(self) -> str | None:
        """Reason why no sandbox can be started, or empty; None: only a start would tell."""
        ...

    def build_runtime(self) -> BuildRuntime | None: ...

    async def sweep(self) -> None:
        """Remove remains of a killed agent. Called once, before the first task."""
        ...

    async def close(self) -> None: ...


class BuildRuntime(Runtime, Protocol):
    @property
    def tells_apart(self) -> bool: ...

    def shared_uid(self, number: int) -> int | None:
        """Uid for a service of several sandboxes; None if the runtime drops no uid."""
        ...

    async def start_command(self, job: CommandJob) -> BuildSandbox: ...


class PlainRuntime:
    @property
    def containers(self) -> tuple[str, ...]:
        return ()

    async def warm_runner(self, job: RunnerJob, meanwhile: SandboxLimits) -> WarmRunner:
        del job, meanwhile
        raise SandboxFailed("this runtime prepares no runners in advance")

    async def self_check(self) -> str | None:
        return None

    def build_runtime(self) -> BuildRuntime | None:
        return None
