"""Fragments of a gang's packets: split into datagrams, reassembled, replay window. Pure; odd input is dropped.

A packet may exceed the MTU of the site's links, so it travels as pieces, each a datagram sealed by itself: no forged
datagram is kept, no router fragments. Pieces of a packet have consecutive numbers; number minus index names the packet.

The twelve bytes before a piece are its nonce, hence authenticated:
  sender's rank (2) · index of the piece (1) · index of the last one (1) · number (8)
"""

from __future__ import annotations

import struct
from collections import OrderedDict

HEAD = struct.Struct(">HBBQ")
SEAL_BYTES = 16
AROUND_BYTES = HEAD.size + SEAL_BYTES
WIDTH = 4096
"""Replay window: more than two of the longest packets overtaking each other."""
MAX_PIECES = 256
MAX_PACKET_BYTES = 65535
MOST_PARTIAL = 32
IP_HEADER_BYTES = 20

Piece = bytes | memoryview


class Window:
    """Replay window: admits each number once, none older than `WIDTH`."""

    __slots__ = ("_newest", "_seen")

    def __init__(self) -> None:
        self._newest = -1
        self._seen = 0  # bit n: newest number minus n

    def admits(self, number: int) -> bool:
        behind = self._newest - number
        if behind < 0:
            return True
        return behind < WIDTH and not self._seen >> behind & 1

    def take(self, number: int) -> None:
        """Record an authenticated number; a forged one would push true ones out."""
        ahead = number - self._newest
        if ahead <= 0:
            self._seen |= 1 << -ahead
            return
        self._newest = number
        if ahead >= WIDTH:
            self._seen = 1
        else:
            self._seen = (self._seen << ahead | 1) & (1 << WIDTH) - 1


class Partial:
    __slots__ = ("left", "pieces", "size")

    def __init__(self, count: int) -> None:
        self.pieces: list[Piece | None] = [None] * count
        self.left = count
        self.size = 0


class Joiner:
    """Keeps few packets: one with a lost piece is dropped."""

    __slots__ = ("_partial",)

    def __init__(self) -> None:
        self._partial: OrderedDict[int, Partial] = OrderedDict()

    def __len__(self) -> int:
        return len(self._partial)

    def add(self, number: int, index: int, last: int, body: Piece) -> list[Piece] | None:
        if last == 0 and index == 0:
            return [body]
        first = number - index
        partial = self._partial.get(first)
        if partial is None:
            if index > last or first < 0:
                return None
            partial = self._partial[first] = Partial(last + 1)
            if len(self._partial) > MOST_PARTIAL:
                self._partial.popitem(last=False)
        pieces = partial.pieces
        if len(pieces) != last + 1 or index > last or pieces[index] is not None:
            del self._partial[first]  # contradictory pieces
            return None
        pieces[index] = body
        partial.left -= 1
        partial.size += len(body)
        if partial.size > MAX_PACKET_BYTES:
            del self._partial[first]
            return None
        if partial.left:
            return None
        del self._partial[first]
        return pieces  # type: ignore[return-value]  # complete


def passes(packet: Piece, size: int, source: bytes, destination: bytes) -> bool:
    """Return whether the bytes begin an IPv4 packet of `size` bytes between the addresses, without options."""
    return (
        len(packet) >= IP_HEADER_BYTES
        and packet[0] == 0x45
        and packet[2] << 8 | packet[3] == size
        and packet[12:16] == source
        and packet[16:20] == destination
    )
