"""The disk watchdog beside others who remove what is theirs: that is no credit for a task."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpool.agent.runtime.disk import LOOK_EVERY_S, DiskWatch, Watched
from gpool.testing.runtimes import within

MIB = 1 << 20


def fill(path: Path, size_bytes: int) -> None:
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)


@pytest.fixture
def disk() -> Iterator[Path]:
    """One in memory: what else is written on this machine's own would be taken for the task's."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def test_what_others_remove_never_hides_what_a_task_writes(disk: Path) -> None:
    """By the next look where it was removed before; else within the minute."""
    (disk / "work").mkdir()
    fill(disk / "anothers", 64 * MIB)

    async def story() -> bool:
        watch, watched = DiskWatch(disk), Watched(disk / "work", 8 * MIB)
        ended = asyncio.Event()

        async def kill() -> None:
            ended.set()

        watch.begin(watched, kill)
        (disk / "anothers").unlink()
        await asyncio.wait([asyncio.create_task(ended.wait())], timeout=3 * LOOK_EVERY_S)
        assert not ended.is_set()
        fill(disk / "work" / "tasks", 32 * MIB)
        try:
            await ended.wait()
        finally:
            await watch.close()
        return watched.exceeded

    assert within(story())
