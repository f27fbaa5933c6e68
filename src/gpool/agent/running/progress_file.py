"""Progress of a command: its progress file, read once a second while it runs (`core.specs.progress`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gpool.agent.runtime.protocol import PROGRESS_FILE, BadOutput, CommandSandbox, SandboxFailed
from gpool.core.specs import progress

EVERY_S = 1.0


async def watch_progress(sandbox: CommandSandbox, report: Callable[[int, str], None]) -> None:
    """Report millionths and text whenever the file has changed, until cancelled or the sandbox is gone.

    A cancellation does not wait for a read that is under way: a guest may delay it.
    """
    last = b""
    while True:
        await asyncio.sleep(EVERY_S)
        try:
            data = await sandbox.read_end(PROGRESS_FILE, progress.MAX_FILE_BYTES)
        except (BadOutput, SandboxFailed, OSError):
            return
        if data != last and (found := progress.parsed(data)) is not None:
            report(*found)
        last = data
