"""A host, its LAN and the internet in namespaces of their own, for root's tests: the host is where the caller is.

The world beyond it is one namespace that owns every outside address and answers on each; a packet socket there sees all
that arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import select
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from ipaddress import IPv4Address, ip_address
from pathlib import Path
from typing import Any

from gpool.agent.network.sandbox_network import OpenSandboxNetwork
from tests.hostile.reaching import PATIENCE_S, PORT

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET = 0x20000, 0x10000000, 0x40000000
MS_BIND, MS_MOVE, MS_REC, MS_SLAVE = 4096, 8192, 16384, 1 << 19
NOBODY = 65534
SO_RCVBUFFORCE = 33
LOOK_AGAIN_S = 0.2
HOST, GATEWAY, PUBLIC = "192.168.77.10", "192.168.77.1", "11.22.33.44"
PUBLIC_6 = "2a00:77::44"
OUTSIDE = {
    "gateway": GATEWAY,
    "a machine on the LAN": "192.168.77.20",
    "a private machine behind the gateway": "10.9.9.9",
    "metadata": "169.254.169.254",
    "metadata in carrier space": "100.100.100.200",
    "metadata under a public-looking address": "168.63.129.16",
    "a documentation address": "203.0.113.7",
}
OUTSIDE_6 = {
    "metadata by IPv6": "fd00:ec2::254",
    "a neighbour by IPv6": "fd77::1",
    "a public machine by IPv6": PUBLIC_6,
    "metadata as mapped IPv4": "::ffff:169.254.169.254",
    "metadata by NAT64": "64:ff9b::a9fe:a9fe",
}
SPOKEN = {
    "multicast": "224.0.0.251",
    "broadcast": "255.255.255.255",
    "broadcast on the LAN": "192.168.77.255",
    "multicast by IPv6": "ff02::fb%{scope}",
}
BRIDGE = "172.17.0.1"  # as Docker makes one on its host
OF_HOST = {"the host": HOST, "an engine's bridge": BRIDGE}
ON_HOST = {**OF_HOST, "the host's loopback": "127.0.0.1"}
NAMES = {
    "good.example": [[PUBLIC]],
    "inside.example": [["192.168.77.20"]],
    "mixed.example": [[PUBLIC, "10.9.9.9"]],
    "rebind.example": [[PUBLIC], ["127.0.0.1"], ["169.254.169.254"], ["192.168.77.20"]],
}

libc = ctypes.CDLL(None, use_errno=True)


def must(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), what)


def setns(descriptor: int) -> None:
    must(libc.setns(descriptor, 0), "setns")


def in_namespace(descriptor: int | None, work: Callable[[], Any]) -> Any:
    """In a thread that ends afterwards. None: a fresh namespace."""
    got: list[Any] = []

    def run() -> None:
        if descriptor is None:
            must(libc.unshare(CLONE_NEWNET), "unshare")
        else:
            setns(descriptor)
        got.append(work())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return got[0]


def own_descriptor() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def sh(*lines: str, namespace: int | None = None) -> None:
    """One `ip -batch`, in the namespace of a descriptor if given."""
    way = ["nsenter", f"--net=/proc/self/fd/{namespace}"] if namespace is not None else []
    passed = () if namespace is None else (namespace,)
    text = "\n".join(lines) + "\n"
    subprocess.run([*way, "ip", "-batch", "-"], input=text, text=True, check=True, pass_fds=passed)


def echo(sockets: Sequence[socket.socket]) -> Callable[[], None]:
    """Answers whoever speaks, until it is stopped."""
    stopping, stopped = os.pipe()

    def serve() -> None:
        while stopping not in (ready := select.select([*sockets, stopping], [], [])[0]):
            for each in ready:
                with contextlib.suppress(OSError):
                    if each.type == socket.SOCK_DGRAM:
                        _, sender = each.recvfrom(2048)
                        each.sendto(b"here", sender)
                    else:
                        stream, _ = each.accept()
                        stream.sendall(b"here")
                        stream.close()

        for each in sockets:
            each.close()
        os.close(stopping)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()

    def stop() -> None:
        os.close(stopped)
        thread.join()

    return stop


def answering(*addresses: str) -> list[socket.socket]:
    made = []
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            each = socket.socket(family, kind)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            each.bind((address, PORT))
            if kind == socket.SOCK_STREAM:
                each.listen(64)
            made.append(each)
    return made


def name_server(listening: socket.socket) -> None:
    """The upstream server: knows `NAMES`, each next answer of a name when it is asked again."""
    turns: dict[str, int] = {}

    def serve() -> None:
        while True:
            message, sender = listening.recvfrom(4096)
            at, labels = 12, []
            while message[at]:
                labels.append(message[at + 1 : at + 1 + message[at]].decode())
                at += message[at] + 1
            asked, name = message[12 : at + 5], ".".join(labels)
            several = NAMES.get(name, [[]])
            found = several[turns.get(name, 0) % len(several)]
            turns[name] = turns.get(name, 0) + 1
            head = message[:2] + struct.pack("!HHHHH", 0x8180, 1, len(found), 0, 0)
            records = (
                struct.pack("!HHHIH", 0xC00C, 1, 1, 1, 4) + IPv4Address(a).packed for a in found
            )
            listening.sendto(head + asked + b"".join(records), sender)

    threading.Thread(target=serve, daemon=True).start()


def forward_nothing() -> None:
    """A fresh namespace begins as this machine's own is now, whoever has changed that."""
    Path("/proc/sys/net/ipv4/ip_forward").write_text("0")


