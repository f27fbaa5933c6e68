"""What a task tries to reach, run inside a sandbox or wherever else; stdlib only. Prints what answered as JSON.

reaching.py '{"targets": {name: address}, "within_s": 0.6}'   or   '{"names": true}'   or   '{"resolved": [name]}'
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import sys
import time
from ipaddress import IPv4Address, ip_address
from typing import Any

PORT = 8080
PATIENCE_S = 240.0  # for what must answer
MOST_ASKED, AT_ONCE = 5000, 32
REFUSED = 5


def attempt(
    targets: dict[str, str], within_s: float = 0.6, enough: int | None = None
) -> dict[str, list[str]]:
    """By TCP and UDP at once. What answered, by target; it ends when that many have, or all."""
    waiting: dict[socket.socket, tuple[str, str]] = {}
    reached: dict[str, list[str]] = {name: [] for name in targets}
    for name, address in targets.items():
        for kind, word in ((socket.SOCK_STREAM, "tcp"), (socket.SOCK_DGRAM, "udp")):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            try:
                each = socket.socket(family, kind)
            except OSError:  # a guest's kernel has no IPv6 at all
                continue
            each.setblocking(False)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            waiting[each] = (name, word)
            host, _, scope = address.partition("%")
            where: tuple[Any, ...] = (host, PORT)
            if scope:
                where = (host, PORT, 0, int(scope))
            with contextlib.suppress(OSError):
                if word == "udp":
                    each.sendto(b"anybody?", where)
                elif not ip_address(host).is_multicast:
                    each.connect(where)
    poll = select.poll()
    by_number = {each.fileno(): each for each in waiting}
    for each in waiting:
        poll.register(each, select.POLLIN)
    until = time.monotonic() + within_s
    everything = 2 * len(targets) if enough is None else enough
    while (left := until - time.monotonic()) > 0 and sum(map(len, reached.values())) < everything:
        for number, _ in poll.poll(left * 1000):
            each = by_number[number]
            poll.unregister(each)
            name, word = waiting[each]
            with contextlib.suppress(OSError):
                if each.recv(16) == b"here":
                    reached[name].append(word)
    for each in waiting:
        each.close()
    return reached


def question_for(name: str, kind: int) -> bytes:
    labels = b"".join(bytes((len(p),)) + p.encode() for p in name.split("."))
    head = struct.pack("!HHHHHH", 7, 0x100, 1, 0, 0, 0)
    return head + labels + b"\0" + struct.pack("!HH", kind, 1)


def ask_whole(name: str, kind: int = 1, *, stream: bool = False, at: str = "127.0.0.53") -> bytes:
    """What a name server says of it."""
    question = question_for(name, kind)
    how = socket.SOCK_STREAM if stream else socket.SOCK_DGRAM
    with socket.socket(socket.AF_INET, how) as asking:
        asking.settimeout(PATIENCE_S)
        asking.connect((at, 53))
        if stream:
            asking.sendall(struct.pack("!H", len(question)) + question)
            return asking.recv(4096)[2:]
        asking.send(question)
        return asking.recv(4096)


def ask(name: str, kind: int = 1, *, stream: bool = False, at: str = "127.0.0.53") -> list[str]:
    """The addresses a name server gives for it."""
    answer = ask_whole(name, kind, stream=stream, at=at)
    (count,) = struct.unpack_from("!H", answer, 6)
    begin = len(question_for(name, kind))
    return [
        str(IPv4Address(answer[begin + 16 * n + 12 : begin + 16 * n + 16])) for n in range(count)
    ]


def refused_after(count: int) -> int:
    """How many names were asked for until that many were refused. Many at once: one by one is no flood on a slow machine."""
    refused = asked = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.settimeout(PATIENCE_S)
        asking.connect(("127.0.0.53", 53))
        while refused < count and asked < MOST_ASKED:
            for _ in range(AT_ONCE):
                asked += 1
                asking.send(question_for(f"n{asked}.example", 1))
            refused += sum(asking.recv(4096)[3] & 15 == REFUSED for _ in range(AT_ONCE))
    return asked


def lookups() -> dict[str, Any]:
    """What names resolve to in here, by the resolver at its address; how long all of it took."""
    began = time.monotonic()
    told = {
        "good.example": ask("good.example"),
        "good.example by tcp": ask("good.example", stream=True),
        "inside.example": ask("inside.example"),
        "mixed.example": ask("mixed.example"),
        "rebind.example": [ask("rebind.example") for _ in range(4)],
        "text": ask("good.example", 16),
        "flood": refused_after(60),
    }
    return {**told, "took_s": time.monotonic() - began}


def resolved(name: str) -> list[str]:
    """As a program does, by whatever its library looks at."""
    try:
        found = socket.getaddrinfo(name, PORT, socket.AF_INET, socket.SOCK_STREAM)
    except socket.gaierror:
        return []
    return [str(each[4][0]) for each in found]


def work(order: dict[str, Any]) -> Any:
    if "names" in order:
        return lookups()
    if "resolved" in order:
        return {name: resolved(name) for name in order["resolved"]}
    return attempt(order["targets"], order.get("within_s", 0.6))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(work(json.loads(sys.argv[1]))))
