"""The disk watchdog beside others who remove what is theirs: that is no credit for a task."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpool.agent.runtime import disk_watchdog as disk_watch
from gpool.agent.runtime.disk_watchdog import (
    COUNT_AT_LAST_S,
    POLL_EVERY_S,
    DiskWatchdog,
    WatchedDirectory,
)
from tests.tools.runtimes import within

MIB = 1 << 20


def fill(path: Path, size_bytes: int) -> None:
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)


@pytest.fixture
def disk() -> Iterator[Path]:
    """One in memory: what else is written on this machine's own would be taken for the task's."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


async def seconds_until_noticed(disk: Path) -> float:
    """How long a task that is past its limit goes on, where somebody else made room before."""
    (disk / "work").mkdir()
    fill(disk / "anothers", 24 * MIB)
    watch, watched = DiskWatchdog(disk), WatchedDirectory(disk / "work", 8 * MIB)
    ended, loop = asyncio.Event(), asyncio.get_running_loop()

    async def kill() -> None:
        ended.set()

    watch.begin(watched, kill)
    (disk / "anothers").unlink()
    await asyncio.wait([asyncio.create_task(ended.wait())], timeout=3 * POLL_EVERY_S)
    assert not ended.is_set()
    fill(disk / "work" / "tasks", 12 * MIB)
    began = loop.time()
    try:
        await ended.wait()
    finally:
        await watch.close()
    assert watched.exceeded
    return loop.time() - began


def test_what_others_remove_never_hides_what_a_task_writes(disk: Path) -> None:
    """By the next look where it was removed before: not only after the minute in which all are counted once."""
    for number in range(3):  # each may meet a moment when nothing gets on
        (disk / str(number)).mkdir()
        if within(seconds_until_noticed(disk / str(number))) < COUNT_AT_LAST_S / 2:
            return
    pytest.fail("it was noticed only when all are counted")


def test_everything_is_counted_once_a_minute_however_well_it_is_hidden(disk: Path) -> None:
    """Who removes as much as the task writes, just then, leaves no other sign of it."""
    watched = WatchedDirectory(disk, 8 * MIB)
    watched.counted_at = watched.count_at = 100.0
    assert not disk_watch._should_count(watched, 0, 100.0 + COUNT_AT_LAST_S - 1)
    assert disk_watch._should_count(watched, 0, 100.0 + COUNT_AT_LAST_S)
