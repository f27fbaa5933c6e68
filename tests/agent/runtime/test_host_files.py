"""Files of the host that a sandbox reads: its locks do not reach them, and its mount table does not name them."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

import gpool
from gpool.agent.runtime.bubblewrap.launcher_client import Bind, Launcher, LaunchOrder
from gpool.agent.runtime.protocol import ENVIRONMENT_AT, CommandJob, PreparedEnvironment
from tests.tools.runtimes import LIMITS, caller, command, using

RUNNER = Path(gpool.__file__).parent / "agent" / "runner" / "serve.py"
INSIDE = "/opt/gpool/runner/serve.py"
ISOLATED = ("bubblewrap", "docker", "podman", "gvisor", "microvm")


def locking() -> Callable[[str], None]:
    """Return a function for a runner, pickled by value: it locks a file until its process ends."""

    def lock(path: str) -> None:
        import fcntl  # noqa: PLC0415 - runs in the sandbox
        import os  # noqa: PLC0415

        fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)

    return lock


def is_free(path: Path) -> bool:
    """Take and release the exclusive lock of a file of the host."""
    held = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(held)
    return True


async def is_free_beside(runtime: Any, inside: str, outside: Path) -> bool:
    """Return whether the host can lock a file that a runner, and then a second one, has locked."""
    first, second = await caller(runtime), await caller(runtime)
    try:
        for each in (first, second):
            answer = await each.call(locking(), inside)
            assert answer.value is not None, answer
            assert pickle.loads(answer.value) is None
            if not is_free(outside):
                return False
    finally:
        await first.runner.remove()
        await second.runner.remove()
    return True


@pytest.mark.parametrize("kind", ISOLATED)
def test_a_lock_in_a_sandbox_reaches_neither_the_host_nor_other_sandboxes(
    kind: str, tmp_path: Path
) -> None:
    assert using(kind, tmp_path, lambda runtime: is_free_beside(runtime, INSIDE, RUNNER))


def test_a_lock_without_isolation_reaches_the_host(tmp_path: Path) -> None:
    """The control."""
    assert not using(
        "process", tmp_path, lambda runtime: is_free_beside(runtime, str(RUNNER), RUNNER)
    )


async def _held_by_a_command(runtime: Any, job: CommandJob, free: Callable[[], bool]) -> bool:
    sandbox = await runtime.start_command(job)
    try:
        async for _, data in sandbox.output():
            assert data == b"locked\n"
            return free()
    finally:
        await sandbox.kill()
        await sandbox.remove()
    raise AssertionError("the command ended")


@pytest.mark.parametrize("with_environment", [False, True])
def test_a_lock_on_a_program_or_an_environment_is_the_sandboxs_own(
    with_environment: bool, tmp_path: Path
) -> None:
    environment = tmp_path / "environment"
    environment.mkdir(mode=0o755)
    held = environment / "held" if with_environment else Path(sys.executable).resolve()
    if with_environment:
        held.write_text("")
    inside = f"{ENVIRONMENT_AT}/held" if with_environment else "$(readlink -f $(which python3))"
    script = f"exec 9< {inside}; flock -n -x 9 && echo locked && exec sleep 1000"
    found = PreparedEnvironment("pip:x", environment, f"{ENVIRONMENT_AT}/bin/python")
    job = CommandJob(
        ("sh", "-c", script), (), (), (), LIMITS, environment=found if with_environment else None
    )
    assert using(
        "bubblewrap",
        tmp_path / "agent",
        lambda runtime: _held_by_a_command(runtime, job, lambda: is_free(held)),
    )


@pytest.mark.parametrize("kind", ["bubblewrap", "docker", "podman", "gvisor"])
def test_the_mount_table_names_only_the_work_directory_of_the_host(
    kind: str, tmp_path: Path
) -> None:
    """The kernel names the origin of a bind mount; `/work` must be one, to be on the agent's disk."""
    ran = using(kind, tmp_path, lambda runtime: command(runtime, "cat", "/proc/self/mountinfo"))
    table = ran.out.decode()
    places = {str(RUNNER.parents[2]), str(Path(sys.prefix)), str(Path(sys.base_prefix).resolve())}
    places -= {"/usr"}  # prefix of the system's Python, on every host
    assert [place for place in places if place in table] == []
    own = [line.split()[3] for line in table.splitlines() if str(tmp_path) in line]
    assert all("/sandboxes/" in path or "/containers/" in path for path in own), own


@pytest.mark.parametrize("kind", ["bubblewrap", "docker", "podman", "gvisor"])
def test_the_kernels_command_line_is_not_the_hosts(kind: str, tmp_path: Path) -> None:
    ran = using(kind, tmp_path, lambda runtime: command(runtime, "cat", "/proc/cmdline"))
    assert Path("/proc/cmdline").read_bytes() not in (ran.out, b"")


async def warnings_for(source: Path, place: Path) -> list[str]:
    """Folders that a launcher with this read-only bind reports as shared with the host."""
    launcher = Launcher(place=str(place), binds=(Bind(source, "it"),), seccomp=b"")
    with capture_logs() as logs:
        descriptors = [os.open(os.devnull, os.O_RDWR) for _ in range(3)]
        started = await launcher.start(LaunchOrder("process", ("/bin/true",), descriptors))
        assert (await started.exited()).code == 0
        await launcher.close()
    return [folder for each in logs if each["event"] == "no_overlay" for folder in each["folders"]]


def test_a_folder_without_overlay_is_reported(
    tmp_path: Path, require: Callable[[str], None]
) -> None:
    """The control: a folder in memory, which an overlay can show."""
    require("network namespaces")  # root, who makes namespaces
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as plain:
        assert asyncio.run(warnings_for(Path("/proc"), tmp_path / "a")) == [f"{tmp_path}/a/it"]
        assert asyncio.run(warnings_for(Path(plain), tmp_path / "b")) == []
