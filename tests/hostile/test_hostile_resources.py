"""A task that takes all it can get: it gets its limits and no more, and the agent stays small and awake."""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import signal
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gpool.agent.runtime.protocol import CommandJob, SandboxLimits
from gpool.core.model import EndReason
from tests.tools.processes import PATIENCE_S, alive, eventually
from tests.tools.runtimes import LIMITS, command, processes_with, using

SMALL = SandboxLimits(
    cpu_milli=1000, memory_bytes=96 << 20, processes=40, disk_bytes=8 << 20, open_files=64
)
FORKS = """
import os, sys
made = 0
try:
    while made < 300:
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", sys.argv[1]])
        made += 1
except OSError:
    pass
print(made)
"""
FILL = """
import errno, sys
path, size = sys.argv[1], 0
try:
    with open(path, "wb", buffering=0) as full:
        while size < 200 << 20:
            size += full.write(b"x" * (1 << 20))
except OSError as why:
    print(errno.errorcode[why.errno], end=" ")
print(size >> 20)
"""


def own_seconds() -> str:
    """How long to sleep, by which a process of this test is told from those of another run on this machine."""
    return f"4321.{secrets.randbelow(10**9)}"


def parent_of(pid: int) -> int:
    """0 when it is gone: other tests' processes come and go."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def is_child(pid: int) -> bool:
    return parent_of(pid) == os.getpid()


def ran(tmp_path: Path, kind: str, *argv: str, limits: SandboxLimits = SMALL) -> Any:
    return using(kind, tmp_path, lambda runtime: command(runtime, *argv, limits=limits))


def test_a_fork_bomb_gets_its_share_of_processes(tmp_path: Path) -> None:
    seconds = own_seconds()
    made = int(ran(tmp_path, "bubblewrap", "python", "-c", FORKS, seconds).out)
    assert 10 < made < 40
    assert processes_with(f"sleep\0{seconds}") == []
    assert int(ran(tmp_path, "process", "python", "-c", FORKS, seconds).out) == 300


THREADS = """
import threading
made, hold = 0, threading.Event()
try:
    while made < 300:
        threading.Thread(target=hold.wait, daemon=True).start()
        made += 1
except RuntimeError:
    pass
print(made, flush=True)
import os
os._exit(0)
"""


def test_a_thread_bomb_gets_its_share_of_processes(tmp_path: Path) -> None:
    roomy = replace(SMALL, memory_bytes=8 << 30)  # a stack counts as data where rlimits hold
    made = int(ran(tmp_path, "bubblewrap", "python", "-c", THREADS, limits=roomy).out)
    assert 10 < made < 40
    assert int(ran(tmp_path, "process", "python", "-c", THREADS, limits=roomy).out) == 300


@pytest.mark.parametrize(
    "code",
    ["os.nice(-20)", "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(99))"],
    ids=["nice", "real time"],
)
def test_nobody_gets_ahead_of_others_on_the_processor(code: str, tmp_path: Path) -> None:
    """Without isolation a root agent's task may."""
    words = ("python", "-c", f"import os; {code}; print('ahead')")
    assert b"PermissionError" in ran(tmp_path, "bubblewrap", *words).err
    if os.geteuid() == 0:
        assert ran(tmp_path, "process", *words).out == b"ahead\n"


def test_a_sparse_file_of_a_terabyte_is_refused(tmp_path: Path) -> None:
    words = ("python", "-c", "import os; f = open('s', 'wb'); f.truncate(1 << 40); print('made')")
    assert b"File too large" in ran(tmp_path, "bubblewrap", *words).err
    large = replace(SMALL, disk_bytes=2 << 40)
    assert ran(tmp_path, "bubblewrap", *words, limits=large).out == b"made\n"


def test_a_tree_deeper_than_any_path_is_removed(tmp_path: Path) -> None:
    code = (
        "import os\n"
        "for n in range(1500):\n"
        "    os.mkdir('d' * 50)\n"
        "    os.chdir('d' * 50)\n"
        "print('deep')"
    )
    wide = replace(SMALL, disk_bytes=1 << 30)
    assert ran(tmp_path, "bubblewrap", "python", "-c", code, limits=wide).out == b"deep\n"


SWARM = """
import os, signal
wait, go = os.pipe()
for _ in range(150):
    if os.fork() == 0:
        os.close(go)
        os.read(wait, 1)
        while True: pass
os.write(1, b"up\\n")
os.close(go)
while True: pass
"""


