"""Namespace holder of a rootless agent: a process in its own user and network namespace. Stdlib only; run as a script.

It loads the firewall before any other process knows the namespace, sends descriptors, counts on request and ends with
the agent. It runs only nft.

Messages on the socket (one JSON document each, descriptors as ancillary data):
  in   {"nft": path, "rules": text, "gang": {"name", "address", "netmask", "mtu"} or null}   ·   {"list": words}
  out  {"ready": true} with user namespace, network namespace, the resolver's two sockets and, for a gang, the interface
       {"failed": text}
       {"listed": nft's listing}
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from typing import Any

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
PR_SET_PDEATHSIG = 1
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFMTU = 0x8916, 0x891C, 0x8922
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
RESOLVER = ("127.0.0.53", 53)
MESSAGE_BYTES = 1 << 18

libc = ctypes.CDLL(None, use_errno=True)


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def enter() -> None:
    uid, gid = os.geteuid(), os.getegid()
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"user and network namespace: {os.strerror(code)}")
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"0 {uid} 1")
    write("/proc/self/gid_map", f"0 {gid} 1")


def raise_interface(name: bytes = b"lo") -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asked = struct.pack("16sH14x", name, 0)
        _, flags = struct.unpack("16sH14x", fcntl.ioctl(asking, SIOCGIFFLAGS, asked))
        fcntl.ioctl(asking, SIOCSIFFLAGS, struct.pack("16sH14x", name, flags | IFF_UP))


def make_interface(name: str, address: str, netmask: str, mtu: int) -> int:
    """Create a TUN interface in the thread's namespace; closing the descriptor removes it."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    named = name.encode()
    try:
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", named, IFF_TUN | IFF_NO_PI))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            for word, value in ((SIOCSIFADDR, address), (SIOCSIFNETMASK, netmask)):
                given = struct.pack("=H2x4s8x", socket.AF_INET, socket.inet_aton(value))
                fcntl.ioctl(asking, word, struct.pack("16s16s", named, given))
            fcntl.ioctl(asking, SIOCSIFMTU, struct.pack("16si12x", named, mtu))
        raise_interface(named)
    except OSError:
        os.close(device)
        raise
    return device


def nft(path: str, *arguments: str, text: str = "") -> str:
    done = subprocess.run(
        [path, *arguments], input=text, capture_output=True, text=True, env={}, check=False
    )
    if done.returncode != 0:
        raise OSError(f"nft: {done.stderr.strip().splitlines()[:1]}")
    return done.stdout


def prepare(order: dict[str, Any]) -> list[int]:
    enter()
    if os.path.exists("/proc/sys/net/ipv6/conf/default/disable_ipv6"):
        write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1")
    raise_interface()
    nft(order["nft"], "-f", "-", text=order["rules"])
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    streams = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    datagrams.bind(RESOLVER)
    streams.bind(RESOLVER)
    streams.listen(16)
    namespaces = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in ("user", "net")]
    given = [*namespaces, datagrams.detach(), streams.detach()]
    if order["gang"]:
        given.append(make_interface(**order["gang"]))
    return given


def main() -> int:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # SIGINT is for the agent; this process ends with it
    channel = socket.socket(fileno=0)
    order = json.loads(channel.recv(MESSAGE_BYTES))
    try:
        given = prepare(order)
    except OSError as failure:
        channel.send(json.dumps({"failed": str(failure)}).encode())
        return 1
    beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", given))]
    channel.sendmsg([b'{"ready": true}'], beside)
    for descriptor in given:
        os.close(descriptor)
    while asked := channel.recv(MESSAGE_BYTES):
        what = json.loads(asked)["list"]
        try:
            listing = nft(order["nft"], "-j", "list", *what)
        except OSError as failure:
            listing = json.dumps({"nftables": [], "failed": str(failure)})
        channel.send(json.dumps({"listed": json.loads(listing)}).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
