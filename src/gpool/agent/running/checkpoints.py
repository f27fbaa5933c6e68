"""Checkpoints of a command: what its directory held at one moment, uploaded under the lease, and told when it changed.

The contract with a task that names `checkpoint="state/"`:
- Write a file under another name that ends in `.tmp`, then rename it; such files are never part of a checkpoint. Files
  that belong together are best renamed as one directory, or named by their step with a small index renamed last.
- After SIGTERM finish writing and end; the kill comes after the task's `grace`. An exit code after the warning says
  nothing: the task is queued again and finds the directory as it was saved.
- An attempt that failed, timed out or was preempted is saved once more after its last process has gone.

While the task runs its directory is read twice. Only if both readings agree, file by file, was there a moment, between
the two, at which it held exactly that; else it is read once more, and then the previous checkpoint stays the last. An
empty or missing directory never replaces one that held something.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import structlog

from gpool.agent.running.sandboxes import Uploader
from gpool.agent.runtime.protocol import BadOutput, CommandSandbox
from gpool.core.errors import GpoolError, StaleLease
from gpool.core.model import InputFile, OutputFile
from gpool.transfer.artifacts import LeaseRef

T = TypeVar("T")
UNFINISHED = ".tmp"
READINGS = 3  # two that agree, and one more try

log = structlog.get_logger(__name__)


async def unhurried(work: Awaitable[T]) -> T:
    """Called off, it still waits for the thread behind it: nobody writes into a folder that is being removed."""
    working = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        if not working.cancelled():
            working.exception()
        raise


class Saver:
    """Saves one attempt's checkpoint, again and again. `tell` gets each new one, `complain` why there is none."""

    def __init__(
        self,
        uploader: Uploader,
        scratch: Path,
        lease: LeaseRef,
        directory: str,
        restored: tuple[InputFile, ...],
        tell: Callable[[tuple[OutputFile, ...]], None],
        complain: Callable[[str], None],
    ) -> None:
        self._uploader = uploader
        self._scratch = scratch
        self._lease = lease
        self._directory = directory
        self._last = frozenset(
            OutputFile(file.path, file.sha256, file.size_bytes, file.executable)
            for file in restored
        )
        self._sent: set[str] = set()  # what the last one told is made of; older ones may be pruned
        self._tell = tell
        self._complain = complain
        self._complained = ""

    async def save(self, sandbox: CommandSandbox, *, running: bool) -> bool:
        """Whether the server now has what the directory held; what stands in the way is said, not raised."""
        try:
            with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
                return await self._save(sandbox, Path(folder), running)
        except StaleLease as error:
            log.info("checkpoint_refused", task=self._lease.task, error=error.detail)
            return False
        except BadOutput as error:
            return self._failed(str(error))
        except GpoolError as error:
            return self._failed(error.detail)
        except OSError as error:
            return self._failed(f"{error}")

    def _failed(self, why: str) -> bool:
        log.info("checkpoint_not_saved", task=self._lease.task, why=why)
        if why != self._complained:
            self._complained = why
            self._complain(why)
        return False

    async def _save(self, sandbox: CommandSandbox, into: Path, running: bool) -> bool:
        found = await self._moment(sandbox, into) if running else await self._read(sandbox, into)
        if found is None:
            return self._failed("its files change all the time; write to .tmp names and rename")
        if not found or frozenset(found) == self._last:
            return True
        for sha256, size in {file.sha256: file.size_bytes for file in found}.items():
            if sha256 not in self._sent:
                await self._uploader.upload(into / sha256, sha256, size, self._lease)
        self._sent = {file.sha256 for file in found}
        self._last = frozenset(found)
        self._complained = ""
        self._tell(found)
        return True

    async def _moment(self, sandbox: CommandSandbox, into: Path) -> tuple[OutputFile, ...] | None:
        """What two readings in a row agree on; None: it never stood still."""
        before: tuple[OutputFile, ...] | None = None
        for _ in range(READINGS):
            try:
                now = await self._read(sandbox, into)
            except FileNotFoundError:  # it went while we looked
                before = None
                continue
            if now == before:
                return now
            before = now
        return None

    async def _read(self, sandbox: CommandSandbox, into: Path) -> tuple[OutputFile, ...]:
        """Nothing where the directory was not made yet."""
        try:
            found = await unhurried(sandbox.collect([self._directory], into))
        except BadOutput as bad:
            if "was not written" in str(bad):
                return ()
            raise
        return tuple(sorted(_finished(found), key=lambda file: file.path))


def _finished(files: list[OutputFile]) -> list[OutputFile]:
    return [file for file in files if not _is_unfinished(file.path)]


def _is_unfinished(path: str) -> bool:
    return any(part.endswith(UNFINISHED) for part in path.split("/"))
