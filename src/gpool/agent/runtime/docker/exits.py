"""Ends of containers as exits of sandboxes, with the reason."""

from __future__ import annotations

from gpool.agent.runtime.bubblewrap.launcher_client import ProcessExit
from gpool.agent.runtime.disk_watchdog import WatchedDirectory
from gpool.agent.runtime.docker.containers import (
    RunningContainer,
)
from gpool.agent.runtime.protocol import (
    GpuShare,
    RunnerJob,
    SandboxExit,
)
from gpool.agent.runtime.running_command import (
    NOT_EXECUTABLE,
    NOT_FOUND,
    limit_exceeded,
)
from gpool.core.model import EndReason, Fault

ENGINE_WENT = "the container engine on that node went away, and the sandbox with it"
CATATONIT, NOT_STARTED = "ERROR (catatonit:", "failed to exec pid1"


def explain(program: str, head: bytes) -> bytes:
    """Name the missing program, which Podman's init does not."""
    text = head.decode("utf-8", "replace").strip()
    if text.startswith(CATATONIT) and NOT_STARTED in text:
        return f"gpool: {program}: {text.rpartition(': ')[2]}\n".encode()
    return b""


def lacks_python(text: str) -> bool:
    return "python3" in text and ("not found" in text or "no such file" in text.lower())


def no_python(job: RunnerJob) -> str:
    image = job.image or "the default image"
    return f"{image} has no python3: a function needs an image with Python {job.python}"


def judge(
    started: RunningContainer,
    watched: WatchedDirectory,
    share: GpuShare | None,
    exit: ProcessExit,
    head: bytes,
) -> SandboxExit:
    exceeded = limit_exceeded(watched, share)
    if exceeded is not None:
        return exceeded
    container = started.exit
    if exit.lost or container is None:
        return SandboxExit(exit.code, EndReason.SANDBOX_FAILED, ENGINE_WENT)
    if container.out_of_memory and exit.code != 0:
        return SandboxExit(exit.code, EndReason.OUT_OF_MEMORY, "it used more memory than asked for")
    if not exit.ran and not exit.killed:
        detail = container.detail or "it did not start"
        return SandboxExit(exit.code, EndReason.SANDBOX_FAILED, detail, fault=Fault.UNCLEAR)
    text = head.decode("utf-8", "replace")
    if exit.code == 1 and text.startswith(CATATONIT) and NOT_STARTED in text:
        return SandboxExit(NOT_FOUND if "No such file" in text else NOT_EXECUTABLE)
    return SandboxExit(exit.code)
