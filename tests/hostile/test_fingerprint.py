"""The host's fingerprint notices what an attack would leave: each change is planted once, in namespaces of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.alone  # keys and files are the whole host's: others' are noticed too
ROOT = Path(__file__).parents[2]
PLANT = r"""
import ctypes, json, os, socket, subprocess, sys
from tests.hostile.fingerprint import changes, fingerprint, steady_look
from tests.hostile.stage import leave_others

libc = ctypes.CDLL(None)
subprocess.run(["sh", "-c", "mount --make-rprivate / && ip link set lo up"], check=True)
subprocess.run(["mount", "-t", "tmpfs", "srv", "/srv"], check=True)
libc.syscall(250, 1, None)  # a session keyring of our own


def listening(family, address):
    made = socket.socket(family)
    made.bind(address)
    made.listen()
    return made


leave_others()
before = steady_look(os.getpid())
quiet = changes(before, fingerprint(os.getpid()))
subprocess.run(["mount", "-t", "tmpfs", "x", "/mnt"], check=True)
forward = "/proc/sys/net/ipv4/ip_forward"
other = "10"[int(open(forward).read())]  # a namespace begins with its host's
with open(forward, "w") as setting:
    setting.write(other)
child = subprocess.Popen(["sleep", "600"])
orphan = int(subprocess.run(["sh", "-c", "sleep 601 >&2 & echo $!"], stdout=subprocess.PIPE, check=True).stdout)
while not open(f"/proc/{orphan}/cmdline").read().startswith("sleep"):
    os.sched_yield()  # the shell's fork becomes it
open("/srv/left-behind", "w").close()
held = [
    listening(socket.AF_INET, ("127.0.0.1", 0)),
    listening(socket.AF_UNIX, "\0left-behind"),
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 768),
]
segment = libc.shmget(77, 4096, 0o1600)
libc.syscall(248, b"user\0", b"left-behind\0", b"x", 1, ctypes.c_long(-3))
socket.sethostname("taken-over")
noticed = changes(before, fingerprint(os.getpid()))
libc.shmctl(segment, 0, None)
for pid in (child.pid, orphan):
    os.kill(pid, 9)
    os.waitpid(pid, 0)
sys.stdout.write(json.dumps([quiet, noticed]))
"""
SIGNS = {
    "a mount": "new: mount /mnt",
    "a setting": "changed: setting /proc/sys/net/ipv4/ip_forward",
    "a process": "sleep\x00600",
    "an orphan": "sleep\x00601",
    "a file": "new: file /srv/left-behind",
    "a listener": "new: net/tcp 0100007F",
    "an abstract socket": "@left-behind",
    "a packet socket": "new: net/packet",
    "a segment": "new: sysvipc/shm 77",
    "a key": "new: keys",
    "a name": "changed: host name",
}


@pytest.fixture(scope="module")
def found(require: Callable[[str], None]) -> tuple[list[str], list[str]]:
    require("network namespaces")
    reap = "import ctypes; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n"
    ran = subprocess.run(
        ["unshare", "--net", "--mount", "--ipc", "--uts", sys.executable, "-c", reap + PLANT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    quiet, noticed = json.loads(ran.stdout)
    return quiet, noticed


def test_two_looks_at_the_same_host_are_the_same(found: tuple[list[str], list[str]]) -> None:
    assert found[0] == []


@pytest.mark.parametrize("name", SIGNS)
def test_a_planted_change_is_noticed(name: str, found: tuple[list[str], list[str]]) -> None:
    assert any(SIGNS[name] in line for line in found[1])
