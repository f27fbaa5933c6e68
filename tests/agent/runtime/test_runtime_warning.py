"""A command that is warned may save and end by itself; a checkpoint is collected while it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpool.agent.runtime.protocol import CommandJob, SandboxExit
from tests.tools.runtimes import LIMITS, using

every = pytest.mark.parametrize("kind", ["bubblewrap", "bubblewrap's wheel", "process"])
SAVES = """
import signal, sys
def save(*_):
    open("state/saved", "w").write("whole")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
import os
os.mkdir("state")
open("state/part", "w").write("so far")
print("up", flush=True)
while True:
    signal.pause()
"""
IGNORES = "trap '' TERM; echo up; while :; do sleep 0.05; done"


async def upped(runtime: Any, *argv: str) -> tuple[Any, Any]:
    sandbox = await runtime.start_command(CommandJob(argv, (), (), (), LIMITS))
    stream = sandbox.output()
    said = b""
    while said != b"up\n":  # an unbuffered print writes its line feed apart
        number, data = await anext(stream)
        assert number == 1
        said += data
        assert b"up\n".startswith(said)
    return sandbox, stream


@every
def test_a_warned_command_saves_and_ends_with_its_own_code(kind: str, tmp_path: Path) -> None:
    into = tmp_path / "into"
    into.mkdir()

    async def work(runtime: Any) -> tuple[SandboxExit, dict[str, bytes]]:
        sandbox, stream = await upped(runtime, "python", "-c", SAVES)
        before = await sandbox.collect(["state/"], into)
        assert [found.path for found in before] == ["state/part"]
        await sandbox.warn()
        assert [rest async for rest in stream] == []
        ended = await sandbox.ended()
        await sandbox.warn()  # nothing happens any more
        found = await sandbox.collect(["state/"], into)
        await sandbox.remove()
        return ended, {each.path: (into / each.sha256).read_bytes() for each in found}

    ended, outputs = using(kind, tmp_path / "data", work)
    assert ended == SandboxExit(0)
    assert outputs == {"state/part": b"so far", "state/saved": b"whole"}


@every
def test_a_warned_command_without_a_word_for_it_ends_by_the_signal(
    kind: str, tmp_path: Path
) -> None:
    async def work(runtime: Any) -> int:
        sandbox, stream = await upped(runtime, "sh", "-c", "echo up; exec sleep 7531")
        await sandbox.warn()
        assert [rest async for rest in stream] == []
        code = (await sandbox.ended()).exit_code
        await sandbox.remove()
        return int(code)

    assert using(kind, tmp_path, work) == 143


@every
def test_a_command_may_ignore_the_warning_and_is_killed_all_the_same(
    kind: str, tmp_path: Path
) -> None:
    async def work(runtime: Any) -> int:
        sandbox, _ = await upped(runtime, "sh", "-c", IGNORES)
        await sandbox.warn()
        await sandbox.warn()
        await sandbox.kill()
        code = (await sandbox.ended()).exit_code
        await sandbox.remove()
        return int(code)

    assert using(kind, tmp_path, work) == 137
