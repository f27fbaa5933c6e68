"""A task that hides what it writes: files without a name, and folders that only it could list. They count all the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gpool.agent.runtime.protocol import SandboxLimits
from gpool.core.model import EndReason
from tests.tools import unprivileged
from tests.tools.runtimes import NEEDS, Ran, command, using

SMALL = SandboxLimits(cpu_milli=2000, memory_bytes=256 << 20, disk_bytes=32 << 20)
WRITE = """
import itertools, os, sys, threading
MEGABYTE, MANY = os.urandom(1 << 20), 200
def write(files, megabytes):
    for file in files:
        for _ in range(megabytes):
            os.write(file, MEGABYTE)
        yield file
def unnamed():
    for number in range(MANY):
        file = os.open("x", os.O_CREAT | os.O_RDWR | os.O_EXCL)
        os.unlink("x")
        yield file
def closed():
    os.mkdir("d")
    files = [os.open(f"d/{number}", os.O_CREAT | os.O_RDWR) for number in range(MANY)]
    os.chmod("d", 0)
    yield from files
files = {"unnamed": unnamed, "closed": closed}[sys.argv[1]]()
held = list(write(itertools.islice(files, 10), 16))
if sys.argv[2] == "stay":  # and write on: what others remove meanwhile hides some of it
    for file in write(files, 1):
        held.append(file)
        threading.Event().wait(0.1)
    threading.Event().wait()
os.write(1, b"alive")
"""
ROOTLESS = """
import asyncio, json, sys
from pathlib import Path
from tests.tools.runtimes import using, command
from gpool.agent.runtime.protocol import SandboxLimits
limits = SandboxLimits(cpu_milli=2000, memory_bytes=256 << 20, disk_bytes=32 << 20)
ran = using("bubblewrap", Path(sys.argv[1]) / "data", lambda runtime: command(
    runtime, "python", "-c", sys.argv[2], sys.argv[3], "stay", limits=limits))
print(json.dumps([ran.ended.reason.value, ran.out.decode()]))
"""
how = pytest.mark.parametrize("hidden", ["unnamed", "closed"])


def ran(kind: str, data: Path, hidden: str, then: str) -> Ran:
    words = ("python", "-c", WRITE, hidden, then)
    return using(kind, data, lambda runtime: command(runtime, *words, limits=SMALL))


@how
@pytest.mark.parametrize("kind", ["bubblewrap", "docker", "podman"])
def test_hidden_bytes_end_the_task(
    kind: str, hidden: str, tmp_path: Path, require: Callable[[str], None]
) -> None:
    if kind in NEEDS:
        require(NEEDS[kind])
    found = ran(kind, tmp_path, hidden, "stay")
    assert found.ended.reason is EndReason.BAD_OUTPUT
    assert found.out == b""


@how
def test_hidden_bytes_end_the_task_of_an_agent_without_rights(
    hidden: str, require: Callable[[str], None]
) -> None:
    require("root")
    reason, out = json.loads(unprivileged.run(ROOTLESS, WRITE, hidden))
    assert (reason, out) == (EndReason.BAD_OUTPUT.value, "")


@how
def test_without_the_watchdog_they_are_written(hidden: str, tmp_path: Path) -> None:
    found = ran("process", tmp_path, hidden, "end")
    assert found.out == b"alive"
