"""One contract, every runtime: what the daemon may rely on. What needs a kernel leaves the fake out."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import textwrap
from pathlib import Path
from typing import Any

import pytest

from gpool.agent.runtime.docker.engine import records
from gpool.agent.runtime.protocol import (
    PROGRESS_FILE,
    PROGRESS_VARIABLE,
    BadOutput,
    CommandJob,
    SandboxLimits,
    StagedInput,
)
from gpool.core.model import EndReason
from tests.agent.runtime.container_case import none_left
from tests.leftovers import RunPaths, clear
from tests.tools.engines import shared_engine
from tests.tools.processes import eventually
from tests.tools.runtimes import (
    ENGINES,
    LIMITS,
    MAKERS,
    PATIENCE_S,
    agent_of,
    command,
    left_over,
    processes_with,
    start_engine,
    using,
    within,
)

REAL = ("bubblewrap", "process", "docker", "podman", "gvisor")
SEEN = (
    "bubblewrap",
    "process",
    "docker",
    "podman",
)  # gVisor's processes are no processes of the host's
LAUNCHED = ("bubblewrap", "process")
BY_ENGINES = ("HOSTNAME", "TERM", "container")  # what Docker and Podman add: nothing of the agent's
every = pytest.mark.parametrize("kind", list(MAKERS))
seen_from_outside = pytest.mark.parametrize("kind", SEEN)
real = pytest.mark.parametrize("kind", REAL)


@every
def test_a_command_gives_both_streams_and_its_own_exit_code(kind: str, tmp_path: Path) -> None:
    script = "echo hello; echo oops >&2; exit 7"
    ran = using(kind, tmp_path, lambda runtime: command(runtime, "sh", "-c", script))
    assert (ran.out, ran.err) == (b"hello\n", b"oops\n")
    assert (ran.ended.exit_code, ran.ended.reason) == (7, EndReason.EXITED)


@every
def test_a_command_ended_by_a_signal_says_128_and_the_signal(kind: str, tmp_path: Path) -> None:
    ran = using(kind, tmp_path, lambda runtime: command(runtime, "sh", "-c", "kill -TERM $$"))
    assert ran.ended.exit_code == 128 + signal.SIGTERM


@every
def test_a_command_that_is_not_there_ends_with_127_and_says_so(kind: str, tmp_path: Path) -> None:
    ran = using(kind, tmp_path, lambda runtime: command(runtime, "no-such-program"))
    assert (ran.ended.exit_code, ran.ended.reason) == (127, EndReason.EXITED)
    assert b"no-such-program" in ran.err


@every
def test_a_killed_command_is_over_when_kill_returns(kind: str, tmp_path: Path) -> None:
    async def work(runtime: Any) -> int:
        argv = ("sh", "-c", "echo up; exec sleep 1000")
        sandbox = await runtime.start_command(CommandJob(argv, (), (), (), LIMITS))
        stream = sandbox.output()
        assert await anext(stream) == (1, b"up\n")
        await sandbox.kill()
        await sandbox.kill()
        assert [rest async for rest in stream] == []
        ended = await sandbox.ended()
        await sandbox.remove()
        return int(ended.exit_code)

    assert using(kind, tmp_path, work) == 137


@every
def test_inputs_are_laid_in_and_outputs_come_back_whole(kind: str, tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.write_bytes(b"given")
    into = tmp_path / "into"
    into.mkdir()
    (tmp_path / "data").mkdir()
    script = "cat in/a.txt > b.txt; mkdir -p m/n; echo 1 > m/x; echo 2 > m/n/y"
    ran = using(
        kind,
        tmp_path / "data",
        lambda runtime: command(
            runtime,
            "sh",
            "-c",
            script,
            inputs=[StagedInput("in/a.txt", given, False)],
            wanted=["b.txt", "m/"],
            into=into,
        ),
    )
    assert ran.outputs == {"b.txt": b"given", "m/x": b"1\n", "m/n/y": b"2\n"}
    assert given.read_bytes() == b"given"


@every
def test_an_output_that_was_not_written_is_named(kind: str, tmp_path: Path) -> None:
    script = "echo hello; echo oops >&2; exit 7"
    with pytest.raises(BadOutput, match=r"model\.pt.*was not written"):
        using(
            kind,
            tmp_path,
            lambda runtime: command(
                runtime, "sh", "-c", script, wanted=["model.pt"], into=tmp_path
            ),
        )


@pytest.mark.parametrize("kind", [*REAL, "microvm"])
def test_the_progress_file_is_read_while_the_command_runs(kind: str, tmp_path: Path) -> None:
    script = 'cd /; echo "0.4 epoch 4" > "$GPOOL_PROGRESS_FILE"; echo written; exec sleep 1000'

    async def work(runtime: Any) -> tuple[bytes, bytes]:
        argv = ("sh", "-c", script)
        sandbox = await runtime.start_command(CommandJob(argv, (), (), (), LIMITS))
        missing = await sandbox.read_end("missing", 100)
        printed = b""
        async for _, data in sandbox.output():
            printed += data
            if b"written" in printed:
                break
        found = await sandbox.read_end(PROGRESS_FILE, 100)
        await sandbox.remove()
        return missing, found

    assert using(kind, tmp_path, work) == (b"", b"0.4 epoch 4\n")


@real
def test_a_command_sees_its_own_variables_and_none_of_the_agents(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPOOL_SECRET", "hunter2")
    ran = using(
        kind, tmp_path, lambda runtime: command(runtime, "env", env=[("LR", "0.1 = x"), ("E", "")])
    )
    seen = dict(line.split("=", 1) for line in ran.out.decode().splitlines())
    assert seen["LR"] == "0.1 = x"
    assert seen["E"] == ""
    allowed = {"PATH", "HOME", "LANG", "TMPDIR", "LR", "E", "CUDA_VISIBLE_DEVICES", "PWD"}
    allowed |= {"PYTHONUNBUFFERED", "OMP_NUM_THREADS", PROGRESS_VARIABLE}
    assert set(seen) - allowed <= {"LD_LIBRARY_PATH", "PYTHONPATH", *BY_ENGINES}


@real
def test_python_and_its_packages_are_there(kind: str, tmp_path: Path) -> None:
    code = "import cloudpickle, gpool; print(6 * 7)"
    ran = using(kind, tmp_path, lambda runtime: command(runtime, "python", "-c", code))
    assert (ran.out, ran.err) == (b"42\n", b"")


@seen_from_outside
def test_nothing_outlives_its_command_however_it_detaches(kind: str, tmp_path: Path) -> None:
    seconds = f"98765.{secrets.randbelow(10**9)}"
    code = f"(trap '' TERM HUP; setsid sleep {seconds} >/dev/null 2>&1 &) ; sleep 0.2; echo done"
    ran = using(kind, tmp_path, lambda runtime: command(runtime, "sh", "-c", code))
    assert ran.out == b"done\n"
    assert processes_with(seconds) == []


@real
def test_a_long_command_line_and_many_variables_pass(kind: str, tmp_path: Path) -> None:
    words = ["x" * 100_000, "y" * 100_000]
    ran = using(
        kind,
        tmp_path,
        lambda runtime: command(
            runtime,
            "sh",
            "-c",
            'printf %s "$1$2$BIG" | wc -c',
            "sh",
            *words,
            env=[("BIG", "z" * 100_000)],
        ),
    )
    assert ran.out.strip() == b"300000"


@real
def test_output_that_nobody_reads_holds_the_command_back(kind: str, tmp_path: Path) -> None:
    async def work(runtime: Any) -> tuple[bool, int]:
        argv = ("sh", "-c", "head -c 10000000 /dev/zero; echo end >&2")
        sandbox = await runtime.start_command(CommandJob(argv, (), (), (), LIMITS))
        waiting = asyncio.ensure_future(sandbox.ended())
        done, _ = await asyncio.wait([waiting], timeout=0.3)
        size = 0
        async for stream, data in sandbox.output():
            size += len(data) if stream == 1 else 0
        await waiting
        await sandbox.remove()
        return bool(done), size

    assert using(kind, tmp_path, work) == (False, 10_000_000)


@real
def test_many_commands_at_once_do_not_mix(kind: str, tmp_path: Path) -> None:
    async def work(runtime: Any) -> list[bytes]:
        found = await asyncio.gather(
            *(command(runtime, "sh", "-c", f"echo {at} > f; cat f; pwd >&2") for at in range(12))
        )
        return [ran.out for ran in found]

    assert using(kind, tmp_path, work) == [b"%d\n" % at for at in range(12)]


@real
def test_a_tree_too_deep_for_a_path_is_removed(kind: str, tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import os
        for _ in range(1000):
            os.mkdir("deep"); os.chdir("deep")
        os.mkdir("closed"); os.chmod("closed", 0)
        open("f", "w").close(); os.chmod("f", 0)
    """)
    ran = using(kind, tmp_path, lambda runtime: command(runtime, "python", "-c", code))
    assert ran.ended.exit_code == 0, ran.err


