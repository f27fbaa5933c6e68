"""The walls behind the mounts: Landlock, a reduced /proc, weights and rates of control groups. Each with its control."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpool.agent.runtime import cgroups
from gpool.agent.runtime.bubblewrap import seccomp
from gpool.agent.runtime.protocol import CommandJob, SandboxLimits
from gpool.core.model import Gpu, Slice
from tests.tools.runtimes import LIMITS, command, using

needs_landlock = pytest.mark.skipif(
    not seccomp.landlock_version() or not seccomp.perl(),
    reason="this kernel or host has no Landlock wall",
)
SIGNAL_FIRST = "import os; os.kill(1, 0); print('reached')"


def walled(words: Sequence[str], known: int, variables: str = "PATH=/usr/bin:/bin") -> Any:
    """The command as the wall starts it, outside of any sandbox."""
    reading, writing = os.pipe()
    os.write(writing, variables.encode())
    os.close(writing)
    line = [*seccomp.command(reading, 0, known), *words]
    done = subprocess.run(line, pass_fds=(reading,), env={}, capture_output=True, check=False)
    os.close(reading)
    return done


@needs_landlock
def test_the_wall_stands_without_any_mount(tmp_path: Path) -> None:
    """What lies outside of the open folders can be read and not written; without a domain it can."""
    for known, code in ((seccomp.landlock_version(), 1), (0, 0)):
        with subprocess.Popen(["mktemp", "-d", "-p", "/var/tmp"], stdout=subprocess.PIPE) as made:
            assert made.stdout is not None
            folder = Path(made.stdout.read().decode().strip())
        try:
            (folder / "note").write_text("read me")
            assert walled(["touch", str(folder / "new")], known).returncode == code
            assert walled(["rm", str(folder / "note")], known).returncode == code
            assert walled(["cat", "/etc/hostname"], known).returncode == 0
            assert walled(["touch", str(tmp_path / "new")], known).returncode == 0  # below /tmp
        finally:
            for left in folder.iterdir():
                left.unlink()
            folder.rmdir()


@needs_landlock
@pytest.mark.parametrize("known", range(1, 8))
def test_the_wall_knows_older_kernels(known: int) -> None:
    if known > seccomp.landlock_version():
        pytest.skip("this kernel is older")
    assert walled(["true"], known).returncode == 0
    handled, given = seccomp.rules(known)
    assert all(rights & ~handled == 0 for _, rights in given)


@needs_landlock
def test_nothing_of_a_tasks_variables_reaches_the_wall() -> None:
    hostile = "PERL5OPT=-Mnone\0LD_PRELOAD=/nowhere.so\0PATH=/usr/bin:/bin\0EMPTY=\0TWO=a=b\nc"
    done = walled(["env", "-0"], seccomp.landlock_version(), hostile)
    assert done.returncode == 0
    assert sorted(done.stdout.strip(b"\0").split(b"\0")) == sorted(hostile.encode().split(b"\0"))


@needs_landlock
def test_a_command_that_is_missing_or_no_program_is_told_apart(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("no program")
    assert walled(["no-such-program"], 1).returncode == 127
    assert walled([str(plain)], 1).returncode == 126
    script = tmp_path / "script"
    script.write_text("exit 7")  # without a first line: a shell's
    script.chmod(0o755)
    assert walled([str(script)], 1).returncode == 7


@needs_landlock
def test_a_task_cannot_signal_its_namespaces_first_process(tmp_path: Path) -> None:
    async def with_wall(runtime: Any) -> Any:
        assert runtime.landlock == seccomp.landlock_version()
        return await command(runtime, "python", "-c", SIGNAL_FIRST)

    async def without(runtime: Any) -> Any:
        runtime.landlock = 0
        return await command(runtime, "python", "-c", SIGNAL_FIRST)

    known_scopes = seccomp.landlock_version() >= seccomp.SCOPES_FROM
    refused = using("bubblewrap", tmp_path / "a", with_wall)
    assert (b"PermissionError" in refused.err) is known_scopes
    assert using("bubblewrap", tmp_path / "b", without).out == b"reached\n"


@pytest.mark.parametrize("name", ["cmdline", "kallsyms", "keys", "key-users", "timer_list"])
def test_telling_files_of_proc_are_masked(name: str, tmp_path: Path) -> None:
    if not os.path.exists(f"/proc/{name}"):
        pytest.skip("this kernel has none")
    if os.geteuid() == 0:
        with open(f"/proc/{name}", "rb") as shown:
            assert shown.read(1)
    ran = using("bubblewrap", tmp_path, lambda r: command(r, "cat", f"/proc/{name}"))
    assert (ran.ended.exit_code, ran.out) == (1, b"")


def test_the_counters_of_interrupts_are_hidden_and_processors_are_counted(tmp_path: Path) -> None:
    """The control is the host's own file."""

    def counted(text: str, name: str) -> bool:
        line = next(line for line in text.splitlines() if line.startswith(f"{name} "))
        return any(int(number) for number in line.split()[1:])

    shown = using("bubblewrap", tmp_path, lambda r: command(r, "cat", "/proc/stat")).out.decode()
    host = Path("/proc/stat").read_text()
    for name in ("intr", "softirq", "ctxt"):
        assert counted(host, name)
        assert not counted(shown, name)
    assert shown.count("cpu") == host.count("cpu")
    assert counted(shown, "btime")


