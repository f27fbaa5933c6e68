"""A host of its own for the hostile suite: network, mount and IPC namespaces with services to attack, and one agent in it.

stage.py ORDER      ORDER is JSON {"kinds": [...], "parts": [...], "control": bool, "root": bool}; root only

Prints one JSON document: what the agent saw, and what of the host changed.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tests.hostile.fingerprint import changes, fingerprint, steady_look
from tests.hostile.planting import NAMED_VARIABLES, token
from tests.tools import unprivileged

AGENT = Path(__file__).with_name("agent.py")
HOSTS = {
    "loopback": ("127.0.0.1", ""),
    "IPv6 loopback": ("::1", ""),
    "a neighbour": ("10.77.0.1", ""),
    "an IPv6 neighbour": ("fd77::1", ""),
    "link-local IPv6": ("fe80::77", "lan0"),
    "metadata": ("169.254.169.254", ""),
    "IPv6 metadata": ("fd00:ec2::254", ""),
}
LAN = """
set -e
ip link set lo up
ip link add lan0 type veth peer name lan1
ip link set lan0 up; ip link set lan1 up
for address in 10.77.0.1/24 169.254.169.254/32; do ip addr add $address brd + dev lan0; done
for address in fd77::1/64 fd00:ec2::254/128 fe80::77/64; do ip -6 addr add $address dev lan0 nodad; done
ip route add 224.0.0.0/4 dev lan0
echo "0 2147483647" > /proc/sys/net/ipv4/ping_group_range
"""
PR_SET_CHILD_SUBREAPER = 36
SETTLED_WITHIN_S, LOOK_AGAIN_S = 60.0, 0.25
AGENT_WITHIN_S = 800.0


def serve() -> int:
    """A port at which every address of this host answers, by stream and by datagram."""
    listening = socket.socket(socket.AF_INET6)
    listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    listening.bind(("::", 0))
    listening.listen(64)
    port = int(listening.getsockname()[1])
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind(("0.0.0.0", port))
    group = socket.inet_aton("224.0.0.251") + socket.inet_aton("10.77.0.1")
    datagrams.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)

    def accept() -> None:
        while True:
            listening.accept()[0].close()

    def reply() -> None:
        while True:
            _, who = datagrams.recvfrom(64)
            datagrams.sendto(b"here", who)

    for work in (accept, reply):
        threading.Thread(target=work, daemon=True).start()
    return port


def run_agent(base: Path, order: dict[str, Any], port: int) -> Any:
    words = {f"variable {name}": token() for name in NAMED_VARIABLES}
    env = {name: words[f"variable {name}"] for name in NAMED_VARIABLES}
    words["a word of the command line"] = word = token()
    told = {**order, "words": words, "network": {"hosts": HOSTS, "port": port}}
    (base / "order").write_text(json.dumps(told))  # no command line: it holds every secret
    if order["root"]:
        ran = subprocess.run(
            [sys.executable, str(AGENT), str(base), word],
            env={**os.environ, **env, "HOME": str(base / "home")},
            stdout=subprocess.PIPE,
            timeout=AGENT_WITHIN_S,
            check=False,
        )
        if ran.returncode:
            raise SystemExit(f"the agent ended with {ran.returncode}")
        return json.loads(ran.stdout)
    code = "import sys, runpy; sys.argv[:] = sys.argv[2:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    shutil.chown(base / "order", unprivileged.UID)
    said = unprivileged.run(code, str(AGENT), str(base), word, env=env, timeout_s=AGENT_WITHIN_S)
    return json.loads(said)


def settled(before: dict[str, str]) -> list[str]:
    """What changed and stays so: what is just ending gets a moment."""
    waiting = threading.Event()
    until = time.monotonic() + SETTLED_WITHIN_S
    while True:
        reap()
        found = changes(before, fingerprint(os.getpid()))
        if not found or time.monotonic() > until:
            return found
        waiting.wait(LOOK_AGAIN_S)


def reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def leave_others() -> None:
    """Mounts of other tests, seen in our copy of the tree only, would go when those tests end."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for mount in reversed(mounts):
        if mount.startswith((tempfile.gettempdir() + "/", "/run/netns/")):
            subprocess.run(["umount", "-l", mount], capture_output=True, check=False)


def main(order: dict[str, Any]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    leave_others()
    subprocess.run(["sh", "-c", LAN], check=True)
    port = serve()
    before = steady_look(os.getpid())
    base = Path(tempfile.mkdtemp(prefix="foe-"))
    try:
        if not order["root"]:
            shutil.chown(base, unprivileged.UID, unprivileged.UID)
        else:
            base.chmod(0o711)
        said = run_agent(base, order, port)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    said["changes"] = settled(before)
    sys.stdout.write(json.dumps(said))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main(json.loads(sys.argv[1]))
