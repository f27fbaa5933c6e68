"""Links, addresses and routes by rtnetlink, only as sandbox networks need them."""

from __future__ import annotations

import os
import socket
import struct
from ipaddress import IPv4Address, IPv4Network
from types import TracebackType

RTM_NEWLINK, RTM_DELLINK, RTM_NEWADDR, RTM_NEWROUTE = 16, 17, 20, 24
NLMSG_ERROR, NLM_F_REQUEST, NLM_F_ACK, NLM_F_EXCL, NLM_F_CREATE = 2, 1, 4, 0x200, 0x400
IFLA_IFNAME, IFLA_MTU, IFLA_LINKINFO, IFLA_NET_NS_FD = 3, 4, 18, 28
IFLA_INFO_KIND, IFLA_INFO_DATA, VETH_INFO_PEER = 1, 2, 1
IFA_ADDRESS, IFA_LOCAL = 1, 2
RTA_DST, RTA_OIF, RTA_GATEWAY = 1, 4, 5
RT_TABLE_MAIN, RTPROT_STATIC, RTN_UNICAST = 254, 4, 1
RT_SCOPE_UNIVERSE, RT_SCOPE_LINK = 0, 253
IFF_UP = 1
NESTED = 1 << 15
LINK = struct.Struct("=BBHiII")


def _attribute(kind: int, value: bytes) -> bytes:
    length = 4 + len(value)
    return struct.pack("=HH", length, kind) + value + b"\0" * (-length % 4)


def _text(kind: int, value: str) -> bytes:
    return _attribute(kind, value.encode() + b"\0")


def _number(kind: int, value: int) -> bytes:
    return _attribute(kind, struct.pack("=I", value))


class Netlink:
    """Acts in the network namespace its socket was created in."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._last = 0

    def __enter__(self) -> Netlink:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def add_pair(self, name: str, peer: str, peer_namespace: int, mtu: int) -> None:
        """The peer lies in the other namespace (a descriptor)."""
        other = (
            LINK.pack(0, 0, 0, 0, 0, 0)
            + _text(IFLA_IFNAME, peer)
            + _number(IFLA_MTU, mtu)
            + _number(IFLA_NET_NS_FD, peer_namespace)
        )
        kind = _attribute(IFLA_INFO_KIND, b"veth")
        data = _attribute(IFLA_INFO_DATA | NESTED, _attribute(VETH_INFO_PEER | NESTED, other))
        body = (
            LINK.pack(0, 0, 0, 0, 0, 0)
            + _text(IFLA_IFNAME, name)
            + _number(IFLA_MTU, mtu)
            + _attribute(IFLA_LINKINFO | NESTED, kind + data)
        )
        self._ask(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, body, f"add {name}")

    def up(self, index: int) -> None:
        self._ask(RTM_NEWLINK, 0, LINK.pack(0, 0, 0, index, IFF_UP, IFF_UP), f"set {index} up")

    def remove(self, name: str) -> None:
        body = LINK.pack(0, 0, 0, 0, 0, 0) + _text(IFLA_IFNAME, name)
        self._ask(RTM_DELLINK, 0, body, f"remove {name}")

    def add_address(self, index: int, address: IPv4Address, prefix: int = 32) -> None:
        body = struct.pack("=BBBBI", socket.AF_INET, prefix, 0, RT_SCOPE_UNIVERSE, index)
        body += _attribute(IFA_LOCAL, address.packed) + _attribute(IFA_ADDRESS, address.packed)
        self._ask(RTM_NEWADDR, NLM_F_CREATE | NLM_F_EXCL, body, f"give {index} {address}")

    def add_route(
        self, index: int, network: IPv4Network, gateway: IPv4Address | None = None
    ) -> None:
        scope = RT_SCOPE_LINK if gateway is None else RT_SCOPE_UNIVERSE
        body = struct.pack(
            "=BBBBBBBBI",
            socket.AF_INET,
            network.prefixlen,
            0,
            0,
            RT_TABLE_MAIN,
            RTPROT_STATIC,
            scope,
            RTN_UNICAST,
            0,
        )
        body += _number(RTA_OIF, index)
        if network.prefixlen:
            body += _attribute(RTA_DST, network.network_address.packed)
        if gateway is not None:
            body += _attribute(RTA_GATEWAY, gateway.packed)
        self._ask(RTM_NEWROUTE, NLM_F_CREATE | NLM_F_EXCL, body, f"route {network}")

    def _ask(self, kind: int, flags: int, body: bytes, what: str) -> None:
        self._last += 1
        length = 16 + len(body)
        head = struct.pack("=IHHII", length, kind, NLM_F_REQUEST | NLM_F_ACK | flags, self._last, 0)
        self._socket.send(head + body)
        answer = self._socket.recv(65536)
        (said,) = struct.unpack_from("=H", answer, 4)
        if said != NLMSG_ERROR:
            raise OSError(f"{what}: the kernel answered with message {said}")
        (code,) = struct.unpack_from("=i", answer, 16)
        if code:
            raise OSError(-code, f"{what}: {os.strerror(-code)}")