WATCH = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
watch = libc.inotify_init()
if watch < 0 or libc.inotify_add_watch(watch, sys.argv[1].encode(), 0x20) < 0:
    sys.exit(os.strerror(ctypes.get_errno()))
print("watches")
"""


def test_a_task_cannot_watch_the_use_of_the_hosts_files(tmp_path: Path) -> None:
    words = ("python3", "-c", WATCH, "/usr/bin")
    ran = using("bubblewrap", tmp_path, lambda r: command(r, *words))
    assert (ran.ended.exit_code, ran.out) == (1, b"")
    assert b"not implemented" in ran.err
    control = subprocess.run(words, capture_output=True, check=True)
    assert control.stdout == b"watches\n"


@pytest.mark.parametrize("path", ["self/oom_score_adj", "sys/kernel/shmmax", "sysrq-trigger"])
def test_proc_cannot_be_written(path: str, tmp_path: Path) -> None:
    ran = using("bubblewrap", tmp_path, lambda r: command(r, "sh", "-c", f"echo 1 > /proc/{path}"))
    assert ran.ended.exit_code != 0


@pytest.mark.parametrize("path", ["meminfo", "cpuinfo", "self/status", "stat", "mounts"])
def test_what_libraries_read_of_proc_is_there(path: str, tmp_path: Path) -> None:
    ran = using("bubblewrap", tmp_path, lambda r: command(r, "cat", f"/proc/{path}"))
    assert ran.ended.exit_code == 0
    assert ran.out


def test_a_task_without_a_gpu_sees_no_sys(tmp_path: Path) -> None:
    ran = using("bubblewrap", tmp_path, lambda r: command(r, "ls", "-A", "/sys"))
    assert b"No such file" in ran.err


def test_a_task_with_a_gpu_sees_of_sys_what_cuda_reads_and_no_more(tmp_path: Path) -> None:
    """The GPU is claimed to be real; there need be none."""
    gpu = Gpu(0, "GPU-claimed", "A100", "nvidia", 1 << 30)

    async def work(runtime: Any) -> bytes:
        runtime.use_gpus([gpu])
        script = "cd /sys && ls devices/system/cpu | grep -c . && find . -maxdepth 2; touch x"
        job = CommandJob(("sh", "-c", script), (), (), (Slice(0, 1 << 30, 1000),), LIMITS)
        sandbox = await runtime.start_command(job)
        said = b"".join([data async for _, data in sandbox.output()])
        await sandbox.remove()
        return said

    first, *rest = using("bubblewrap", tmp_path, work).decode().splitlines()
    assert int(first) > 1
    assert "Read-only file system" in rest.pop()
    tops = {"./bus", "./devices", "./module"}
    assert {line for line in rest if line.count("/") == 1} <= tops
    assert os.path.exists("/sys/kernel")  # the control: the host has more


PARALLEL = """
import concurrent.futures, multiprocessing, os, pty, queue, socket, sqlite3, subprocess, threading
if __name__ == "__main__":
    with multiprocessing.Pool(2) as pool:
        assert pool.map(abs, [-1, -2]) == [1, 2]
    with multiprocessing.Manager() as manager:
        assert list(manager.list([1])) == [1]
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert list(threads.map(abs, [-3])) == [3]
    for family in (socket.AF_INET, socket.AF_INET6):
        with socket.create_server(("localhost" if family == socket.AF_INET else "::1", 0), family=family) as server:
            with socket.create_connection(server.getsockname()[:2]) as client:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    a, b = socket.socketpair()
    one, two = pty.openpty()
    assert os.isatty(two)
    assert subprocess.run("echo hi | cat", shell=True, capture_output=True).stdout == b"hi\\n"
    with sqlite3.connect("some.db") as db:
        db.execute("pragma journal_mode=wal")
        db.execute("create table t (x)")
    os.rename("some.db", "other.db")
    os.mkdir("d"); os.rename("other.db", "d/other.db"); os.link("d/other.db", "linked")
    os.truncate("linked", 10)
    with open("/dev/null", "w") as null: null.write("x")
    open("run.sh", "w").write("#!/bin/sh\\nexit 3\\n"); os.chmod("run.sh", 0o755)
    assert subprocess.run(["./run.sh"]).returncode == 3
    print("fine")
