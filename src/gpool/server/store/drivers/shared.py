"""Parts that both drivers share: group commit, and the lock against a second server.

A durable commit waits for the disk, whatever it holds: 4 ms on an ordinary SSD, so a commit per operation would allow
250 operations a second. Each store has one writer; while it commits, further operations queue. It then runs up to
`MAX_GROUP` of them in one transaction, commits once, and only then answers: an answer means that the write is on disk.

    queue    a b c d e f g h            (c arrives while the writer commits a, b)
    commits  [a b]  [c d e]  [f g h]    8 operations, 3 waits of 4 ms = 12 ms instead of 32 ms

A refusal (`GpoolError`) raised before an operation's first write fails that operation only. After a write, or with any
other exception, the group is rolled back and each of its operations runs again in a transaction of its own, so only
the faulty one fails. Hence operations must be repeatable (`operation`).

A second server on an SQLite database would write past the first one's state; servers on PostgreSQL are replicas.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import platform
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gpool.core.errors import Conflict, GpoolError
from gpool.server.store.protocol import Operation, Statement

MAX_GROUP = 256
"""Operations in one commit; bounds how long the first of them waits for the last."""


FETCHED_ROWS = 200
"""Rows that a backup reads at once: a row may have a megabyte of inline data."""


class TableColumns(NamedTuple):
    name: str
    columns: tuple[str, ...]

    @property
    def listed(self) -> str:
        return ", ".join(f'"{column}"' for column in self.columns)


class RefusedLate(Exception):
    """Refusal raised after the operation's first write: its group is rolled back."""

    def __init__(self, refusal: GpoolError) -> None:
        super().__init__(refusal.detail)
        self.refusal = refusal


def writes(statement: Statement) -> bool:
    return not statement.sql.startswith("SELECT")


@dataclass(slots=True)
class Waiting:
    operation: Operation[Any]
    future: asyncio.Future[Any]
    value: Any = None
    error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        self.value, self.error = None, error

    def answer(self) -> None:
        """Set the future's result; only in the loop's thread. A cancelled caller's write stays committed."""
        if self.future.done():
            return
        if self.error is None:
            self.future.set_result(self.value)
        else:
            self.future.set_exception(self.error)


def answer_all(answered: list[Waiting]) -> None:
    for waiting in answered:
        waiting.answer()


PATIENCE_S = 3.0
"""How long a starting server waits for the lock: a predecessor that was killed may take a moment to be gone."""

_POLL_S = 0.05


def this_process() -> str:
    return f"gpool server, process {os.getpid()} on {platform.node()}"


def held_by_another(holder: str, store: str, setting: str) -> Conflict:
    return Conflict(
        f"another server ({holder}) serves {store}; stop that server first, or give this one a store of its own "
        f"with {setting}"
    )


@asynccontextmanager
async def locked_file(database: Path) -> AsyncIterator[None]:
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
        yield
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
