"""An agent without any right, and without a control group of its own: what holds by user namespaces and rlimits alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.tools import unprivileged

CODE = r"""
import asyncio, fcntl, json, os, pickle, sys
from dataclasses import replace
from pathlib import Path
from gpool.agent.runtime.bubblewrap import seccomp
from gpool.agent.runtime.bubblewrap.runtime import BubblewrapRuntime
from gpool.agent.runtime.protocol import SandboxLimits, PreparedEnvironment, CommandJob, ENVIRONMENT_AT
from tests.tools.runtimes import LIMITS, caller, command, left_over

SMALL = SandboxLimits(cpu_milli=1000, memory_bytes=96 << 20, processes=40, disk_bytes=32 << 20, open_files=64)
FORKS = '''
import os, time
made = 0
try:
    while made < 300:
        if os.fork() == 0:
            time.sleep(1000)
        made += 1
except OSError:
    pass
print(made)
'''
EAT = '''
held = []
try:
    while len(held) < 400: held.append(bytearray(1 << 20))
except MemoryError:
    pass
size = len(held); held.clear(); print(size)
'''
SPREAD = '''
import time
for number in range(100):
    with open(f"full-{number}", "wb") as full: full.write(b"x" * (4 << 20))
time.sleep(5000)  # until it is noticed
'''
INODES = '''
import time
for number in range(300_000): open(f"empty-{number}", "w").close()
time.sleep(5000)
'''

async def main():
    data = Path(sys.argv[1])
    runtime = BubblewrapRuntime(data / "agent")
    await runtime.sweep()
    found = {"uid": os.geteuid(), "landlock": runtime.landlock == seccomp.landlock_version(), "groups": runtime.groups.hierarchy.version}
    async def out(*argv, limits=LIMITS):
        ran = await command(runtime, *argv, limits=limits)
        return (ran.out + ran.err).decode()
    found["who"] = await out("id", "-u")
    inside = seccomp.perl()
    for name, argv in (("locked", ()), ("bound", ("--unshare-pid", "--die-with-parent", "--ro-bind", "/", "/"))):
        held = ("sh", "-c", f"exec 9< {inside}; flock -n -x 9 && echo locked && exec sleep 1000")
        if name == "bound":  # the control: a bind mount
            process = await asyncio.create_subprocess_exec(runtime._bwrap, *argv, *held, stdout=-1)
            assert await process.stdout.readline() == b"locked\n"
        else:
            sandbox = await runtime.start_command(CommandJob(held, (), (), (), LIMITS))
            assert await anext(sandbox.output()) == (1, b"locked\n")
        with open(inside) as host:
            try:
                fcntl.flock(host, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found[name] = False
            except BlockingIOError:
                found[name] = True
        if name == "bound":
            process.kill()
            await process.wait()
        else:
            await sandbox.kill()
            await sandbox.remove()
    found["forks"] = int(await out("python", "-c", FORKS, limits=SMALL))
    found["eaten"] = int(await out("python", "-c", EAT, limits=SMALL))
    found["proc"] = await out("sh", "-c", "echo 1 > /proc/self/oom_score_adj")
    found["first"] = await out("python", "-c", "import os; os.kill(1, 0)")
    found["host"] = await out("ls", "/", "/root", "/home")
    found["outside"] = await out("sh", "-c", f"ls {data} || touch {data}/x")
    found["nest"] = await out("unshare", "--user", "true")
    found["tmp"] = await out("sh", "-c", "head -c 60000000 /dev/zero > /tmp/full; wc -c < /tmp/full", limits=replace(SMALL, disk_bytes=1 << 30))
    for name, code in (("spread", SPREAD), ("inodes", INODES)):
        ran = await command(runtime, "python", "-c", code, limits=SMALL)
        found[name] = ran.ended.reason.value
    runner = await caller(runtime)
    found["call"] = pickle.loads((await runner.call(abs, -5)).value)
    await runner.runner.remove()
    env = data / "env"
    (env / "bin").mkdir(parents=True)
    (env / "bin" / "hello").write_text("#!/bin/sh\necho hello from it\n")
    (env / "bin" / "hello").chmod(0o755)
    job = CommandJob(("hello",), (), (), (), LIMITS, environment=PreparedEnvironment("pip:x", env, ENVIRONMENT_AT + "/bin/python"))
    sandbox = await runtime.start_command(job)
    found["environment"] = b"".join([data async for _, data in sandbox.output()]).decode()
    await sandbox.remove()
    build = CommandJob(("sh", "-c", "mkdir -p out/bin; echo 1 > out/bin/x; chmod 6777 out/bin/x; chmod 0 out"), (), (), (), LIMITS)
    sandbox = await runtime.start_command(build)
    assert [d async for _, d in sandbox.output()] == []
    await sandbox.take("out", data / "taken")
    await sandbox.remove()
    found["taken"] = oct(os.stat(data / "taken/bin/x").st_mode & 0o7777)
    await runtime.close()
    found["left"] = [str(path) for path in left_over(data / "agent")]
    print(json.dumps(found))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def found(require: Callable[[str], None]) -> dict[str, Any]:
    require("root")
    said: dict[str, Any] = json.loads(unprivileged.run(CODE))
    return said


def test_it_really_has_no_right(found: dict[str, Any]) -> None:
    assert (found["uid"], found["groups"]) == (unprivileged.UID, 0)


def test_commands_calls_environments_and_taking_work(found: dict[str, Any]) -> None:
    assert found["who"] == "1000\n"
    assert found["call"] == 5
    assert found["environment"] == "hello from it\n"
    assert found["taken"] == "0o555"
    assert found["left"] == []


def test_processes_end_at_the_users_limit(found: dict[str, Any]) -> None:
    assert 10 < found["forks"] < 40


def test_memory_ends_at_the_process_limit(found: dict[str, Any]) -> None:
    """Of each process: without a control group nobody counts them together."""
    assert found["eaten"] < 96


def test_disk_and_inodes_end_at_the_limit(found: dict[str, Any]) -> None:
    assert (found["spread"], found["inodes"]) == ("bad_output", "bad_output")
    assert "No space left" in found["tmp"]


def test_the_host_is_out_of_sight(found: dict[str, Any]) -> None:
    assert "No such file" in found["outside"]
    assert "/root" in found["host"].partition("cannot access")[2]


def test_a_lock_reaches_the_host_through_a_bind_mount_only(found: dict[str, Any]) -> None:
    assert (found["locked"], found["bound"]) == (False, True)


def test_the_walls_stand(found: dict[str, Any]) -> None:
    assert found["landlock"]
    assert "Read-only" in found["proc"]
    assert "PermissionError" in found["first"]
    assert "not permitted" in found["nest"]
