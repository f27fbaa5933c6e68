"""Sandboxes that a root agent's launcher makes ahead: used once, few, gone with the agent, and as isolated as bwrap's."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpool.agent.runtime.protocol import ENVIRONMENT_AT, CommandJob, PreparedEnvironment
from tests.tools.processes import alive, eventually
from tests.tools.runtimes import LIMITS, PATIENCE_S, command, processes_with, using

BY_BWRAP = "bubblewrap's wheel"  # every sandbox is started by bwrap
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
LOOK = f"""
import json, os
print(json.dumps({{name: os.readlink("/proc/self/ns/" + name) for name in {NAMESPACES!r}}}))
print(os.listdir("/tmp"), os.listdir("/dev/shm"), os.listdir("/work"))
for place in ("/tmp", "/dev/shm", "/work"): open(place + "/left", "w").write("behind")
"""
FACTS = """
import json, os, resource, socket, stat
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
first = dict(line.split(":", 1) for line in open("/proc/1/status"))
wanted = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
mounts = {}
for line in open("/proc/self/mountinfo"):
    words = line.split()
    mounts[words[4]] = [words[line.split().index("-") + 1], "ro" in words[5].split(","), "nosuid" in words[5]]
def kind(path):
    facts = os.lstat(path)
    return [stat.S_IFMT(facts.st_mode), facts.st_rdev]
def refused(path, mode):
    try:
        open(path, mode).close()
    except OSError as error:
        return error.errno
def empty(folder):
    return [os.statvfs(folder).f_blocks * os.statvfs(folder).f_frsize, oct(os.stat(folder).st_mode), os.stat(folder).st_uid]