def seconds_to_kill_a_swarm(tmp_path: Path, cpu_milli: int) -> float:
    async def work(runtime: Any) -> float:
        share = SandboxLimits(cpu_milli=cpu_milli, memory_bytes=256 << 20, processes=200)
        loop = asyncio.get_running_loop()
        words = ("python", "-I", "-S", "-c", SWARM)  # to be up in a few seconds with a sliver, too
        job = CommandJob(words, (), (), (), share)
        sandbox = await runtime.start_command(job)
        assert await anext(sandbox.output()) == (1, b"up\n")
        began = loop.time()
        await sandbox.kill()
        took = loop.time() - began
        await sandbox.remove()
        return took

    return using("bubblewrap", tmp_path, work)


def test_a_swarm_with_a_sliver_of_the_processor_is_gone_at_once(tmp_path: Path) -> None:
    """Each has to run once more to end; under its own share that takes a minute, so the share is lifted."""
    took = []
    for _ in range(3):
        took.append(seconds_to_kill_a_swarm(tmp_path, 50))
        if took[-1] < 2:
            return
    # Others want the processor too: then no later than one that has all of it.
    assert min(took) < 5 * seconds_to_kill_a_swarm(tmp_path, 2000)


@pytest.mark.parametrize("path", ["/tmp/full", "/dev/shm/full"])
def test_a_private_folder_is_full_at_half_the_memory(path: str, tmp_path: Path) -> None:
    wide = replace(SMALL, disk_bytes=1 << 30)
    found = ran(tmp_path, "bubblewrap", "python", "-c", FILL, path, limits=wide)
    assert found.out == b"ENOSPC 48\n"


@pytest.mark.parametrize("path", ["/full", "/dev/full-one", "/etc/full", "/opt/full", "/usr/full"])
def test_nothing_else_can_be_written(path: str, tmp_path: Path) -> None:
    assert b"Read-only file system" in ran(tmp_path, "bubblewrap", "touch", path).err


def test_a_file_ends_at_the_disk_limit(tmp_path: Path) -> None:
    wide = replace(SMALL, disk_bytes=64 << 20)  # more than half of the memory
    said = ran(tmp_path, "bubblewrap", "python", "-c", FILL, "full", limits=wide).out
    assert said == b"EFBIG 64\n"


def test_a_file_between_the_disk_limit_and_half_the_memory_ends_the_task(tmp_path: Path) -> None:
    """One limit of file sizes serves the disk and `/dev/shm`: the watchdog enforces the smaller one."""
    code = f"{FILL}\nimport time\ntime.sleep(600)"
    found = ran(tmp_path, "bubblewrap", "python", "-c", code, "full")
    assert found.ended.reason is EndReason.BAD_OUTPUT
    assert "disk limit" in found.ended.detail


SPREAD = """
import itertools, time
for number in itertools.count():  # on and on, until it is noticed
    with open(f"full-{number}", "wb") as full:
        full.write(b"x" * (4 << 20))
    if number > 400:
        time.sleep(0.1)
"""
INODES = """
import itertools, time
for number in itertools.count():
    open(f"empty-{number}", "w").close()
    if number > 300_000:
        time.sleep(0.001)
"""


@pytest.mark.parametrize("code", [SPREAD, INODES], ids=["bytes", "inodes"])
def test_many_files_past_the_disk_limit_end_the_task(code: str, tmp_path: Path) -> None:
    small = replace(SMALL, disk_bytes=32 << 20)
    found = ran(tmp_path, "bubblewrap", "python", "-c", code, limits=small)
    assert found.ended.reason is EndReason.BAD_OUTPUT
    assert "disk limit" in found.ended.detail


def test_a_memory_bomb_is_ended_and_named(tmp_path: Path) -> None:
    bomb = "held = []\nwhile True: held.append(bytearray(8 << 20))"
    found = ran(tmp_path, "bubblewrap", "python", "-c", bomb)
    assert found.ended.reason is EndReason.OUT_OF_MEMORY


def test_descriptors_run_out_at_the_limit(tmp_path: Path) -> None:
    code = "import os\ntry:\n  while True: os.dup(0)\nexcept OSError as e: print(e.errno)"
    assert ran(tmp_path, "bubblewrap", "python", "-c", code).out == b"24\n"