"""


def test_what_honest_programs_do_goes_on_working(tmp_path: Path) -> None:
    script = ["sh", "-c", 'cat > p.py <<"EOF"\n' + PARALLEL + "\nEOF\npython p.py"]
    ran = using("bubblewrap", tmp_path, lambda r: command(r, *script))
    assert (ran.out, ran.err) == (b"fine\n", b"")


@pytest.mark.parametrize("module", ["numpy", "torch"])
def test_what_a_node_has_of_the_large_libraries_imports(module: str, tmp_path: Path) -> None:
    if subprocess.run([sys.executable, "-c", f"import {module}"], check=False).returncode:
        pytest.skip(f"{module} is not installed here")
    big = replace(LIMITS, memory_bytes=4 << 30)
    code = f"import {module} as m; print(float(m.ones((500, 500)).sum()))"
    ran = using("bubblewrap", tmp_path, lambda r: command(r, "python", "-c", code, limits=big))
    assert ran.out == b"250000.0\n", ran.err


# ---- control groups


@pytest.mark.parametrize(
    ("version", "controller", "name", "value"),
    [
        (1, "cpu", "cpu.shares", "512"),
        (1, "cpu", "cpu.cfs_quota_us", "50000"),
        (1, "blkio", "blkio.throttle.read_bps_device", "8:0 1000000"),
        (1, "blkio", "blkio.throttle.write_bps_device", "8:0 1000000"),
        (2, "cpu", "cpu.weight", "50"),
        (2, "cpu", "cpu.max", "50000 100000"),
        (2, "io", "io.max", "8:0 rbps=1000000 wbps=1000000"),
    ],
)
def test_a_group_is_told_weights_and_rates(
    version: int, controller: str, name: str, value: str, tmp_path: Path
) -> None:
    hierarchy = cgroups.CgroupHierarchy(version, ((controller, tmp_path),))
    group = cgroups.ControlGroup(hierarchy, "one", disk="8:0")
    group.limit(SandboxLimits(500, 1 << 20, io_bytes_per_s=1_000_000))
    assert (tmp_path / "one" / name).read_text() == value


def test_a_group_that_is_uncap_cpu_is_limited_again_for_the_next(tmp_path: Path) -> None:
    for version, name, free, held in (
        (1, "cpu.cfs_quota_us", "-1", "50000"),
        (2, "cpu.max", "max 100000", "50000 100000"),
    ):
        group = cgroups.ControlGroup(
            cgroups.CgroupHierarchy(version, (("cpu", tmp_path),)), f"v{version}"
        )
        path = tmp_path / f"v{version}" / name
        group.limit(SandboxLimits(500, 1 << 20))
        group.uncap_cpu()
        assert path.read_text() == free
        group.limit(SandboxLimits(500, 1 << 20))
        assert path.read_text() == held


def test_a_rate_that_is_no_more_asked_for_is_taken_back(tmp_path: Path) -> None:
    for version, controller, name, free in (
        (1, "blkio", "blkio.throttle.read_bps_device", "8:0 0"),
        (2, "io", "io.max", "8:0 rbps=max wbps=max"),
    ):
        hierarchy = cgroups.CgroupHierarchy(version, ((controller, tmp_path),))
        group = cgroups.ControlGroup(hierarchy, f"v{version}", disk="8:0")
        group.limit(SandboxLimits(500, 1 << 20, io_bytes_per_s=5))
        group.limit(SandboxLimits(500, 1 << 20))
        assert (tmp_path / f"v{version}" / name).read_text() == free


def test_the_disk_of_a_partition_is_the_whole_one(tmp_path: Path) -> None:
    number = tmp_path.stat().st_dev
    disk = tmp_path / "disk"
    part = disk / "part"
    part.mkdir(parents=True)
    (disk / "dev").write_text("8:0\n")
    (part / "partition").write_text("1\n")
    entries = tmp_path / "entries"
    entries.mkdir()
    assert cgroups.disk_of(tmp_path, entries) == ""
    (entries / f"{os.major(number)}:{os.minor(number)}").symlink_to(part)
    assert cgroups.disk_of(tmp_path, entries) == "8:0"


def test_the_rate_of_the_disk_holds(tmp_path: Path) -> None:
    """Direct writes of 4 MB at 2 MB/s take two seconds; without a rate they do not."""
    probe = cgroups.find(
        Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text()
    )
    if not probe.controllers & {"io", "blkio"} or not cgroups.disk_of(tmp_path):
        pytest.skip("no rate can be set here")
    code = (
        "import os, mmap, time\n"
        "f = os.open('x', os.O_CREAT | os.O_WRONLY | os.O_DIRECT)\n"
        "page = mmap.mmap(-1, 1 << 20)\n"
        "began = time.perf_counter()\n"
        "for _ in range(4): os.write(f, page)\n"
        "print(time.perf_counter() - began)"
    )
    slow = replace(LIMITS, io_bytes_per_s=2 << 20)
    *free, held = [
        float(
            using(
                "bubblewrap",
                tmp_path / str(at),
                lambda r, limits=limits: command(r, "python", "-c", code, limits=limits),
            ).out
        )
        for at, limits in enumerate((LIMITS, LIMITS, LIMITS, slow))
    ]
    assert held > 1.4
    assert min(free) < held


def test_the_machine_is_one_the_wall_knows() -> None:
    assert platform.machine() in seccomp.PRLIMIT
