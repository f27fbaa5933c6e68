"""Slots of a runtime: a uid, a control group and a work directory, used by successive sandboxes. Starts no process."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpool.agent.runtime import cgroups
from gpool.agent.runtime.protocol import SandboxFailed
from gpool.agent.runtime.work_directory import WorkDirectory, clear

RUN = Path("/run/gpool")  # of a root agent; writable by root only
FIRST_UID = 2_000_000_000  # past every range that distributions, subuids and containers use
UIDS_A_BLOCK = 4096
SHARED_UIDS = 256
BLOCKS = 1024


class UidBlock:
    """Uids that no other agent on this host uses, held by a file lock."""

    def __init__(self) -> None:
        RUN.mkdir(mode=0o755, exist_ok=True)
        for block in range(BLOCKS):
            held = os.open(RUN / f"uids-{block}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(held)
                continue
            self._held = held
            self.first = FIRST_UID + block * UIDS_A_BLOCK
            return
        raise SandboxFailed(f"all {BLOCKS} blocks of sandbox uids are in use on this host")

    def close(self) -> None:
        """Idempotent."""
        if self._held >= 0:
            os.close(self._held)
            self._held = -1


class SlotGroups:
    """Named by a hash of the runtime's directory; none where the host allows none."""

    def __init__(self, prefix: str, directory: Path, *, throttles_disk: bool) -> None:
        self.prefix = prefix + hashlib.sha256(bytes(directory)).hexdigest()[:12] + "-"
        self.hierarchy = cgroups.find(
            Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text()
        )
        self._disk = cgroups.disk_of(directory) if throttles_disk else ""

    def make(self, number: int) -> cgroups.ControlGroup | None:
        if not self.hierarchy.version:
            return None
        try:
            return cgroups.ControlGroup(self.hierarchy, f"{self.prefix}{number}", self._disk)
        except OSError as refused:
            raise SandboxFailed(f"cannot make a control group: {refused}") from refused

    def sweep(self) -> None:
        cgroups.sweep(self.hierarchy, self.prefix)


@dataclass(frozen=True, slots=True)
class SandboxSlot:
    number: int
    uid: int  # on the host
    inside_uid: int  # in a container with its own user namespace; else the same
    group: cgroups.ControlGroup | None


def own_uids(block: UidBlock | None) -> Callable[[int], tuple[int, int]]:
    if block is None:
        return lambda _number: (os.geteuid(), os.geteuid())
    return lambda number: (block.first + number, block.first + number)


class SlotPool:
    """Not thread-safe."""

    def __init__(
        self,
        directory: Path,
        values: Path,
        *,
        uid_of: Callable[[int], tuple[int, int]],
        groups: SlotGroups | None = None,
        most: int = UIDS_A_BLOCK,
        keeps_directories: bool = False,
        mode: int = 0o711,
    ) -> None:
        """`values` takes the large results of functions; `keeps_directories`: a slot reuses its root directory."""
        for path, allowed in ((directory, mode), (values, 0o700)):
            path.mkdir(mode=allowed, parents=True, exist_ok=True)
            path.chmod(allowed)
        self.directory = directory
        self.values = values
        self._uid_of = uid_of
        self._groups = groups
        self._most = most
        self._keeps = keeps_directories
        self._free: list[SandboxSlot] = []
        self._made_groups: list[cgroups.ControlGroup] = []
        self._slots = self._made = 0

    def take(self, *, with_values: bool) -> tuple[SandboxSlot, WorkDirectory]:
        """`SandboxFailed` beyond the limit."""
        slot = self._free.pop() if self._free else self._new()
        self._made += 1
        place = WorkDirectory(self._root_of(slot), slot.uid, stays=self._keeps)
        place.make(with_values=with_values)
        return slot, place

    def _new(self) -> SandboxSlot:
        number = self._slots
        if number >= self._most:
            raise SandboxFailed(f"more than {self._most} sandboxes of one runtime at once")
        uid, inside = self._uid_of(number)
        group = self._groups.make(number) if self._groups is not None else None
        if group is not None:
            self._made_groups.append(group)
        self._slots += 1
        return SandboxSlot(number, uid, inside, group)

    def _root_of(self, slot: SandboxSlot) -> Path:
        once = "" if self._keeps else f"-{self._made}"
        return self.directory / f"{slot.number}-{os.getpid()}{once}"

    def release(self, slot: SandboxSlot) -> None:
        self._free.append(slot)

    def discard(self, slot: SandboxSlot, place: WorkDirectory) -> None:
        place.remove()
        self._free.append(slot)

    def sweep(self) -> None:
        if self._groups is not None:
            self._groups.sweep()
        clear(self.directory, self.values)

    def close(self) -> None:
        """Remove the groups, also of slots in use: their sandboxes end with the runtime."""
        if self._keeps:
            for slot in self._free:
                WorkDirectory(self._root_of(slot), slot.uid).remove()
        for group in self._made_groups:
            group.remove()
        self._made_groups.clear()
        self._free.clear()
