"""Listens on a network interface and puts TCP streams together again: for tests of what a stranger on the way can read."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from dataclasses import dataclass, field

_ALL_PACKETS = 0x0003
_BUFFER_BYTES = 1 << 26
_RCVBUFFORCE = (
    33  # past what the host lets everybody have: what does not fit is lost, and a stream has a hole
)
_MOST_BYTES = 1 << 17  # a packet with its head, as the kernel puts them together
_SEQUENCES = 1 << 32
_IPV4, _TCP = 0x0800, 6
_RECORDS = frozenset({20, 21, 22, 23})
"""TLS record types: change cipher spec, alert, handshake, application data."""

Stream = tuple[bytes, int, bytes, int]
"""From address and port, to address and port."""


def tls_ends_at(data: bytes) -> int:
    """How far the bytes are whole TLS records; an unfinished last one counts."""
    at = 0
    while at < len(data):
        if data[at] not in _RECORDS or data[at + 1 : at + 2] not in (b"\x03", b""):
            return at
        if at + 5 > len(data):
            return len(data)
        at += 5 + int.from_bytes(data[at + 3 : at + 5], "big")
    return len(data)


@dataclass
class Wiretap:
    """While it is open, everything that passes the interface is kept."""

    interface: str
    packets: list[bytes] = field(default_factory=list)

    def __enter__(self) -> Wiretap:
        # Of no protocol until it is bound: one of all would hear every interface till then.
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        with contextlib.suppress(PermissionError):
            self._socket.setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, _BUFFER_BYTES)
        try:
            self._socket.bind((self.interface, _ALL_PACKETS))
        except OSError:
            self._socket.close()
            raise
        self._socket.settimeout(0.1)
        self._over = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="wiretap")
        self._listener.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._listener.join()
        self._socket.close()

    def _listen(self) -> None:
        """What came before the end is heard, however late it is this thread's turn."""
        try:
            while not self._over.is_set():
                with contextlib.suppress(TimeoutError):
                    self.packets.append(self._socket.recv(_MOST_BYTES))
            self._socket.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    self.packets.append(self._socket.recv(_MOST_BYTES))
        except OSError:  # the interface is gone
            return

    def streams(self) -> dict[Stream, bytes]:
        """What was sent each way on each connection, in order, repetitions dropped."""
        pieces: dict[Stream, dict[int, bytes]] = {}
        for packet in list(self.packets):
            found = _segment(packet)
            if found is not None:
                stream, sequence, data = found
                known = pieces.setdefault(stream, {})
                known[sequence] = max(known.get(sequence, b""), data, key=len)
        return {stream: _joined(known) for stream, known in pieces.items()}


def _segment(packet: bytes) -> tuple[Stream, int, bytes] | None:
    """The payload of a TCP segment over IPv4, if that is what it is and it has one."""
    if len(packet) < 54 or struct.unpack_from("!H", packet, 12)[0] != _IPV4:
        return None
    header = (packet[14] & 0x0F) * 4
    if packet[23] != _TCP:
        return None
    total = struct.unpack_from("!H", packet, 16)[0]
    tcp = 14 + header
    source, target, sequence = struct.unpack_from("!HHI", packet, tcp)
    offset = (packet[tcp + 12] >> 4) * 4
    data = packet[tcp + offset : 14 + total] if total else packet[tcp + offset :]
    if not data:
        return None
    return (packet[26:30], source, packet[30:34], target), sequence, data


def _joined(pieces: dict[int, bytes]) -> bytes:
    """Numbers begin anywhere and start over at their end, so they are counted from the first that was heard."""
    first = next(iter(pieces))
    half = _SEQUENCES // 2
    placed = {(number - first + half) % _SEQUENCES - half: d for number, d in pieces.items()}
    whole, expected = b"", min(placed)
    for at in sorted(placed):
        whole += placed[at][max(0, expected - at) :]
        expected = max(expected, at + len(placed[at]))
    return whole