def test_a_flood_of_output_neither_grows_nor_starves_the_agent(tmp_path: Path) -> None:
    """A gigabyte in one line; the loop's other work goes on meanwhile."""

    ticks: list[
        float
    ] = []  # of a thread beside the loop: when the machine itself stands still, so do these
    over = threading.Event()

    def tick() -> None:
        while not over.wait(0.01):
            ticks.append(time.monotonic())

    async def work(runtime: Any) -> tuple[list[tuple[float, int]], int]:
        argv = ("head", "-c", str(1 << 30), "/dev/zero")
        loop = asyncio.get_running_loop()
        beats: list[tuple[float, int]] = []  # when, and how much was read by then

        async def beat() -> None:
            while True:
                beats.append((loop.time(), size))
                await asyncio.sleep(0.01)

        size = 0
        beating = asyncio.ensure_future(beat())
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        sandbox = await runtime.start_command(CommandJob(argv, (), (), (), LIMITS))
        async for _, data in sandbox.output():
            size += len(data)
        await sandbox.remove()
        beating.cancel()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        return [*beats, (loop.time(), size)], grown

    ticking = threading.Thread(target=tick)
    ticking.start()
    try:
        beats, grown_kib = using("bubblewrap", tmp_path, work)
    finally:
        over.set()
        ticking.join()
    assert beats[-1][1] == 1 << 30
    assert grown_kib < 16 * 1024
    pauses = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(beats)]
    stood_still = max(b - a for a, b in pairwise(ticks))
    longest = max(seconds for seconds, _ in pauses)
    assert longest < 20 + stood_still  # a node may be silent for beats of 8 s
    assert max(size for _, size in pauses) < 1 << 28  # others have their turns while it is read


def test_kill_of_everyone_reaches_nobody_outside(tmp_path: Path) -> None:
    found = ran(tmp_path, "bubblewrap", "python", "-c", "import os; os.kill(-1, 9)")
    assert found.ended.exit_code != 0


def test_variables_show_in_nobodys_process_list(tmp_path: Path) -> None:
    """The control is the command line itself, which does show."""
    secret, word = "hidden-a8f3e1", "shown-b7c2d9"

    async def work(runtime: Any) -> tuple[int, int]:
        argv = ("sh", "-c", "echo up; sleep 600; :", word)
        sandbox = await runtime.start_command(CommandJob(argv, (("KEY", secret),), (), (), LIMITS))
        assert await anext(sandbox.output()) == (1, b"up\n")
        found = len(processes_with(secret)), len(processes_with(word))
        await sandbox.remove()
        return found

    hidden, shown = using("bubblewrap", tmp_path, work)
    assert hidden == 0
    assert shown > 0


def test_a_launcher_that_is_killed_takes_its_sandboxes_along_and_is_replaced(
    tmp_path: Path,
) -> None:
    async def work(runtime: Any) -> None:
        seconds = own_seconds()
        argv = ("sh", "-c", f"echo up; exec sleep {seconds}")
        sandbox = await runtime.start_command(CommandJob(argv, (), (), (), LIMITS))
        assert await anext(sandbox.output()) == (1, b"up\n")
        for pid in processes_with("launcher.py"):
            if is_child(pid):
                os.kill(pid, signal.SIGKILL)
        assert (await sandbox.ended()).exit_code == 137
        assert [rest async for rest in sandbox.output()] == []
        word = f"sleep\0{seconds}"
        await asyncio.to_thread(
            eventually, "they are gone", lambda: not processes_with(word), PATIENCE_S
        )
        await sandbox.remove()
        assert (await command(runtime, "echo", "again")).out == b"again\n"

    using("bubblewrap", tmp_path, work)


def test_a_child_kept_ready_that_is_killed_is_done_without(tmp_path: Path) -> None:
    async def work(runtime: Any) -> bytes:
        await command(runtime, "true")
        launchers = [pid for pid in processes_with("launcher.py") if is_child(pid)]
        for pid in processes_with("launcher.py"):
            if parent_of(pid) in launchers:
                os.kill(pid, signal.SIGKILL)
                await asyncio.to_thread(
                    eventually, "it is gone", lambda pid=pid: not alive(pid), PATIENCE_S
                )
        return (await command(runtime, "echo", "all the same")).out

    assert using("bubblewrap", tmp_path, work) == b"all the same\n"


def test_a_stopped_tree_that_ignores_signals_is_killed(tmp_path: Path) -> None:
    async def work(runtime: Any) -> None:
        seconds = own_seconds()
        script = f"trap '' TERM INT HUP; sleep {seconds} & kill -STOP $!; echo up; kill -STOP $$"
        sandbox = await runtime.start_command(CommandJob(("sh", "-c", script), (), (), (), LIMITS))
        assert await anext(sandbox.output()) == (1, b"up\n")
        await sandbox.kill()
        assert processes_with(f"sleep\0{seconds}") == []
        await sandbox.remove()

    using("bubblewrap", tmp_path, work)
