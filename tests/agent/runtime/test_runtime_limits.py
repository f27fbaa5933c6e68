"""Limits that a training job meets, in every runtime: open files, file size, shared and locked memory, ways to start processes."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpool.agent.runtime import cgroups
from gpool.agent.runtime.protocol import SandboxLimits
from tests.tools.runtimes import LIMITS, MAKERS, command, using

OWN_SHM = ("bubblewrap", "docker", "podman", "gvisor", "microvm")
every_real = pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind != "fake"])
PROBE = """
import ctypes, json, mmap, os, resource, sys
disk, files, locked = map(int, sys.argv[1:])
names = ("CORE", "NOFILE", "FSIZE", "MEMLOCK", "STACK")
told = {name: resource.getrlimit(getattr(resource, "RLIMIT_" + name)) for name in names}
room = os.statvfs("/dev/shm")
told["shm"] = room.f_blocks * room.f_frsize
with open("large", "wb") as large:
    large.truncate(disk)
    told["large"] = os.fstat(large.fileno()).st_size
os.unlink("large")
held = [os.open("/dev/null", os.O_RDONLY) for _ in range(files)]
told["held"] = len(held)
page = mmap.mmap(-1, locked)
libc = ctypes.CDLL(None, use_errno=True)
at = ctypes.addressof(ctypes.c_char.from_buffer(page))
told["locked"] = libc.mlock(ctypes.c_void_p(at), ctypes.c_size_t(locked)) == 0
print(json.dumps(told))
"""
STARTS = """
import multiprocessing
for method in ("fork", "spawn", "forkserver"):
    with multiprocessing.get_context(method).Pool(2) as workers:
        print(method, workers.map(abs, [-1, -2]))
"""
HARD_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
LOCKED = 4 << 20


def attained(kind: str) -> dict[int, int]:
    if kind == "microvm":  # its own kernel: nothing of the host's limits
        return {resource.RLIMIT_NOFILE: LIMITS.open_files}
    return dict(cgroups.rlimits(LIMITS))


@every_real
def test_a_training_job_finds_the_limits_of_a_bare_machine(kind: str, tmp_path: Path) -> None:
    opened = min(attained(kind)[resource.RLIMIT_NOFILE] - 100, 4000)
    words = ("python3", "-c", PROBE, str(LIMITS.disk_bytes), str(opened), str(LOCKED))
    ran = using(kind, tmp_path, lambda runtime: command(runtime, *words))
    assert ran.ended.exit_code == 0, ran.err
    told = json.loads(ran.out)
    assert told["CORE"] == [0, 0]
    assert told["NOFILE"] == [attained(kind)[resource.RLIMIT_NOFILE]] * 2
    assert told["STACK"][0] == resource.RLIM_INFINITY or told["STACK"][0] >= 8 << 20
    assert (told["large"], told["held"], told["locked"]) == (LIMITS.disk_bytes, opened, True)
    if kind in OWN_SHM:
        assert told["shm"] == LIMITS.memory_bytes // 2


@pytest.mark.parametrize("kind", ["bubblewrap", "docker", "gvisor"])
def test_processes_are_forked_spawned_and_served(kind: str, tmp_path: Path) -> None:
    ran = using(kind, tmp_path, lambda runtime: command(runtime, "python3", "-c", STARTS))
    assert ran.out == b"fork [1, 2]\nspawn [1, 2]\nforkserver [1, 2]\n", ran.err


def test_no_limit_is_above_the_one_this_agent_may_set() -> None:
    found = dict(cgroups.rlimits(replace(LIMITS, open_files=64)))
    assert found[resource.RLIMIT_NOFILE] == 64
    usual = dict(cgroups.rlimits(LIMITS))
    assert usual[resource.RLIMIT_NOFILE] == 65_536 or usual[resource.RLIMIT_NOFILE] == HARD_FILES
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] == HARD_FILES  # the agent keeps its own


SHARED = """
import os
with open("/dev/shm/store", "wb") as store:
    store.truncate(40 << 20)
    store.seek((40 << 20) - 1)
    store.write(b"x")
print(os.stat("/dev/shm/store").st_size >> 20)
"""


def test_a_file_in_shared_memory_may_be_larger_than_the_disk(tmp_path: Path) -> None:
    small = SandboxLimits(cpu_milli=1000, memory_bytes=96 << 20, disk_bytes=8 << 20)

    async def work(runtime: Any) -> tuple[bytes, bytes]:
        ran = await command(runtime, "python", "-c", SHARED, limits=small)
        return ran.out, ran.err

    assert using("bubblewrap", tmp_path, work) == (b"40\n", b"")
