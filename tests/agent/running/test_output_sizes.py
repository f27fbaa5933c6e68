"""Outputs with holes count by their apparent size: the server keeps every byte of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from gpool.agent.daemon import boot_clock
from gpool.agent.running.artifact_cache import ArtifactCache
from gpool.agent.running.command_executor import CommandExecutor
from gpool.agent.running.sandboxes import ExecutorContext
from gpool.agent.runtime.bubblewrap.runtime import BubblewrapRuntime
from gpool.agent.state_machine.instructions import CommandEnded, Event, StartCommand
from gpool.core.model import MIB, Allocation, EndReason, Requirements, TaskKind, TaskSpec
from gpool.transfer.requests import LeaseRef
from tests.tools.runtimes import within


class Counted:
    def __init__(self) -> None:
        self.bytes = 0

    async def upload(
        self, file: Path, sha256: str, size: int, lease: LeaseRef | None = None
    ) -> None:
        self.bytes += size


async def unused(sha256: str, target: Path, lease: LeaseRef) -> None:
    raise AssertionError("nothing is to be fetched")


async def ran(data: Path, spec: TaskSpec) -> tuple[CommandEnded, int]:
    runtime, uploads, events = BubblewrapRuntime(data), Counted(), list[Event]()
    (data / "scratch").mkdir()
    cache = ArtifactCache(data / "artifacts", unused)
    context = ExecutorContext(
        [runtime], cache, uploads, data / "scratch", events.append, boot_clock
    )
    start = StartCommand(1, 1, spec, Allocation(0, 1000, 256 * MIB), True)
    try:
        await asyncio.wait([CommandExecutor(context, start).task])
        await asyncio.sleep(0)
    finally:
        await runtime.close()
    ended = next(event for event in events if isinstance(event, CommandEnded))
    return ended, uploads.bytes


@pytest.mark.parametrize("outputs", [("a", "b"), ("folder/",), ("folder/", "a")])
def test_sparse_outputs_are_never_larger_than_the_disk_limit(
    outputs: tuple[str, ...], tmp_path: Path, require: Callable[[str], None]
) -> None:
    """The control is a limit that they fit into."""
    require("bubblewrap")
    script = "mkdir folder; truncate -s 5M a b folder/c folder/d; echo x >> a; echo y >> folder/c"
    for limit, reason in ((8 * MIB, EndReason.BAD_OUTPUT), (32 * MIB, EndReason.EXITED)):
        spec = TaskSpec(
            TaskKind.COMMAND,
            "sparse",
            Requirements(disk_bytes=limit),
            command=("sh", "-c", script),
            outputs=outputs,
        )
        ended, uploaded = within(ran(tmp_path / str(limit), spec))
        assert ended.reason is reason, ended.error_text
        assert (uploaded > 0) is (reason is EndReason.EXITED)
        if reason is EndReason.BAD_OUTPUT:
            assert "disk limit" in ended.error_text
