"""The guest's interfaces, configured by `guest.py` before the command starts. A script; standard library only.

A network is {"address", "mask", "gateway", "resolver"}, all IPv4; without one the guest has loopback alone.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct

SIOCADDRT, SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK = 0x890B, 0x8914, 0x8916, 0x891C
IFF_UP, RTF_UP, RTF_GATEWAY = 1, 1, 2
ROUTE_BYTES = 120  # struct rtentry
ANYWHERE = "0.0.0.0"
INTERFACE = "eth0"
FOLDER = "/run/network"


def configure(network: dict[str, str] | None) -> list[tuple[str, str]]:
    """Configure the interfaces. Return (file, path in the command's view): what names the resolver."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))
        if network is None:
            return []
        name = INTERFACE.encode().ljust(16, b"\0")
        fcntl.ioctl(any_socket, SIOCSIFADDR, name + at(network["address"]) + bytes(8))
        fcntl.ioctl(any_socket, SIOCSIFNETMASK, name + at(network["mask"]) + bytes(8))
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", name, IFF_UP))
        ends = at(ANYWHERE), at(network["gateway"]), at(ANYWHERE)
        route = struct.pack("8x16s16s16sH", *ends, RTF_UP | RTF_GATEWAY)
        fcntl.ioctl(any_socket, SIOCADDRT, route.ljust(ROUTE_BYTES, b"\0"))
    os.mkdir(FOLDER, 0o755)
    with open(f"{FOLDER}/resolv.conf", "w") as file:
        file.write(f"nameserver {network['resolver']}\n")
    with open(f"{FOLDER}/nsswitch.conf", "w") as file:
        file.write("passwd: files\ngroup: files\nhosts: files dns\n")
    return [
        (f"{FOLDER}/resolv.conf", "/etc/resolv.conf"),
        (f"{FOLDER}/nsswitch.conf", "/etc/nsswitch.conf"),
    ]


def at(address: str) -> bytes:
    """A socket address without port."""
    return struct.pack("<H2x4s8x", socket.AF_INET, socket.inet_aton(address))
