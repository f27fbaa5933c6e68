"""Relay of one gang member: carries packets between its interface and the other members' nodes. An unprivileged process.

It receives interface and socket open, and the gang's secret over its control socket; it opens nothing and ends with the
agent. Packets not between its own member and another are dropped and counted.

Messages on the control socket (one JSON document each):
  in   {"tun", "udp": descriptors, "rank", "peers": [[host, port], …], "secret", "session": hexadecimal, "uid"}   ·   {"count"}
  out  {"ready": true}   ·   {"counts": {…}}
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from gpool.agent.network.gang.datagrams import (
    AROUND_BYTES,
    HELLO_BYTES,
    IP_HEADER_BYTES,
    IS_HELLO,
    Bond,
    Piece,
    passes,
)
from gpool.core.gangs import address_of

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
IP_MTU_DISCOVER, IP_PMTUDISC_DONT, IP_MTU = 10, 0, 14
UDP_SEGMENT, UDP_GRO = 103, 104
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
BUFFER_BYTES = 1 << 16
SOCKET_BYTES = 8 << 20
MESSAGE_BYTES = 1 << 18
UDP_OVER_IP_BYTES = 28
LEAST_MTU = 576
MOST_SENT_BYTES = 65507
MOST_SENT_PIECES = 64  # kernel limit of segments per call
TURN = 32  # packets of one direction before the other is served
ASK_EVERY_S = 0.2
MOST_WAITING = 32  # packets for a member whose relay has not answered
MOST_WAITING_BYTES = 16 << 20  # for all members together

libc = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class Counts:
    sent: int = 0
    received: int = 0
    strays: int = 0  # packets to no member, or not from the own address
    forged: int = 0  # authentic datagrams with a packet from another address
    unsent: int = 0
    refused: int = 0  # datagrams that failed authentication


class Member:
    __slots__ = ("asked_at", "bond", "inside", "piece_bytes", "rank", "waiting", "where")

    def __init__(self, bond: Bond, rank: int, where: tuple[str, int]) -> None:
        self.bond = bond
        self.rank = rank
        self.inside = address_of(rank).packed
        self.where = where
        self.piece_bytes = piece_bytes(where)
        self.waiting: deque[bytes] = deque()
        self.asked_at = float("-inf")


def piece_bytes(where: tuple[str, int]) -> int:
    mtu = LEAST_MTU
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, contextlib.suppress(OSError):
        asking.connect(where)
        mtu = max(mtu, asking.getsockopt(socket.IPPROTO_IP, IP_MTU))
    return min(mtu - UDP_OVER_IP_BYTES, MOST_SENT_BYTES) - AROUND_BYTES


class Relay:
    """`now` is the boot clock; the caller owns the sockets."""

    bond = Bond

    def __init__(self, order: dict[str, Any], now: Callable[[], float]) -> None:
        self._tun: int = order["tun"]
        self._udp = socket.socket(fileno=order["udp"])
        self._now = now
        own: int = order["rank"]
        secret, session = bytes.fromhex(order["secret"]), bytes.fromhex(order["session"])
        self._address = address_of(own).packed
        self._members = {
            rank: Member(self.bond(secret, own, rank, session), rank, (host, port))
            for rank, (host, port) in enumerate(order["peers"])
            if rank != own
        }
        self._by_address = {each.inside: each for each in self._members.values()}
        self._waiting: set[int] = set()
        self._waiting_bytes = 0
        self._cuts = True
        self._to: Member | None = (
            None  # receiver of the queued parts, each two of them `_size` bytes
        )
        self._parts: list[bytes] = []
        self._size = 0
        self._counts = Counts()
        self._packet = bytearray(BUFFER_BYTES)
        self._arrived = bytearray(BUFFER_BYTES)
        os.set_blocking(self._tun, False)
        self._udp.setblocking(True)  # blocking sends; receives do not block
        self._tune()

    def _tune(self) -> None:
        for forced, plain in (
            (SO_RCVBUFFORCE, socket.SO_RCVBUF),
            (SO_SNDBUFFORCE, socket.SO_SNDBUF),
        ):
            try:
                self._udp.setsockopt(socket.SOL_SOCKET, forced, SOCKET_BYTES)
            except OSError:
                self._udp.setsockopt(socket.SOL_SOCKET, plain, SOCKET_BYTES)
        self._udp.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DONT)
        with contextlib.suppress(OSError):
            self._udp.setsockopt(socket.IPPROTO_UDP, UDP_GRO, 1)

    def serve(self, control: socket.socket) -> None:
        with select.epoll() as ready:
            self._serve(ready, control)

    def _serve(self, ready: select.epoll, control: socket.socket) -> None:
        for descriptor in (self._tun, self._udp.fileno(), control.fileno()):
            ready.register(descriptor, select.EPOLLIN)
        while True:
            for descriptor, _ in ready.poll(ASK_EVERY_S if self._waiting else -1):
                if descriptor == self._tun:
                    self._carry_out()
                elif descriptor == self._udp.fileno():
                    self._carry_in()
                elif not control.recv(MESSAGE_BYTES):
                    return
                else:
                    control.send(json.dumps({"counts": asdict(self.counts())}).encode())
            for rank in self._waiting:
                self._ask(self._members[rank])

    def close(self) -> None:
        self._udp.close()

    def counts(self) -> Counts:
        self._counts.refused += sum(each.bond.refused for each in self._members.values())
        for each in self._members.values():
            each.bond.refused = 0
        return self._counts

    # out of the lane

    def _carry_out(self) -> None:
        buffer = [self._packet]
        view = memoryview(self._packet)
        for _ in range(TURN):
            try:
                size = os.readv(self._tun, buffer)
            except OSError:
                break
            packet = view[:size]
            member = self._by_address.get(bytes(packet[16:20]))
            if member is None or not passes(packet, size, self._address, member.inside):
                self._counts.strays += 1
            elif member.bond.is_made:
                self._send(member, packet)
            else:
                self._keep(member, bytes(packet))
        self._flush()

    def _keep(self, member: Member, packet: bytes) -> None:
        """Keep packets until the peer's relay is up: members start at different times."""
        if len(member.waiting) >= MOST_WAITING:
            self._waiting_bytes -= len(member.waiting.popleft())
            self._counts.unsent += 1
        if self._waiting_bytes + len(packet) > MOST_WAITING_BYTES:
            self._counts.unsent += 1
            return
        member.waiting.append(packet)
        self._waiting_bytes += len(packet)
        self._waiting.add(member.rank)
        self._ask(member)

    def _release(self, member: Member) -> None:
        self._waiting.discard(member.rank)
        while member.waiting:
            packet = member.waiting.popleft()
            self._waiting_bytes -= len(packet)
            self._send(member, memoryview(packet))
        self._flush()

    def _ask(self, member: Member) -> None:
        now = self._now()
        if now >= member.asked_at + ASK_EVERY_S:
            member.asked_at = now
            self._say(member, member.bond.hello(asks=True))

    def _say(self, member: Member, datagram: bytes) -> None:
        with contextlib.suppress(OSError):  # repeated while packets wait
            self._udp.sendto(datagram, member.where)

    def _send(self, member: Member, packet: memoryview) -> None:
        """Pieces of one length go to the kernel in one call; `_flush` comes last."""
        count = -(-len(packet) // member.piece_bytes)
        body = -(-len(packet) // count)
        size = body + AROUND_BYTES
        if member is not self._to or size != self._size:
            self._flush()
        self._to, self._size = member, size
        most = 2 * (min(MOST_SENT_BYTES // size, MOST_SENT_PIECES) if self._cuts else 1)
        for datagram in member.bond.seal(packet, body):
            self._parts += datagram
            if len(self._parts) >= most:
                self._flush()
        if count * body != len(packet):
            self._flush()  # only the last may be shorter
        self._counts.sent += 1

    def _flush(self) -> None:
        parts, member = self._parts, self._to
        if not parts or member is None:
            return
        self._parts = []
        several = len(parts) > 2
        size = struct.pack("=H", self._size)
        try:
            self._udp.sendmsg(
                parts, [(socket.IPPROTO_UDP, UDP_SEGMENT, size)] if several else [], 0, member.where
            )
        except OSError as failure:
            self._counts.unsent += 1
            if failure.errno in (errno.EINVAL, errno.EMSGSIZE):
                member.piece_bytes = piece_bytes(member.where)  # the path MTU has changed
            elif failure.errno in (errno.EIO, errno.ENOPROTOOPT):
                self._cuts = False  # the link has no checksum offload

    # into the lane

    def _carry_in(self) -> None:
        view = memoryview(self._arrived)
        room = socket.CMSG_SPACE(4)
        for _ in range(TURN):
            try:
                size, beside, _, _ = self._udp.recvmsg_into(
                    [self._arrived], room, socket.MSG_DONTWAIT
                )
            except OSError:
                return
            each = size
            for level, kind, value in beside:
                if (level, kind) == (socket.IPPROTO_UDP, UDP_GRO):
                    (each,) = struct.unpack("=i", value)
            if size:
                self._take(view[:size], each)

    def _take(self, arrived: memoryview, each: int) -> None:
        if each == HELLO_BYTES < len(arrived):  # some may be hellos
            for one in _cut(arrived, each):
                self._take(one, len(one))
            return
        sender = arrived[0] << 8 | arrived[1] if len(arrived) > 1 else -1
        rank = sender & ~IS_HELLO
        member = self._members.get(rank) if sender >= 0 else None
        if member is None:
            self._counts.refused += 1
            return
        if sender & IS_HELLO:
            if len(arrived) >= HELLO_BYTES:
                self._meet(member, bytes(arrived[:HELLO_BYTES]))
            return
        before = member.bond.refused
        for packet in member.bond.open(_cut(arrived, each)):
            self._deliver(member, packet)
        if member.bond.refused > before:
            self._ask(member)  # the peer may not know our new session

    def _meet(self, member: Member, datagram: bytes) -> None:
        answer = member.bond.hear(datagram)
        if answer is not None:
            self._say(member, answer)
        if member.bond.is_made:
            self._release(member)

    def _deliver(self, member: Member, pieces: list[Piece]) -> None:
        size = sum(map(len, pieces))
        head = pieces[0] if len(pieces[0]) >= IP_HEADER_BYTES else b"".join(pieces)
        if not passes(head, size, member.inside, self._address):
            self._counts.forged += 1
            return
        with contextlib.suppress(OSError):
            os.writev(self._tun, pieces)
            self._counts.received += 1


def _cut(arrived: memoryview, each: int) -> Iterator[memoryview]:
    return (arrived[at : at + each] for at in range(0, len(arrived), each))


def give_up_privileges(uid: int) -> None:
    """Afterwards no process of that uid can trace or read this one."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    for each in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(each, (0, 0))


def main(kind: type[Relay] = Relay) -> int:
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # SIGINT is for the agent; this process ends with it
    control = socket.socket(fileno=0)
    said = control.recv(MESSAGE_BYTES)
    if not said:  # cancelled before the start
        return 0
    order = json.loads(said)
    relay = kind(order, time.monotonic)
    give_up_privileges(order["uid"])
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a change of uid clears it
    with contextlib.suppress(BrokenPipeError):  # cancelled meanwhile
        control.send(b'{"ready": true}')
        relay.serve(control)
    return 0


if __name__ == "__main__":
    sys.exit(main())
