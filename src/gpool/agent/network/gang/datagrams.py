"""Datagrams between members of a gang: key agreement, fragments, replay window. No I/O; odd input is dropped.

A packet may exceed the MTU of the site's links, so it travels as pieces, each a datagram sealed by itself: no forged
datagram is kept, no router fragments. Pieces of a packet have consecutive numbers; number minus index names the packet.

The twelve bytes before a piece are its nonce, hence authenticated:
  sender's rank (2) · index of the piece (1) · index of the last one (1) · number (8)

A relay's session number grows with the clock and is otherwise random. The key for packets from A to B is derived from
the gang's secret, both ranks in order, and both sessions: a restarted relay never repeats a nonce under one key, and
neither a recording of an earlier session nor a datagram reflected to its sender decrypts.

Hellos, sealed under the secret, announce sessions. A member accepts a session only from a hello that repeats the
member's own session (an old recording cannot) and only a later one, so a replaced session never returns. `asks`: the
sender has not accepted the session it repeats and wants an answer. Three datagrams at most.
"""

from __future__ import annotations

import hmac
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

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


IS_HELLO = 0x8000  # flag in the field of the sender's rank
SESSION_BYTES = 16
NOBODY = bytes(SESSION_BYTES)  # before any session
HELLO = struct.Struct(
    f">HHB{SESSION_BYTES}s{SESSION_BYTES}s"
)  # sender, receiver, asks, mine, yours
HELLO_BYTES = HELLO.size + SEAL_BYTES


def _derived(secret: bytes, salt: bytes, *words: object) -> bytes:
    info = " ".join(("gpool gang", *map(str, words))).encode()
    return HKDF(SHA256(), 32, salt, info).derive(secret)


class Bond:
    __slots__ = (
        "_from_them",
        "_hears",
        "_joiner",
        "_number",
        "_own",
        "_rank",
        "_says",
        "_secret",
        "_session",
        "_theirs",
        "_to_them",
        "_window",
        "refused",
    )

    def __init__(self, secret: bytes, own: int, rank: int, session: bytes) -> None:
        self._secret = secret
        self._own, self._rank = own, rank
        self._session = session
        self._says = _derived(secret, b"", "hello", own, rank)
        self._hears = _derived(secret, b"", "hello", rank, own)
        self._theirs = NOBODY
        self._to_them: AESGCM | None = None
        self._from_them: AESGCM | None = None
        self._number = 0
        self._window = Window()
        self._joiner = Joiner()
        self.refused = 0  # forged or repeated datagrams in the peer's name

    @property
    def is_made(self) -> bool:
        return self._to_them is not None

    def hello(self, *, asks: bool) -> bytes:
        return self._hello(self._theirs, asks)

    def _hello(self, yours: bytes, asks: bool) -> bytes:
        said = HELLO.pack(self._own | IS_HELLO, self._rank, asks, self._session, yours)
        return said + hmac.digest(self._says, said, "sha256")[:SEAL_BYTES]

    def hear(self, datagram: bytes) -> bytes | None:
        said, seal = datagram[: HELLO.size], datagram[HELLO.size :]
        expected = hmac.digest(self._hears, said, "sha256")[:SEAL_BYTES]
        if len(said) != HELLO.size or not hmac.compare_digest(seal, expected):
            self.refused += 1
            return None
        _, receiver, asks, mine, yours = HELLO.unpack(said)
        if receiver != self._own:
            self.refused += 1
            return None
        if mine < self._theirs:
            self.refused += 1
            return None
        if mine > self._theirs and yours == self._session:
            self._take(mine)
        known = mine == self._theirs
        return self._hello(mine, not known) if asks or not known else None

    def _take(self, session: bytes) -> None:
        self._theirs = session
        ours, theirs = self._session, session
        self._to_them = AESGCM(_derived(self._secret, ours + theirs, "data", self._own, self._rank))
        self._from_them = AESGCM(
            _derived(self._secret, theirs + ours, "data", self._rank, self._own)
        )
        self._number = 0
        self._window = Window()
        self._joiner = Joiner()

    def seal(self, packet: memoryview, piece_bytes: int) -> Iterator[list[bytes]]:
        """Datagrams of two parts each. The bond must be established."""
        assert self._to_them is not None
        encrypt, pack, rank = self._to_them.encrypt, HEAD.pack, self._own
        size = len(packet)
        last = (size - 1) // piece_bytes
        if last >= MAX_PIECES:
            return
        first = self._number
        self._number = first + last + 1
        for index in range(last + 1):
            head = pack(rank, index, last, first + index)
            at = index * piece_bytes
            yield [head, encrypt(head, packet[at : at + piece_bytes], None)]

    def open(self, datagrams: Iterable[memoryview]) -> Iterator[list[Piece]]:
        """Forged and repeated pieces are counted and dropped."""
        if self._from_them is None:
            self.refused += sum(1 for _ in datagrams)
            return
        decrypt, unpack, size = self._from_them.decrypt, HEAD.unpack, HEAD.size
        window, joiner, rank = self._window, self._joiner, self._rank
        for datagram in datagrams:
            if len(datagram) <= size + SEAL_BYTES:
                self.refused += 1
                continue
            head = bytes(datagram[:size])
            sender, index, last, number = unpack(head)
            if sender != rank or not window.admits(number):
                self.refused += 1
                continue
            try:
                body = decrypt(head, datagram[size:], None)
            except InvalidTag:
                self.refused += 1
                continue
            window.take(number)
            whole = joiner.add(number, index, last, body)
            if whole is not None:
                yield whole
