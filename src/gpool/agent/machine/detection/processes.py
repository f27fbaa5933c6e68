"""Foreign programs, the agent's own processes, killed ones that still exist. Reads /proc only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

PROC = Path("/proc")
YOUNG_S = 3.0
"""Age until which a process may still exec another program."""
DEEPEST = 64
KILL_BIT = 1 << 8  # SIGKILL in a signal mask of /proc


class ForeignPrograms:
    """A process is read again until it is `YOUNG_S` old."""

    def __init__(self, own: AgentProcesses, proc: Path = PROC) -> None:
        self._own = own
        self._proc = proc
        self._known: dict[int, tuple[str, float]] = {}  # pid: name ("" for ours), first seen at

    def names(self, now_s: float) -> frozenset[str]:
        try:
            pids = {int(name) for name in os.listdir(self._proc) if name.isdecimal()}
        except OSError:
            return frozenset()
        known: dict[int, tuple[str, float]] = {}
        for pid in pids:
            name, since = self._known.get(pid, ("", now_s))
            if now_s < since + YOUNG_S:
                name = "" if self._own.has(pid) else name_of(pid, self._proc)
            known[pid] = name, since
        self._known = known
        return frozenset(name for name, _ in known.values() if name)


def _no_groups() -> Iterable[str]:
    return ()


class AgentProcesses:
    """The agent's descendants and the processes in its containers' control groups.

    `groups` returns container ids, because a container's parent is its engine.
    """

    def __init__(
        self, own: int, proc: Path = PROC, groups: Callable[[], Iterable[str]] = _no_groups
    ) -> None:
        self._own = own
        self._proc = proc
        self._groups = groups

    def has(self, pid: int) -> bool:
        above = pid
        for _ in range(DEEPEST):
            if above == self._own:
                return True
            if above <= 1:
                break
            above = self._parent(above)
        with contextlib.suppress(OSError, UnicodeDecodeError):
            words = tuple(self._groups())
            if words:
                text = (self._proc / str(pid) / "cgroup").read_text()
                return any(word in text for word in words)
        return False

    def _parent(self, pid: int) -> int:
        with contextlib.suppress(OSError, ValueError, IndexError, UnicodeDecodeError):
            stat = (self._proc / str(pid) / "stat").read_text()
            return int(stat.rpartition(")")[2].split()[1])
        return 0


def name_of(pid: int, proc: Path = PROC) -> str:
    with contextlib.suppress(OSError):
        program = os.path.basename(os.readlink(proc / str(pid) / "exe"))
        if program:
            return program.removesuffix(" (deleted)")
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (proc / str(pid) / "comm").read_text().strip()
    return ""


def is_dying(pid: int, proc: Path = PROC) -> bool:
    with contextlib.suppress(OSError, ValueError, UnicodeDecodeError):
        for line in (proc / str(pid) / "status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("SigPnd", "ShdPnd") and int(value, 16) & KILL_BIT:
                return True
    return False


def has_card_open(pid: int, proc: Path = PROC) -> bool:
    """Whether the driver means this process: in another process namespace the id may be another's.

    True if its descriptors cannot be listed.
    """
    folder = proc / str(pid) / "fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return (proc / str(pid)).exists()
    for name in names:
        with contextlib.suppress(OSError):
            if os.readlink(folder / name).startswith("/dev/nvidia"):
                return True
    return False
