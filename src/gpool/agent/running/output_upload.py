"""Upload of outputs that waits while the owner's storage quota is full: the owner may delete something meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gpool.core.errors import StorageFull
from gpool.transfer.requests import LeaseRef

FILES_WAIT_S = 300.0
"""Longest wait of a command's output files; its allocation stays in use."""

VALUE_WAIT_S = 60.0
"""Longest wait of a function's value; the next calls of its runner wait too."""


class OutputReceiver(Protocol):
    async def upload(
        self, file: Path, sha256: str, size: int, lease: LeaseRef | None = None
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class RoomWait:
    """Longest wait for room and pause between two attempts, in seconds."""

    most_s: float = FILES_WAIT_S
    every_s: float = 15.0


async def upload_output(
    receiver: OutputReceiver,
    file: tuple[Path, str, int],
    lease: LeaseRef,
    note: Callable[[str], None],
    wait: RoomWait,
) -> None:
    """Upload a file (path, SHA-256, size); raise `StorageFull` if there is no room after the longest wait."""
    clock = asyncio.get_running_loop().time
    ends, is_noted = clock() + wait.most_s, False
    while True:
        try:
            await receiver.upload(*file, lease)
        except StorageFull as full:
            if clock() >= ends:
                raise
            if not is_noted:
                is_noted = True
                note(f"the outputs wait on the node for up to {wait.most_s:g} s: {full.detail}")
            await asyncio.sleep(min(wait.every_s, max(0.0, ends - clock())))
        else:
            return
