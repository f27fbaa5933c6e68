"""The host's fingerprint notices what an attack would leave: each change is planted once, in namespaces of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PLANT = r"""
import ctypes, json, os, socket, subprocess, sys
from fingerprint import changes, fingerprint

libc = ctypes.CDLL(None)
subprocess.run(["sh", "-c", "mount --make-rprivate / && ip link set lo up"], check=True)
subprocess.run(["mount", "-t", "tmpfs", "srv", "/srv"], check=True)
libc.syscall(250, 1, None)  # a session keyring of our own
found = {}


def noticed(name, plant, undo):
    before = fingerprint(os.getpid())
    quiet = changes(before, fingerprint(os.getpid()))
    kept = plant()
    found[name] = [quiet, changes(before, fingerprint(os.getpid()))]
    undo(kept)


def listening(family, address):
    made = socket.socket(family)
    made.bind(address)
    made.listen()
    return made


def kill(child):
    child.kill()
    child.wait()


noticed("nothing", lambda: None, lambda _: None)
noticed("a mount", lambda: subprocess.run(["mount", "-t", "tmpfs", "x", "/mnt"], check=True), lambda _: subprocess.run(["umount", "/mnt"], check=True))
noticed("a setting", lambda: open("/proc/sys/net/ipv4/ip_forward", "w").write("1"), lambda _: open("/proc/sys/net/ipv4/ip_forward", "w").write("0"))
noticed("a process", lambda: subprocess.Popen(["sleep", "60"]), kill)
noticed("an orphan", lambda: subprocess.run(["sh", "-c", "sleep 61 & echo $!"], stdout=subprocess.PIPE, text=True, check=True).stdout, lambda pid: (os.kill(int(pid), 9), os.waitpid(int(pid), 0)))
noticed("a file", lambda: open("/srv/left", "w").close(), lambda _: os.unlink("/srv/left"))
noticed("a listener", lambda: listening(socket.AF_INET, ("127.0.0.1", 0)), lambda made: made.close())
noticed("an abstract socket", lambda: listening(socket.AF_UNIX, "\0left-behind"), lambda made: made.close())
noticed("a packet socket", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 768), lambda made: made.close())
noticed("a segment", lambda: libc.shmget(77, 4096, 0o1600), lambda number: libc.shmctl(number, 0, None))
noticed("a key", lambda: libc.syscall(248, b"user\0", b"left-behind\0", b"x", 1, ctypes.c_long(-3)), lambda key: libc.syscall(250, 9, key, ctypes.c_long(-3)))
noticed("a name", lambda: socket.sethostname("taken-over"), lambda _: socket.sethostname("before"))
sys.stdout.write(json.dumps(found))
"""
NAMES = ("mount", "setting", "process", "orphan", "file", "listener", "abstract socket", "packet socket", "segment", "key", "name")


@pytest.fixture(scope="module")
def found(require: Callable[[str], None]) -> dict[str, tuple[list[str], list[str]]]:
    require("network namespaces")
    reap = "import ctypes; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n"
    ran = subprocess.run(
        ["unshare", "--net", "--mount", "--ipc", "--uts", sys.executable, "-c", reap + PLANT],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    said: dict[str, tuple[list[str], list[str]]] = json.loads(ran.stdout)
    return said


def test_two_looks_at_the_same_host_are_the_same(found: dict[str, tuple[list[str], list[str]]]) -> None:
    assert found["nothing"] == [[], []]


@pytest.mark.parametrize("name", NAMES)
def test_a_planted_change_is_noticed(name: str, found: dict[str, tuple[list[str], list[str]]]) -> None:
    quiet, noticed = next(pair for key, pair in found.items() if key.split(" ", 1)[-1] == name)
    assert quiet == []
    assert noticed
