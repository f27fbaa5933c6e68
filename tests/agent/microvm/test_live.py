"""Real guests: booted by QEMU, emulated where the host gives no KVM. Each test boots as few as it can."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import pickle
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest

from gpool.agent.runtime.protocol import (
    BadOutput,
    CommandJob,
    FunctionCall,
    SandboxLimits,
    StagedInput,
)
from gpool.core.model import EndReason
from tests.tools.processes import eventually
from tests.tools.runtimes import (
    LIMITS,
    MAKERS,
    PATIENCE_S,
    Ran,
    agent_of,
    caller,
    left_over,
    processes_with,
    using,
    within,
)

pytestmark = pytest.mark.usefixtures("qemu")
LOOK = textwrap.dedent("""
    import json, os, socket, cloudpickle, gpool
    def can(what):
        try:
            what()
        except OSError as refused:
            return refused.strerror
        return "yes"
    def fill():
        with open("big", "wb") as big:
            for _ in range(64):
                big.write(bytes(1 << 20))
                big.flush()
    def dial(address):
        with socket.socket() as line:
            line.settimeout(2)
            line.connect(address)
    seen = dict(
        env=dict(os.environ), uid=os.getuid(), dev=sorted(os.listdir("/dev")), sys=os.listdir("/sys"),
        pids=[int(n) for n in os.listdir("/proc") if n.isdecimal()],
        write=can(lambda: open("/usr/x", "w")), fill=can(fill), dial=can(lambda: dial(("1.1.1.1", 53))),
        names=sorted(os.listdir("/sys/class/net")) if os.path.isdir("/sys/class/net") else [],
        disk=can(lambda: open("/dev/vdd", "rb")), kernel=os.uname().release, host=os.uname().nodename,
    )
    os.unlink("big")
    print(json.dumps(seen))
    os.symlink("/etc/passwd", "link")
    os.mkfifo("fifo")
    os.makedirs("m/n")
    for path, text in (("in.copy", open("in/a.txt").read()), ("m/x", "1"), ("m/n/y", "2")):
        with open(path, "w") as out:
            out.write(text)
    os.chmod("in.copy", 0o000)
    import sys
    print(len(sys.argv[1]) + len(sys.argv[2]) + len(os.environ["BIG"]), file=sys.stderr)
    import signal, time
    def saved(*_):
        print("saved", flush=True)
        sys.exit(9)
    signal.signal(signal.SIGTERM, saved)
    print("up", flush=True)
    time.sleep(1000)
""")


@pytest.fixture
def qemu(require: Callable[[str], None]) -> None:
    require("qemu")


async def until(stream: Any, streams: dict[int, bytearray], word: bytes) -> None:
    async for number, data in stream:
        streams[number] += data
        if word in streams[1]:
            return


def test_a_guest_sees_its_own_machine_and_gives_back_what_it_wrote(tmp_path: Path) -> None:
    """One guest, looked at from all sides: what it sees, what it may, a checkpoint while it runs, a warning, its end."""
    given, into = tmp_path / "given", tmp_path / "into"
    given.write_bytes(b"given")
    into.mkdir()
    limits = SandboxLimits(cpu_milli=1000, memory_bytes=256 << 20, disk_bytes=48 << 20)

    async def work(runtime: Any) -> tuple[Ran, dict[str, bytes], list[str]]:
        job = CommandJob(
            ("python", "-c", LOOK, "x" * 100_000, "y" * 100_000),
            (("LR", "0.1 = x"), ("BIG", "z" * 100_000)),
            (StagedInput("in/a.txt", given, False),),
            (),
            limits,
        )
        sandbox = await runtime.start_command(job)
        try:
            streams = {1: bytearray(), 2: bytearray()}
            stream = sandbox.output()
            await until(stream, streams, b"up\n")
            while_it_runs = {f.path: f for f in await sandbox.collect(["m/"], into)}
            await sandbox.warn()
            await until(stream, streams, b"never")
            ended = await sandbox.ended()
            found = await sandbox.collect(["in.copy", "m/"], into)
            assert while_it_runs == {f.path: f for f in found if f.path.startswith("m/")}
            refused = []
            for wanted in ("link", "fifo", "m", "link/x", "none"):
                with pytest.raises(BadOutput) as bad:
                    await sandbox.collect([wanted], into)
                refused.append(str(bad.value))
            outputs = {f.path: (into / f.sha256).read_bytes() for f in found}
            return Ran(ended, bytes(streams[1]), bytes(streams[2])), outputs, refused
        finally:
            await sandbox.remove()

    ran, outputs, refused = using("microvm", tmp_path / "data", work)
    lines = ran.out.decode().splitlines()
    assert lines[1:] == ["up", "saved"], ran
    assert (ran.ended.exit_code, ran.ended.reason) == (9, EndReason.EXITED)
    assert ran.err == b"300000\n"
    assert outputs == {"in.copy": b"given", "m/n/y": b"2", "m/x": b"1"}
    for text, word in zip(
        refused,
        ("symbolic link", "FIFO", "is a directory", "not a directory", "was not written"),
        strict=True,
    ):
        assert word in text
    seen = json.loads(lines[0])
    assert seen["uid"] == 1000
    assert seen["env"]["LR"] == "0.1 = x"
    allowed = {
        "PATH",
        "HOME",
        "LANG",
        "TMPDIR",
        "LR",
        "BIG",
        "CUDA_VISIBLE_DEVICES",
        "PYTHONUNBUFFERED",
        "GPOOL_PROGRESS_FILE",
        "OMP_NUM_THREADS",
        "LD_LIBRARY_PATH",
    }
    assert set(seen["env"]) <= allowed | {"LC_CTYPE"}
    assert not {name for name in seen["dev"] if name.startswith(("vd", "vport", "kvm"))}
    assert (seen["sys"], seen["names"]) == ([], [])
    assert len(seen["pids"]) == 2  # itself, and the one above it
    assert seen["write"] == "Read-only file system"
    assert seen["fill"] == "No space left on device"
    assert seen["dial"] == "Network is unreachable"
    assert seen["disk"] == "No such file or directory"
    assert seen["host"] == "sandbox"
    assert seen["kernel"] != os.uname().release


def test_a_runner_in_a_guest_answers_calls_small_and_large(tmp_path: Path) -> None:
    def grow(text: str, times: int) -> str:
        sys.stdout.write("growing\n")
        return text * times

    async def work(runtime: Any) -> tuple[str, str, int, tuple[Any, ...], str]:
        running = await caller(runtime)
        try:
            first = await running.call(grow, "ab", 2)
            large = await running.call(grow, "x" * 100_000, 20)
            assert large.value_file is not None
            value = pickle.loads(large.value_file.read_bytes())
            large.value_file.unlink()
            arguments = tmp_path / "arguments"
            arguments.write_bytes(pickle.dumps((("y" * 3_000_000, 1), {})))
            name = hashlib.sha256(pickled := cloudpickle.dumps(len_of)).hexdigest()
            await running.runner.define(name, pickled)
            await running.runner.send([FunctionCall(99, name, arguments_file=arguments)])
            by_file = (await running.answers(1))[0]
            failed = await running.call(fail)
            return (
                pickle.loads(first.value),
                value,
                pickle.loads(by_file.value),
                running.said(first),
                failed.error_text,
            )
        finally:
            await running.runner.remove()

    def len_of(text: str, times: int) -> int:
        return len(text) * times

    def fail() -> None:
        raise ValueError("no")

    first, value, length, printed, error = using("microvm", tmp_path, work)
    assert (first, len(value), length) == ("abab", 2_000_000, 3_000_000)
    assert printed == ((1, b"growing\n"),)
    assert "ValueError: no" in error


def test_a_guest_that_takes_too_much_memory_is_said_to_have(tmp_path: Path) -> None:
    small = SandboxLimits(cpu_milli=1000, memory_bytes=64 << 20, disk_bytes=32 << 20)

    async def work(runtime: Any) -> tuple[EndReason, int]:
        argv = ("python", "-c", "x = bytearray(300 << 20)")
        sandbox = await runtime.start_command(CommandJob(argv, (), (), (), small))
        async for _ in sandbox.output():
            pass
        ended = await sandbox.ended()
        await sandbox.remove()
        return ended.reason, ended.exit_code

    assert using("microvm", tmp_path, work) == (EndReason.OUT_OF_MEMORY, 137)


AGENT = """
import asyncio
from pathlib import Path

