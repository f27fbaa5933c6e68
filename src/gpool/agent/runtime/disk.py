"""The disk watchdog: ends a sandbox whose work directory outgrows its limit. It looks once a second, and only when
the disk has visibly filled since the sandbox started; a file system quota would be exact, and is not always there.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

LOOK_EVERY_S = 1.0
WORTH_A_LOOK_BYTES = 32 << 20
LEAST_BYTES_AN_ENTRY = 4096  # so that a million empty files count too
MOST_DEPTH = 200
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Watched:
    """One sandbox's directory and what it may hold."""

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self.root = root
        self.limit_bytes = limit_bytes
        self.exceeded = False
        self.free_before = 0
        self.free_inodes_before = 0
        self.kill: Callable[[], Awaitable[None]] | None = None


class DiskWatch:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._watched: set[Watched] = set()
        self._task: asyncio.Task[None] | None = None

    def begin(self, watched: Watched, kill: Callable[[], Awaitable[None]]) -> None:
        facts = os.statvfs(self._folder)
        watched.free_before = facts.f_bavail * facts.f_frsize
        watched.free_inodes_before = facts.f_favail
        watched.kill = kill
        self._watched.add(watched)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._look())

    def end(self, watched: Watched) -> None:
        self._watched.discard(watched)

    async def close(self) -> None:
        self._watched.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _look(self) -> None:
        """Runs as long as there is something to watch, and the second after."""
        while self._watched:
            await asyncio.sleep(LOOK_EVERY_S)
            facts = os.statvfs(self._folder)
            free = facts.f_bavail * facts.f_frsize
            for watched in list(self._watched):
                worth = min(WORTH_A_LOOK_BYTES, watched.limit_bytes // 2)
                inodes = (watched.free_inodes_before - facts.f_favail) * LEAST_BYTES_AN_ENTRY
                if max(watched.free_before - free, inodes) < worth:
                    continue
                used = await asyncio.to_thread(used_bytes, watched.root, watched.limit_bytes)
                if used > watched.limit_bytes and watched.kill is not None:
                    watched.exceeded = True
                    await watched.kill()


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
                    below = os.open(name, _DIRECTORY, dir_fd=stack[-1])
                    stack.append(below)
                    names.append(os.listdir(below))
            except OSError:
                continue  # it went away while we looked, or only its owner may look
    finally:
        for descriptor in stack:
            os.close(descriptor)
    return total
