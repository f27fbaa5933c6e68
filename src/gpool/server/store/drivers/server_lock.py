"""Lock against a second server on one store; opening a store does not take it.

A second server would give every node a deadline, hear no heartbeat and expire leases that the first one renews.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import platform
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from gpool.core.errors import Conflict

PATIENCE_S = 3.0
"""How long a starting server waits for the lock: a predecessor that was killed may take a moment to be gone."""

_POLL_S = 0.05


class ServerLock(Protocol):
    async def lost(self) -> str:
        """Wait until the lock cannot be kept, and return the reason."""
        ...


class FileServerLock:
    """An flock, which the kernel keeps until the process ends."""

    async def lost(self) -> str:
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never


def this_process() -> str:
    return f"gpool server, process {os.getpid()} on {platform.node()}"


def held_by_another(holder: str, store: str, setting: str) -> Conflict:
    return Conflict(
        f"another server ({holder}) serves {store}; stop that server first, or give this one a store of its own "
        f"with {setting}"
    )


@asynccontextmanager
async def locked_file(database: Path) -> AsyncIterator[FileServerLock]:
    """Hold the lock in `DATABASE.lock` beside an SQLite database; `Conflict` if another server has it."""
    path, file = _lock_file(database)
    try:
        ends = asyncio.get_running_loop().time() + PATIENCE_S
        while not _locked(file):
            if asyncio.get_running_loop().time() > ends:
                holder = os.pread(file, 500, 0).decode(errors="replace").strip()
                raise held_by_another(holder or "unknown process", str(path), "--data DIRECTORY")
            await asyncio.sleep(_POLL_S)
        os.ftruncate(file, 0)
        os.pwrite(file, f"{this_process()}\n".encode(), 0)
        yield FileServerLock()
    finally:
        os.close(file)


def _lock_file(database: Path) -> tuple[Path, int]:
    path = database.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.lock")
    return path, os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
