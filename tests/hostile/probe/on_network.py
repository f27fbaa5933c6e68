"""Attacks on what can be dialled: the host's loopback, its neighbours, the metadata service. Own namespaces only."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from trying import Refused, add, answer_s, planted

NETWORK = "network"


def dial(name: str) -> Callable[[], None]:
    def attack() -> None:
        host, scope = planted("hosts")[name]
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        where: tuple[Any, ...] = (host, planted("port"))
        if family == socket.AF_INET6:
            number = socket.if_nametoindex(scope) if scope else 0
            where = (*where, 0, number)
        with socket.socket(family, socket.SOCK_STREAM) as dialling:
            dialling.settimeout(answer_s())
            dialling.connect(where)

    return attack


def ask(host: str, option: int = 0) -> Callable[[], None]:
    """A datagram that somebody answers."""

    def attack() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            if option:
                asking.setsockopt(socket.SOL_SOCKET, option, 1)
            asking.settimeout(answer_s())
            asking.sendto(b"anybody?", (host, planted("port")))
            if asking.recv(16) != b"here":
                raise Refused("another")

    return attack


def ping() -> None:
    """A datagram socket for echoes, which many hosts allow to all."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM, 1) as echo:
        echo.settimeout(answer_s())
        echo.sendto(b"\x08\0\0\0\0\0\0\x01", (planted("hosts")["a neighbour"][0], 0))
        echo.recv(64)


def other_interface() -> None:
    if {name for _, name in socket.if_nameindex()} <= {"lo"}:
        raise Refused("there is only the loopback")


def see_interface() -> None:
    with open("/proc/net/dev") as devices:
        if not any(line.strip().startswith("lan0") for line in devices):
            raise Refused("there is only the loopback")


def abstract() -> None:
    with socket.socket(socket.AF_UNIX) as dialling:
        dialling.settimeout(answer_s())
        dialling.connect("\0" + planted("abstract"))


def through_name() -> None:
    """A resolver of the host's: the way out by names."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.settimeout(answer_s())
        asking.sendto(bytes(12), (planted("hosts")["a neighbour"][0], planted("port")))
        asking.recv(16)


for each in (
    "loopback",
    "IPv6 loopback",
    "a neighbour",
    "an IPv6 neighbour",
    "link-local IPv6",
    "metadata",
    "IPv6 metadata",
):
    add(NETWORK, f"dial {each}", dial(each))
add(NETWORK, "ask a service on the loopback", ask("127.0.0.1"))
add(NETWORK, "ask by multicast", ask("224.0.0.251"))
add(NETWORK, "ask by broadcast", ask("10.77.0.255", socket.SO_BROADCAST))
add(NETWORK, "ask a resolver of the host's", through_name)
add(NETWORK, "ping a neighbour", ping)
add(NETWORK, "list the interfaces", other_interface)
add(NETWORK, "see the host's interface", see_interface)
add(NETWORK, "reach an abstract socket", abstract)
