"""Relays against each other over loopback, their lanes' interfaces played by sockets: what is carried, what waits, what is not."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from ipaddress import IPv4Address
from typing import Any

import pytest

from gpool.agent.network.gang.datagrams import IS_HELLO, Bond
from gpool.agent.network.gang.relay import MOST_WAITING, Relay
from gpool.agent.network.gang.relay_client import RELAY
from gpool.core.gangs import address_of
from tests.tools.processes import eventually

SECRET = b"s" * 32
WITHIN_S = 240.0


def packet(source: int | str, destination: int | str, body: bytes = b"") -> bytes:
    ends = [
        (address_of(end) if isinstance(end, int) else IPv4Address(end)).packed
        for end in (source, destination)
    ]
    return struct.pack(">BBHHHBBH4s4s", 0x45, 0, 20 + len(body), 0, 0, 64, 17, 0, *ends) + body


class Site:
    """Ports for three members, and relays for those that are asked for."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.stack = stack
        self.sockets = [
            stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for _ in range(3)
        ]
        for each in self.sockets:
            each.bind(("127.0.0.1", 0))
            each.settimeout(WITHIN_S)
        self.peers = [each.getsockname() for each in self.sockets]

    def start(self, rank: int) -> Playing:
        return self.stack.enter_context(Playing(self, rank))


class Playing:
    """A relay in a thread: `lane` is the other side of its interface."""

    def __init__(self, site: Site, rank: int) -> None:
        self.lane, tun = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.lane.settimeout(WITHIN_S)
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = {
            "tun": tun.fileno(),
            "udp": site.sockets[rank].dup().detach(),
            "rank": rank,
            "peers": site.peers,
            "secret": SECRET.hex(),
            "session": (rank + 1).to_bytes(16).hex(),
        }
        self.ticks = iter(range(1_000_000))
        relay = Relay(order, lambda: float(next(self.ticks)))

        def serve() -> None:
            with tun, theirs, contextlib.closing(relay):
                relay.serve(theirs)

        self.thread = threading.Thread(target=serve)

    def __enter__(self) -> Playing:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.control.close()
        self.thread.join()
        self.lane.close()

    def counts(self) -> dict[str, Any]:
        self.control.send(b'{"count": true}')
        told: dict[str, Any] = json.loads(self.control.recv(1 << 16))["counts"]
        return told


@pytest.fixture
def site() -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        yield Site(stack)


@pytest.mark.parametrize("size", [0, 1, 1400, 40_000, 65_000])
def test_a_packet_is_carried_as_it_was_both_ways(site: Site, size: int) -> None:
    one, other = site.start(0), site.start(1)
    body = bytes(n % 251 for n in range(size))
    one.lane.send(packet(0, 1, body))
    assert other.lane.recv(1 << 16) == packet(0, 1, body)
    other.lane.send(packet(1, 0, body))
    assert one.lane.recv(1 << 16) == packet(1, 0, body)


def test_what_is_said_before_the_other_is_there_waits_for_it(site: Site) -> None:
    one = site.start(0)
    for number in range(3):
        one.lane.send(packet(0, 1, bytes([number])))
    assert one.counts()["sent"] == 0
    other = site.start(1)
    assert [other.lane.recv(1 << 16)[20:] for _ in range(3)] == [b"\0", b"\1", b"\2"]


def test_of_what_waits_too_long_the_oldest_goes(site: Site) -> None:
    one = site.start(0)
    for number in range(MOST_WAITING + 5):
        one.lane.send(packet(0, 1, bytes([number])))
    eventually("it has read them all", lambda: one.counts()["unsent"] == 5, WITHIN_S)
    other = site.start(1)
    assert other.lane.recv(1 << 16)[20] == 5
    assert one.counts()["unsent"] == 5