def build_world() -> socket.socket:
    """The host is where we are; the world is one hop away. Returns the packet socket that sees what arrives there."""
    forward_nothing()
    world = in_namespace(None, own_descriptor)
    in_namespace(world, forward_nothing)
    subprocess.run(
        ["ip", "link", "add", "up0", "type", "veth", "peer", "name", "w0", "netns", f"/proc/{os.getpid()}/fd/{world}"],
        check=True,
    )  # fmt: skip
    sh(
        "link set lo up",
        f"addr add {HOST}/24 dev up0",
        "addr add fd77::10/64 dev up0 nodad",
        "link set up0 addrgenmode none up",
        "link add docker0 type veth peer name docker1",
        f"addr add {BRIDGE}/16 dev docker0",
        "link set docker1 addrgenmode none up",
        "link set docker0 addrgenmode none up",
        f"route add default via {GATEWAY}",
        "route add ::/0 via fd77::1",
    )
    sh(
        "link set lo up",
        f"addr add {GATEWAY}/24 dev w0",
        "addr add fd77::1/64 dev w0 nodad",
        "link set w0 up",
        *(f"addr add {a}/32 dev w0" for a in (*OUTSIDE.values(), PUBLIC) if a != GATEWAY),
        f"addr add {PUBLIC_6}/128 dev w0 nodad",
        "addr add fd00:ec2::254/128 dev w0 nodad",
        "addr add 64:ff9b::a9fe:a9fe/128 dev w0 nodad",
        namespace=world,
    )

    def inside() -> socket.socket:
        capture = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3))
        capture.bind(("w0", 3))
        capture.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 26)
        capture.setblocking(False)
        echo(answering(*OUTSIDE.values(), PUBLIC, "::"))
        upstream = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        upstream.bind((GATEWAY, 53))
        name_server(upstream)
        return capture

    capture: socket.socket = in_namespace(world, inside)
    echo(answering("0.0.0.0", "::"))  # services of the host, on its loopback too
    return capture


def arrived(capture: socket.socket, port: int = PORT) -> list[str]:
    """Destinations of packets to a port that reached the world since we last looked."""
    found = []
    with contextlib.suppress(BlockingIOError):
        while True:
            packet, origin = capture.recvfrom(65536)
            if origin[2] == socket.PACKET_OUTGOING:
                continue
            version = packet[0] >> 4
            if version == 4:
                destination, protocol = IPv4Address(packet[16:20]), packet[9]
                ports = packet[(packet[0] & 15) * 4 :]
            elif version == 6:
                destination, protocol = ip_address(packet[24:40]), packet[6]  # type: ignore[assignment]
                ports = packet[40:]
            else:
                continue
            if protocol in (6, 17) and ports[2:4] == struct.pack("!H", port):
                found.append(str(destination))
    return found


@contextlib.contextmanager
def listening_in(opened: OpenSandboxNetwork) -> Iterator[str]:
    """Another lane with a service in it; its address."""

    def inside() -> tuple[list[socket.socket], str]:
        made = answering("0.0.0.0")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.connect((PUBLIC, 1))
            return made, asking.getsockname()[0]

    made, address = in_namespace(opened.lane.namespaces[0], inside)
    stop = echo(made)
    yield address
    stop()


def fingerprint() -> dict[str, Any]:
    """What our code could have changed on the host."""
    settings = {}
    for folder, _, names in os.walk("/proc/sys/net"):  # passes over what goes meanwhile
        for path in (Path(folder, name) for name in names if "conntrack" not in name):
            with contextlib.suppress(OSError):
                settings[str(path)] = path.read_text()
    listed = subprocess.run(["ip", "-j", "addr"], capture_output=True, text=True, check=True)
    routes = subprocess.run(
        ["ip", "-j", "route", "show", "table", "all"], capture_output=True, text=True, check=True
    )
    tables = subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True, check=False)
    return {
        "settings": settings,
        "interfaces": [each["ifname"] for each in json.loads(listed.stdout)],
        "routes": routes.stdout,
        "tables": tables.stdout if os.geteuid() == 0 else "",
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    old, new = before["settings"], after["settings"]
    changed = [name for name in {*old, *new} if old.get(name) != new.get(name)]
    others = before.keys() - {"settings"}
    return changed + [name for name in others if before[name] != after[name]]


async def settled(before: dict[str, Any]) -> list[str]:
    """What stays different: the kernel and our threads finish some things after they were told to."""
    left = differences(before, fingerprint())
    for _ in range(int(PATIENCE_S / LOOK_AGAIN_S)):
        if not left:
            break
        await asyncio.sleep(LOOK_AGAIN_S)
        left = differences(before, fingerprint())
    return left


def open_the_way(*paths: Path) -> None:
    """Let another uid reach these: in our own mount namespace, an ancestor closed to others is replaced by an open one."""
    closed: dict[Path, list[Path]] = {}
    for path in paths:
        for above in reversed(path.parents):
            if not above.stat().st_mode & 0o001:
                closed.setdefault(above, []).append(path)
                break
    for above, below in closed.items():
        kept = [(path, os.open(path, os.O_PATH)) for path in dict.fromkeys(below)]
        must(libc.mount(b"none", os.fsencode(above), b"tmpfs", 0, b"mode=0755"), "tmpfs")
        for path, descriptor in kept:
            path.mkdir(parents=True, exist_ok=True)
            source = f"/proc/self/fd/{descriptor}".encode()
            must(libc.mount(source, os.fsencode(path), None, MS_BIND | MS_REC, None), "bind")
            os.close(descriptor)


def open_tun(place: Path) -> None:
    """Distributions let everybody open it; where this machine does not, our own mount namespace does."""
    node = place / "tun"
    os.mknod(node, 0o600 | 0o020000, os.makedev(10, 200))
    node.chmod(0o666)
    must(libc.mount(os.fsencode(node), b"/dev/net/tun", None, MS_BIND, None), "bind tun")