AGENT = """
import asyncio, sys
from pathlib import Path

from tests.tools.runtimes import MAKERS, LIMITS
from gpool.agent.runtime.protocol import CommandJob
async def main():
    runtime = MAKERS[{kind!r}](Path({data!r}))
    script = "(trap '' TERM HUP; setsid sleep {seconds} </dev/null >/dev/null 2>&1 &) ; touch left; echo up; sleep {seconds}"
    sandbox = await runtime.start_command(CommandJob(("sh", "-c", script), (), (), (), LIMITS))
    async for stream, data in sandbox.output():
        print(data.decode(), flush=True)
asyncio.run(main())
"""


@seen_from_outside
def test_nothing_survives_the_agents_own_death_and_the_next_sweeps(
    kind: str, tmp_path: Path
) -> None:
    start_engine(kind)
    seconds = f"98765.{secrets.randbelow(10**9)}"
    with agent_of(AGENT, kind=kind, data=str(tmp_path), seconds=seconds) as agent:
        inside = f"sleep\0{seconds}"
        eventually("both are up", lambda: len(processes_with(inside)) == 2, PATIENCE_S)
        agent.kill()
        agent.wait()
        eventually("nothing of it runs", lambda mark=seconds: not processes_with(mark), PATIENCE_S)
    assert left_over(tmp_path) != []

    async def sweep() -> None:
        runtime = MAKERS[kind](tmp_path)
        await runtime.sweep()
        await runtime.close()

    within(sweep())
    assert left_over(tmp_path) == []