from tests.tools.runtimes import MAKERS, LIMITS
from gpool.agent.runtime.protocol import CommandJob
async def main():
    runtime = MAKERS["microvm"](Path({data!r}))
    sandbox = await runtime.start_command(CommandJob(("sh", "-c", "echo up; sleep 1000"), (), (), (), LIMITS))
    async for stream, data in sandbox.output():
        print(data.decode(), flush=True)
asyncio.run(main())
"""


def test_a_guest_dies_with_the_agent_and_the_next_sweeps(tmp_path: Path) -> None:
    with agent_of(AGENT, data=str(tmp_path)) as agent:
        name = next((tmp_path / "microvms").iterdir()).name
        was_up = processes_with(f"/{name}/work.img")
        agent.kill()
        agent.wait()
        assert was_up
        eventually("it is gone", lambda: not processes_with(f"/{name}/work.img"), PATIENCE_S)
    assert left_over(tmp_path) != []

    async def sweep() -> None:
        runtime = MAKERS["microvm"](tmp_path)
        await runtime.sweep()
        await runtime.close()

    within(sweep())
    assert left_over(tmp_path) == []


def test_a_killed_guest_and_one_held_back_by_a_full_window_end_at_once(tmp_path: Path) -> None:
    """Nobody reads its output: the command waits, `collect` works all the same, and `kill` does not."""

    async def work(runtime: Any) -> tuple[bool, list[str], float, int]:
        argv = ("sh", "-c", "echo 1 > done; echo up; exec head -c 10000000 /dev/zero")
        sandbox = await runtime.start_command(CommandJob(argv, (), (), (), LIMITS))
        stream = sandbox.output()
        assert (await anext(stream))[1].startswith(b"up\n")
        waiting = asyncio.ensure_future(sandbox.ended())
        done, _ = await asyncio.wait([waiting], timeout=1.0)
        found = [f.path for f in await sandbox.collect(["done"], tmp_path)]
        began = time.monotonic()
        await sandbox.kill()
        took = time.monotonic() - began
        ended = await waiting
        await sandbox.remove()
        return bool(done), found, took, ended.exit_code

    done, found, took, code = using("microvm", tmp_path / "data", work)
    assert (done, found, code) == (False, ["done"], 137)
    assert took < PATIENCE_S  # its window stays full: by itself it would never end


def test_a_guest_that_is_called_off_while_it_boots_ends_at_once(tmp_path: Path) -> None:
    async def work(runtime: Any) -> float:
        job = CommandJob(("sleep", "1000"), (), (), (), LIMITS)
        for patience in (0.05, 0.5, 4.0):
            starting = asyncio.create_task(runtime.start_command(job))
            await asyncio.wait([starting], timeout=patience)
            if patience == 4.0 and starting.done():  # a fast machine: it has booted
                await starting.result().remove()
                break
            assert starting.cancel()
            began = time.monotonic()
            await asyncio.wait([starting])
            assert starting.cancelled()
        return time.monotonic() - began

    assert using("microvm", tmp_path, work) < PATIENCE_S
