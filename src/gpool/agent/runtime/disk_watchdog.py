"""The disk watchdog: kills a sandbox whose work directory exceeds its limit. The limit is not exact.

Ten times a second it reads the file system's free space. A sandbox's directory is counted only when the disk has filled
by half of its remaining bytes, and once a minute, because deletions by others hide its writes; counting takes at most a
tenth of the time. So a task can exceed its limit by the bytes it writes in 0.1 s and during the count; a single file
ends exactly at the limit (RLIMIT_FSIZE), unless half of the memory is more than that. Every entry counts at least one block: a million empty files are 4 GB. `/tmp`
and `/dev/shm` are tmpfs of a fixed size, counted as memory: exact. Unlinked files count while a process holds them open,
except those held by a message in a socket, or mapped while the agent is not root.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from gpool.agent.runtime.work_directory import directory_at

POLL_EVERY_S = 0.1
WORTH_A_COUNT_BYTES = 32 << 20
COUNT_AGAIN_S = 1.0  # deletions by others hide the writes of this sandbox
COUNT_AT_LAST_S = 60.0  # even if the disk has not filled
PAUSE_FACTOR = 10  # pause after a count, in multiples of its duration
LEAST_BYTES_AN_ENTRY = 4096
MOST_DEPTH = 200
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class WatchedDirectory:
    def __init__(self, root: Path, limit_bytes: int) -> None:
        self.root = root
        self.limit_bytes = limit_bytes
        self.exceeded = False
        self.free_before = 0
        self.free_inodes_before = 0
        self.used_bytes = 0  # at the last count
        self.pause_until = 0.0
        self.count_at = 0.0
        self.counted_at = 0.0
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
        watched.counted_at = loop.time()
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._watch())

    def end(self, watched: WatchedDirectory) -> None:
        self._watched.discard(watched)

    async def close(self) -> None:
        self._watched.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while self._watched:
            await asyncio.sleep(POLL_EVERY_S)
            facts = os.statvfs(self._folder)
            free = facts.f_bavail * facts.f_frsize
            for watched in list(self._watched):
                began = loop.time()
                # relative to the most free space seen: earlier deletions by others are no credit for writes
                watched.free_before = max(watched.free_before, free)
                watched.free_inodes_before = max(watched.free_inodes_before, facts.f_favail)
                inodes = (watched.free_inodes_before - facts.f_favail) * LEAST_BYTES_AN_ENTRY
                grown = max(watched.free_before - free, inodes)
                if began < watched.pause_until or not _should_count(watched, grown, began):
                    continue
                used = await asyncio.to_thread(used_bytes, watched.root, watched.limit_bytes)
                if used > watched.limit_bytes and watched.kill is not None:
                    watched.exceeded = True
                    await watched.kill()
                watched.used_bytes = used
                watched.free_before, watched.free_inodes_before = free, facts.f_favail
                ended = loop.time()
                watched.pause_until = ended + PAUSE_FACTOR * (ended - began)
                watched.count_at = ended + COUNT_AGAIN_S
                watched.counted_at = ended


def _should_count(watched: WatchedDirectory, grown: int, now: float) -> bool:
    if grown >= max(1, watched.limit_bytes - watched.used_bytes) // 2:
        return True
    if now >= watched.counted_at + COUNT_AT_LAST_S:
        return True
    return now >= watched.count_at and grown >= min(WORTH_A_COUNT_BYTES, watched.limit_bytes // 2)


def used_bytes(root: Path, limit_bytes: int) -> int:
    """Count disk bytes, stopping past the limit; a tree over `MOST_DEPTH` deep exceeds it."""
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
                continue  # removed meanwhile, or readable by its owner only
    finally:
        for descriptor in stack:
            os.close(descriptor)
    return total + unlinked_bytes(root)


def unlinked_bytes(root: Path) -> int:
    """Count unlinked open files of the sandbox's processes, identified by the `/work` they see."""
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
