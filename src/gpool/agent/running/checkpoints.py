"""Checkpoints of a command: consistent snapshots of its checkpoint directory, uploaded under the lease when it changed.

The contract with a task that names `checkpoint="state/"`:
- Write a file under a name ending in `.tmp`, then rename it; `.tmp` files are never saved. Rename files that belong
  together as one directory, or name them by step and rename a small index last.
- After SIGTERM finish writing and exit; SIGKILL follows after the task's `grace`. The exit code is then ignored: the
  task is queued again and finds the directory as it was saved.
- A failed, timed-out or preempted attempt is saved once more after its last process is gone.

While the task runs, its directory is read twice. If both readings agree, file by file, the directory held exactly that
at some moment between them; else it is read once more, and if that differs too the previous checkpoint stays. An empty
or missing directory never replaces a checkpoint.
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
from gpool.transfer.requests import LeaseRef

T = TypeVar("T")
UNFINISHED = ".tmp"
READINGS = 3  # two that agree, and one more try

log = structlog.get_logger(__name__)


async def uninterrupted(work: Awaitable[T]) -> T:
    """If cancelled, wait for the thread, so that it does not write into a removed folder."""
    working = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        if not working.cancelled():
            working.exception()
        raise


class CheckpointSaver:
    """`report` receives each new checkpoint, `complain` the reason for a missing one."""

    def __init__(
        self,
        uploader: Uploader,
        scratch: Path,
        lease: LeaseRef,
        directory: str,
        restored: tuple[InputFile, ...],
        report: Callable[[tuple[OutputFile, ...]], None],
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
        self._sent: set[str] = set()  # artifacts of the last checkpoint; older ones may be pruned
        self._report = report
        self._complain = complain
        self._complained = ""

    async def save(self, sandbox: CommandSandbox, *, running: bool) -> bool:
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
        found = (
            await self._stable_reading(sandbox, into)
            if running
            else await self._read(sandbox, into)
        )
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
        self._report(found)
        return True

    async def _stable_reading(
        self, sandbox: CommandSandbox, into: Path
    ) -> tuple[OutputFile, ...] | None:
        before: tuple[OutputFile, ...] | None = None
        for _ in range(READINGS):
            try:
                now = await self._read(sandbox, into)
            except FileNotFoundError:  # removed during the reading
                before = None
                continue
            if now == before:
                return now
            before = now
        return None

    async def _read(self, sandbox: CommandSandbox, into: Path) -> tuple[OutputFile, ...]:
        try:
            found = await uninterrupted(sandbox.collect([self._directory], into))
        except BadOutput as bad:
            if "was not written" in str(bad):
                return ()
            raise
        return tuple(sorted(_finished(found), key=lambda file: file.path))


def _finished(files: list[OutputFile]) -> list[OutputFile]:
    return [file for file in files if not _is_unfinished(file.path)]


def _is_unfinished(path: str) -> bool:
    return any(part.endswith(UNFINISHED) for part in path.split("/"))
