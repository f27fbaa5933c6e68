"""The reason why a sandbox of this runtime ended, from its exit, its control group and the start of its error output."""

from __future__ import annotations

from collections.abc import Callable

from gpool.agent.runtime.bubblewrap.launcher_client import LAUNCHER_DIED, ProcessExit
from gpool.agent.runtime.disk_watchdog import WatchedDirectory
from gpool.agent.runtime.protocol import GpuShare, SandboxExit
from gpool.agent.runtime.running_command import NOT_EXECUTABLE, NOT_FOUND, limit_exceeded
from gpool.agent.runtime.slots import SandboxSlot
from gpool.core.model import EndReason, Fault


def judge_of(
    slot: SandboxSlot, watched: WatchedDirectory, share: GpuShare | None
) -> Callable[[ProcessExit, bytes], SandboxExit]:
    before = slot.group.memory_kills() if slot.group is not None else 0

    def judge(exit: ProcessExit, head: bytes) -> SandboxExit:
        nonlocal before
        counted, before = before, slot.group.memory_kills() if slot.group is not None else 0
        exceeded = limit_exceeded(watched, share)
        if exceeded is not None:
            return exceeded
        if exit.code != 0 and before > counted:
            return SandboxExit(
                exit.code, EndReason.OUT_OF_MEMORY, "it used more memory than asked for"
            )
        if exit.lost:
            return SandboxExit(exit.code, EndReason.SANDBOX_FAILED, LAUNCHER_DIED)
        text = head.decode("utf-8", "replace").strip()
        if exit.code == 1 and text.startswith("bwrap: execvp "):
            missing = "No such file" in text
            return SandboxExit(NOT_FOUND if missing else NOT_EXECUTABLE, detail=text)
        if not exit.ran and not exit.killed:
            # bwrap's own messages come before anything of the task has run
            fault = Fault.UNCLEAR if text.startswith("bwrap: ") else None
            detail = text or "bwrap did not start"
            return SandboxExit(exit.code, EndReason.SANDBOX_FAILED, detail, fault=fault)
        return SandboxExit(137 if exit.killed and not exit.ran else exit.code)

    return judge