print(json.dumps({
    "own": {name: status[name].split() for name in wanted},
    "first": {name: first[name].split() for name in wanted},
    "mounts": mounts,
    "devices": {name: kind("/dev/" + name) for name in sorted(os.listdir("/dev"))},
    "root": sorted(os.listdir("/")),
    "host": [socket.gethostname(), sorted(name for _, name in socket.if_nameindex())],
    "ids": [os.getuid(), os.getgid(), os.getgroups(), os.getsid(0) == 1, os.umask(0)],
    "limits": [resource.getrlimit(number) for number in range(16)],
    "variables": dict(os.environ),
    "folders": {name: empty(name) for name in ("/tmp", "/dev/shm", "/work")},
    "stat": open("/proc/stat").read(),
    "refused": {path: refused(path, mode) for path, mode in (
        ("/proc/kcore", "rb"), ("/proc/cmdline", "rb"), ("/proc/sysrq-trigger", "w"), ("/dev/new", "w"),
        ("/proc/sys/kernel/core_pattern", "w"), ("/new", "w"), ("/usr/new", "w"), ("/proc/1/mem", "rb"))},
    "pids": sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()),
    "descriptors": sorted(os.listdir("/proc/self/fd")),
}))
"""


@pytest.fixture(autouse=True)
def as_root(require: Callable[[str], None]) -> None:
    require("root")


def launchers() -> list[int]:
    mine = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()
    return [int(pid) for pid in mine.split() if int(pid) in processes_with("launcher.py")]


def kept(launcher: int) -> list[int]:
    """Children of the launcher that are in a process namespace of their own."""
    found = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    own = os.readlink("/proc/self/ns/pid")
    return [int(pid) for pid in found if os.readlink(f"/proc/{pid}/ns/pid") != own]


def groups_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cgroup").read_text()


def test_each_sandbox_has_namespaces_and_files_of_its_own(tmp_path: Path) -> None:
    async def work(runtime: Any) -> list[bytes]:
        return [(await command(runtime, "python", "-c", LOOK)).out for _ in range(3)]

    seen = [out.decode().splitlines() for out in using("bubblewrap", tmp_path, work)]
    assert [files for _, files in seen] == ["[] [] []"] * 3
    hosts = {name: os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES}
    for name in NAMESPACES:
        ids = [json.loads(line)[name] for line, _ in seen]
        assert hosts[name] not in ids
    made = [tuple(json.loads(line).values()) for line, _ in seen]
    assert len({*made}) == 3


def test_one_sandbox_a_slot_is_kept_ready_and_none_outlives_the_agent(tmp_path: Path) -> None:
    ready: list[int] = []

    async def work(runtime: Any) -> None:
        await asyncio.gather(*(command(runtime, "true") for _ in range(3)))
        await command(runtime, "true")
        (launcher,) = launchers()
        await asyncio.to_thread(
            eventually, "one a slot", lambda: len(kept(launcher)) == 3, PATIENCE_S
        )
        ready.extend(kept(launcher))
        groups = [groups_of(pid) for pid in ready]
        assert len({*groups}) == 3 or not runtime.tells_apart

    using("bubblewrap", tmp_path, work)
    assert len(ready) == 3
    assert not any(alive(pid) for pid in ready)


def test_a_sandbox_made_ahead_is_as_isolated_as_one_of_bwrap(tmp_path: Path) -> None:
    """Differences are listed: each makes the sandbox made ahead stricter or is without effect."""
    prepared, by_bwrap = (
        json.loads(using(kind, tmp_path / kind, facts_of).out) for kind in ("bubblewrap", BY_BWRAP)
    )
    nodes = {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty")}
    assert nodes <= by_bwrap["mounts"].keys()  # bound from the host; the other's are its own
    for each in nodes:
        del by_bwrap["mounts"][each]
    for found in (prepared, by_bwrap):
        for mount in found["mounts"].values():
            assert mount[2], f"a mount allows set-user-ID programs: {found['mounts']}"
        # masks come from devtmpfs and a file of the disk, or from the sandbox's own /dev
        found["mounts"] = {
            at: mount[1] if at.startswith("/proc/") else mount[:2]
            for at, mount in found["mounts"].items()
        }
    assert prepared == by_bwrap


async def facts_of(runtime: Any) -> Any:
    variables = (("KEY", "a=b\nc"), ("EMPTY", ""))
    await command(runtime, "true")
    return await command(runtime, "python", "-c", FACTS, env=variables)


def test_the_first_process_shows_nothing_of_the_launcher(tmp_path: Path) -> None:
    """It is a fork of the launcher, whose memory holds the orders of other sandboxes."""
    script = (
        "cat /proc/1/cmdline /proc/1/comm; for name in mem environ maps exe root fd/0; do "
        "cat /proc/1/$name >/dev/null 2>&1 && echo read $name; done; cat /proc/self/environ >/dev/null && echo control"
    )
    ran = using("bubblewrap", tmp_path, lambda runtime: command(runtime, "sh", "-c", script))
    assert ran.out.replace(b"\0", b"") == b"initinit\ncontrol\n"


def test_a_slot_serves_both_kinds_of_sandboxes(tmp_path: Path) -> None:
    folder = tmp_path / "environment"
    folder.mkdir(mode=0o755)
    (folder / "note").write_text("found\n")
    environment = PreparedEnvironment("pip:x", folder, f"{ENVIRONMENT_AT}/bin/python")
    argv = ("sh", "-c", f"cat {ENVIRONMENT_AT}/note || echo none")

    async def work(runtime: Any) -> list[bytes]:
        said = []
        for chosen in (None, environment, None, environment, environment, None, None):
            job = CommandJob(argv, (), (), (), LIMITS, environment=chosen)
            sandbox = await runtime.start_command(job)
            said.append(b"".join([data async for stream, data in sandbox.output() if stream == 1]))
            await sandbox.remove()
        return said

    with_it, without = b"found\n", b"none\n"
    expected = [without, with_it, without, with_it, with_it, without, without]
    assert using("bubblewrap", tmp_path / "agent", work) == expected


def test_a_missing_program_a_bad_one_and_a_script_are_told_apart(tmp_path: Path) -> None:
    script = "printf 'exit 7' > script; printf data > plain; chmod 755 script; ./script; exit $?"

    async def work(runtime: Any) -> list[int]:
        codes = [
            (await command(runtime, name)).ended.exit_code for name in ("no-such", "/etc/passwd")
        ]
        ran = await command(runtime, "sh", "-c", script)
        return [*codes, ran.ended.exit_code]

    assert using("bubblewrap", tmp_path, work) == [127, 126, 7]
