"""What runs inside a gang's lane, as a task would; stdlib only. Each function takes and gives what JSON can say."""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hostile import reaching

BLOCK = 1 << 16
SO_NO_CHECK = 11


def serve(ports: list[int]) -> None:
    """TCP: the digest of all that came, once it ended. UDP: what came, back. Says so when it listens; for ever."""
    waiting: list[socket.socket] = []
    for port in ports:
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            each = socket.socket(socket.AF_INET, kind)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("0.0.0.0", port))
            if kind == socket.SOCK_STREAM:
                each.listen(16)
            waiting.append(each)
    sys.stdout.write("ready\n")
    sys.stdout.flush()

    def digest(stream: socket.socket) -> None:
        found = hashlib.sha256()
        while data := stream.recv(BLOCK):
            found.update(data)
        stream.sendall(found.digest())
        stream.close()

    while True:
        for each in select.select(waiting, [], [])[0]:
            if each.type == socket.SOCK_DGRAM:
                data, sender = each.recvfrom(BLOCK)
                each.sendto(data, sender)
            else:
                threading.Thread(target=digest, args=(each.accept()[0],), daemon=True).start()


def send(address: str, port: int, size: int, within_s: float = 240) -> bool:
    """Whether that many bytes came through TCP as they were sent."""
    block = os.urandom(BLOCK)
    found = hashlib.sha256()
    with socket.create_connection((address, port), within_s) as stream:
        while size > 0:
            data = block[: min(size, BLOCK)]
            stream.sendall(data)
            found.update(data)
            size -= len(data)
        stream.shutdown(socket.SHUT_WR)
        return stream.recv(32, socket.MSG_WAITALL) == found.digest()


def ask(address: str, port: int, size: int, within_s: float = 240) -> bool:
    """Whether a datagram of that size came back as it was; asked again while it may be lost."""
    data = os.urandom(size)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.settimeout(min(1.0, within_s))
        for _ in range(max(1, int(within_s))):
            asking.sendto(data, (address, port))
            with contextlib.suppress(TimeoutError):
                if asking.recv(BLOCK) == data:
                    return True
    return False


def tell(address: str, port: int, words: list[str]) -> None:
    """A datagram a word, without a checksum of its own."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as telling:
        telling.setsockopt(socket.SOL_SOCKET, SO_NO_CHECK, 1)
        for word in words:
            telling.sendto(word.encode(), (address, port))


def reach(targets: dict[str, str], within_s: float = 0.6) -> dict[str, list[str]]:
    return reaching.attempt(targets, within_s)


def interfaces() -> list[list[str]]:
    """All there are, and those with an IPv6 address."""
    listed = Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]
    sixth = Path("/proc/thread-self/net/if_inet6")
    six = sixth.read_text().splitlines() if sixth.exists() else []
    return [[line.split(":")[0].strip() for line in listed], [line.split()[-1] for line in six]]


def routed() -> list[str]:
    """Interfaces that routes lead to."""
    listed = Path("/proc/thread-self/net/route").read_text().splitlines()[1:]
    return [line.split()[0] for line in listed]


def name(text: str) -> str:
    return str(reaching.ask(text, at="127.0.0.53"))


INSIDE: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (serve, send, ask, tell, reach, interfaces, routed, name)
}
