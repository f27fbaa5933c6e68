"""The disk watchdog: ends a sandbox whose work directory outgrows its limit. Not exact: see below what gets past it.

Ten times a second it asks the file system how much is free, which costs nothing; only when the disk has filled by half
of what a sandbox has left is that sandbox's directory counted (and once a minute, for what others remove meanwhile hides
what it writes), and never for more than a tenth of the time. So a task
gets past its limit by what it can write in a tenth of a second and while it is counted; a single file ends at the limit
exactly (RLIMIT_FSIZE). Every entry counts as one block, so a million empty files are over 4 GB. `/tmp` and `/dev/shm` are
memory file systems of a fixed size, counted with the task's memory: their limit is exact. Files without a name count
while a process holds them open; those held only by a message in a socket, or mapped where the agent is not root, don't.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from gpool.agent.runtime.work_directory import directory_at

LOOK_EVERY_S = 0.1
WORTH_A_LOOK_BYTES = 32 << 20
LOOK_ANYWAY_S = 1.0  # what others remove meanwhile hides what one writes
LOOK_AT_LAST_S = 60.0  # however well it was hidden
REST_A_LOOK = 10  # times as long as it took
LEAST_BYTES_AN_ENTRY = 4096  # so that a million empty files count too
MOST_DEPTH = 200
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class WatchedDirectory:
    """One sandbox's directory and what it may hold."""

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self.root = root
        self.limit_bytes = limit_bytes
        self.exceeded = False
        self.free_before = 0
        self.free_inodes_before = 0
        self.used_bytes = 0  # when it was last counted
        self.rest_until = 0.0
        self.look_at = 0.0
        self.looked_at = 0.0
        self.kill: Callable[[], Awaitable[None]] | None = None


class DiskWatchdog:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._watched: set[WatchedDirectory] = set()
        self._task: asyncio.Task[None] | None = None

    def begin(self, watched: WatchedDirectory, kill: Callable[[], Awaitable[None]]) -> None:
        facts = os.statvfs(self._folder)
        watched.free_before = facts.f_bavail * facts.f_frsize
        watched.free_inodes_before = facts.f_favail
        watched.kill = kill
        self._watched.add(watched)
        loop = asyncio.get_running_loop()
        watched.looked_at = loop.time()
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._look())

    def end(self, watched: WatchedDirectory) -> None:
        self._watched.discard(watched)

    async def close(self) -> None:
        self._watched.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _look(self) -> None:
        """Runs as long as there is something to watch, and a moment after."""
        loop = asyncio.get_running_loop()
        while self._watched:
            await asyncio.sleep(LOOK_EVERY_S)
            facts = os.statvfs(self._folder)
            free = facts.f_bavail * facts.f_frsize
            for watched in list(self._watched):
                began = loop.time()
                # from when most was free: what others removed before is no credit for what is written now
                watched.free_before = max(watched.free_before, free)
                watched.free_inodes_before = max(watched.free_inodes_before, facts.f_favail)
                inodes = (watched.free_inodes_before - facts.f_favail) * LEAST_BYTES_AN_ENTRY
                grown = max(watched.free_before - free, inodes)
                if began < watched.rest_until or not _is_worth(watched, grown, began):
                    continue
                used = await asyncio.to_thread(used_bytes, watched.root, watched.limit_bytes)
                if used > watched.limit_bytes and watched.kill is not None:
                    watched.exceeded = True
                    await watched.kill()
                watched.used_bytes = used
                watched.free_before, watched.free_inodes_before = free, facts.f_favail
                ended = loop.time()
                watched.rest_until = ended + REST_A_LOOK * (ended - began)
                watched.look_at = ended + LOOK_ANYWAY_S
                watched.looked_at = ended


def _is_worth(watched: WatchedDirectory, grown: int, now: float) -> bool:
    """It cannot be past its limit before the disk has filled by what it had left."""
    if grown >= max(1, watched.limit_bytes - watched.used_bytes) // 2:
        return True
    if now >= watched.looked_at + LOOK_AT_LAST_S:
        return True
    return now >= watched.look_at and grown >= min(WORTH_A_LOOK_BYTES, watched.limit_bytes // 2)


def used_bytes(root: Path, limit_bytes: int) -> int:
    """What lies beneath, on the disk; stops counting past the limit. A tree deeper than any sane one is past it."""
    total = 0
    try:
        stack = [os.open(root, _DIRECTORY)]
    except FileNotFoundError:
        return 0
    names = [os.listdir(stack[0])]
    try:
        while stack and total <= limit_bytes:
            if not names[-1]:
                os.close(stack.pop())
                names.pop()
                continue
            name = names[-1].pop()
            try:
                facts = os.stat(name, dir_fd=stack[-1], follow_symlinks=False)
                total += max(facts.st_blocks * 512, LEAST_BYTES_AN_ENTRY)
                if stat.S_ISDIR(facts.st_mode):
                    if len(stack) > MOST_DEPTH:
                        return limit_bytes + 1
                    below = directory_at(stack[-1], name)
                    stack.append(below)
                    names.append(os.listdir(below))
            except OSError:
                continue  # it went away while we looked, or only its owner may look
    finally:
        for descriptor in stack:
            os.close(descriptor)
    return total + unlinked_bytes(root)


def unlinked_bytes(root: Path) -> int:
    """What the sandbox's processes hold open though it has no name any more; they are known by the `/work` they see."""
    found: dict[int, int] = {}
    with contextlib.suppress(OSError):
        work = os.stat(root / "work")
        for process in os.listdir("/proc"):
            if not process.isdecimal():
                continue
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(os.path.join(f"/proc/{process}/root", "work")), work):
                    found.update(_unlinked(process, work.st_dev))
    return sum(found.values())


def _unlinked(process: str, device: int) -> Iterator[tuple[int, int]]:
    for folder in (f"/proc/{process}/fd", f"/proc/{process}/map_files"):
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):
                    facts = os.stat(f"{folder}/{name}")
                    if facts.st_nlink == 0 and facts.st_dev == device:
                        yield facts.st_ino, facts.st_blocks * 512