def my_launchers() -> set[int]:
    mine = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()
    return {int(pid) for pid in mine.split()} & {*processes_with("launcher.py")}


@pytest.mark.parametrize("kind", LAUNCHED)
def test_a_launcher_that_died_is_not_said_to_be_the_tasks_own_exit(
    kind: str, tmp_path: Path
) -> None:
    async def work(runtime: Any) -> tuple[EndReason, int]:
        argv = ("sh", "-c", "echo up; exec sleep 1000")
        sandbox = await runtime.start_command(CommandJob(argv, (), (), (), LIMITS))
        stream = sandbox.output()
        assert await anext(stream) == (1, b"up\n")
        for pid in my_launchers():
            os.kill(pid, signal.SIGKILL)
        ended = await sandbox.ended()
        await sandbox.remove()
        again = await command(runtime, "true")
        return ended.reason, again.ended.exit_code

    assert using(kind, tmp_path, work) == (EndReason.SANDBOX_FAILED, 0)


HASTY_AGENT = """
import asyncio
from pathlib import Path

from tests.tools.runtimes import MAKERS, LIMITS
from gpool.agent.runtime.protocol import CommandJob
async def main():
    runtime = MAKERS[{kind!r}](Path({data!r}))
    job = CommandJob(("sleep", {seconds!r}), (), (), (), LIMITS)
    first = await runtime.start_command(CommandJob(("true",), (), (), (), LIMITS))
    await first.ended()
    for _ in range(8):
        await runtime.start_command(job)
    print("asked", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@seen_from_outside
def test_a_sandbox_that_is_just_being_made_dies_with_the_agent_too(
    kind: str, tmp_path: Path
) -> None:
    """The kernel's death signal reaches only those who have asked for it yet."""
    start_engine(kind)
    for number in range(
        2 if kind in ENGINES else 4
    ):  # an engine's takes seconds, a launcher's race is narrower
        seconds = f"98765.{secrets.randbelow(10**9)}"
        data = str(tmp_path / str(number))
        with agent_of(HASTY_AGENT, kind=kind, data=data, seconds=seconds):
            pass
        try:
            eventually(
                "nothing of it runs", lambda mark=seconds: not processes_with(mark), PATIENCE_S
            )
        finally:
            for pid in processes_with(seconds):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if kind in ENGINES:  # or the next test would meet what the guard is still removing
            engine = shared_engine(ENGINES[kind])
            eventually("none is left", lambda at=engine: none_left(at), PATIENCE_S)
    clear(RunPaths(tmp_path))  # control groups of the killed agents