@pytest.mark.parametrize(
    "stray",
    [
        packet(0, 0),  # itself
        packet(0, 7),  # no member
        packet(0, "192.168.1.1"),
        packet(0, "224.0.0.1"),
        packet(1, 2),  # another's address
        packet("9.9.9.9", 1),
        packet(0, 1)[:-1],
        packet(0, 1) + b"more",
        b"\x46" + packet(0, 1, bytes(4))[1:],  # options
        b"\x60" + bytes(39),  # IPv6
        b"x",
    ],
)
def test_a_packet_that_is_not_its_members_to_another_never_leaves(site: Site, stray: bytes) -> None:
    one, other = site.start(0), site.start(1)
    one.lane.send(stray)
    one.lane.send(packet(0, 1, b"after"))
    assert other.lane.recv(1 << 16)[20:] == b"after"
    assert one.counts()["strays"] == 1


@pytest.mark.parametrize(
    ("words", "passes"),
    [
        (packet(1, 0, b"?"), True),  # the control
        (packet(2, 0, b"?"), False),  # in the name of a third
        (packet(0, 0, b"?"), False),  # in the receiver's own
        (packet(1, 2, b"?"), False),  # for another
        (packet(1, "127.0.0.1", b"?"), False),
        (packet("8.8.8.8", 0, b"?"), False),
        (packet(1, 0, b"?") + b"more", False),
        (b"?", False),
    ],
)
def test_a_member_never_speaks_for_another_nor_past_one(
    site: Site, words: bytes, passes: bool
) -> None:
    """A node that holds the secret, and seals what it likes."""
    one = site.start(0)
    bond = met(site)
    for said in (words, packet(1, 0, b"after")):
        for parts in bond.seal(memoryview(said), 1000):
            site.sockets[1].sendto(b"".join(parts), site.peers[0])
    came = one.lane.recv(1 << 16)
    assert came == (words if passes else packet(1, 0, b"after"))
    assert one.counts()["forged"] == (0 if passes else 1)


def met(site: Site) -> Bond:
    """Member 1, played by the test."""
    bond = Bond(SECRET, 1, 0, (9).to_bytes(16))
    said: bytes | None = bond.hello(asks=True)
    while said is not None:
        site.sockets[1].sendto(said, site.peers[0])
        if bond.is_made:
            return bond
        answer = site.sockets[1].recv(1 << 16)
        assert answer[0] << 8 & IS_HELLO
        said = bond.hear(answer)
    raise AssertionError("it did not answer")


def test_what_is_not_sealed_is_counted_and_never_answered_to_its_sender(site: Site) -> None:
    one = site.start(0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.bind(("127.0.0.1", 0))
        for noise in (b"", b"x", b"\0\1" + bytes(60), b"\x80\1" + bytes(60), b"\0\7" + bytes(60)):
            stranger.sendto(noise, site.peers[0])
        assert site.sockets[1].recv(1 << 16)[:2] == b"\x80\0"  # it asks the true one at the most
        eventually("it has counted them", lambda: one.counts()["refused"] >= 3, WITHIN_S)
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):
            stranger.recv(1 << 16)


@pytest.mark.parametrize("is_told", [False, True])
def test_a_relay_that_is_called_off_while_it_begins_ends_without_a_word(
    site: Site, is_told: bool
) -> None:
    lane, tun = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    udp = site.sockets[0]
    with lane, tun, ours, theirs:
        if is_told:
            order = {
                "tun": tun.fileno(),
                "udp": udp.fileno(),
                "rank": 0,
                "peers": site.peers,
                "secret": SECRET.hex(),
                "session": ("1" * 32),
                "uid": os.geteuid(),
            }
            ours.send(json.dumps(order).encode())
        ours.close()
        done = subprocess.run(
            [sys.executable, "-I", "-B", *RELAY],
            stdin=theirs.fileno(),
            pass_fds=(tun.fileno(), udp.fileno()),
            capture_output=True,
            timeout=WITHIN_S,
            check=False,
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