@pytest.mark.parametrize("kind", ["bubblewrap", "docker", "podman"])
def test_using_too_much_memory_is_said_to_be_that(kind: str, tmp_path: Path) -> None:
    if kind == "podman" and not any(True for _ in records()):
        pytest.skip("the kernel's log may not be read here, and Podman with runc does not tell")
    small = SandboxLimits(cpu_milli=1000, memory_bytes=64 << 20)
    ran = using(
        kind,
        tmp_path,
        lambda runtime: command(runtime, "python", "-c", "x = bytearray(300 << 20)", limits=small),
    )
    assert ran.ended.reason is EndReason.OUT_OF_MEMORY
    assert ran.ended.exit_code != 0


@real
def test_a_command_that_is_killed_is_not_said_to_have_used_too_much(
    kind: str, tmp_path: Path
) -> None:
    ran = using(kind, tmp_path, lambda runtime: command(runtime, "sh", "-c", "kill -KILL $$"))
    assert (ran.ended.exit_code, ran.ended.reason) == (137, EndReason.EXITED)


LINES = """
import sys
for number in range(3):
    print("epoch", number)
"""


@pytest.mark.parametrize("kind", ["bubblewrap", "docker", "podman"])
def test_lines_printed_before_a_memory_kill_are_in_the_output(kind: str, tmp_path: Path) -> None:
    """The control switches the buffer on: the same lines are lost."""
    small = SandboxLimits(cpu_milli=1000, memory_bytes=64 << 20)
    script = LINES + "x = bytearray(b'x' * (300 << 20))"

    async def printed(runtime: Any, env: tuple[tuple[str, str], ...]) -> bytes:
        job = CommandJob(("python3", "-c", script), env, (), (), small)
        sandbox = await runtime.start_command(job)
        data = b"".join([data async for stream, data in sandbox.output() if stream == 1])
        assert (await sandbox.ended()).exit_code != 0
        await sandbox.remove()
        return data

    expected = b"epoch 0\nepoch 1\nepoch 2\n"
    assert using(kind, tmp_path, lambda runtime: printed(runtime, ())) == expected
    buffered = (("PYTHONUNBUFFERED", ""),)
    assert using(kind, tmp_path, lambda runtime: printed(runtime, buffered)) == b""


@real
def test_lines_printed_before_a_kill_are_in_the_output(kind: str, tmp_path: Path) -> None:
    """As at a time-out: the agent kills a command that would run for long."""
    script = LINES + "import time; time.sleep(1000)"

    async def printed(runtime: Any) -> bytes:
        sandbox = await runtime.start_command(
            CommandJob(("python3", "-c", script), (), (), (), LIMITS)
        )
        data = b""
        async for _, part in sandbox.output():
            data += part
            if b"epoch 2\n" in data:
                await sandbox.kill()
        await sandbox.remove()
        return data

    assert using(kind, tmp_path, printed) == b"epoch 0\nepoch 1\nepoch 2\n"
