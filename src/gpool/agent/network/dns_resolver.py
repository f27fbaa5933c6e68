"""DNS resolver of the sandbox networks: answers with addresses the sandbox may reach, nothing else; never blocks.

Its sockets lie inside each network's namespace, so no other process reaches it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import struct
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from pathlib import Path

from gpool.agent.network import dns_messages

RESOLVER = "127.0.0.53"
PORT = 53
UPSTREAM_WITHIN_S = 3.0
STREAM_WITHIN_S = 5.0
MAX_WAITING = 64  # concurrent upstream queries per sandbox
MAX_STREAMS = 8
BURST = 10
HEARD = 10  # messages read per permitted query; past it reading pauses
DEAF_S = 0.1
LETTERS_A_QUERY = 24  # the allowance of letters grows with that of queries

Server = tuple[str, int]


def configured_servers(path: Path = Path("/etc/resolv.conf")) -> tuple[Server, ...]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return ()
    words = (line.split() for line in lines)
    return tuple((w[1], PORT) for w in words if len(w) > 1 and w[0] == "nameserver")[:3]


class Allowance:
    def __init__(self, per_s: float, most: float, now: float) -> None:
        self._per_s = per_s
        self._most = most
        self._left = most
        self._at = now

    def take(self, amount: float, now: float) -> bool:
        self._left = min(self._most, self._left + (now - self._at) * self._per_s)
        self._at = now
        if amount > self._left:
            return False
        self._left -= amount
        return True


@dataclass(frozen=True, slots=True)
class Names:
    may_reach: Callable[[IPv4Address], bool]
    queries_per_s: int
    servers: Sequence[Server]
    known: Mapping[str, tuple[IPv4Address, ...]] = field(default_factory=dict)
    asks: bool = True  # query upstream for unknown names
    within_s: float = UPSTREAM_WITHIN_S  # per server


@dataclass(slots=True)
class Tally:
    answered: int = 0
    stripped: int = 0  # addresses removed because the sandbox may not reach them
    refused: int = 0  # over the allowance, or not answered
    forwarded: int = 0
    failed: int = 0


@dataclass(slots=True)
class Resolver:
    """Owns its datagram and listening sockets."""

    datagrams: socket.socket
    streams: socket.socket
    names: Names
    tally: Tally = field(default_factory=Tally)
    report: Callable[[str], None] | None = None  # called with each name answered as missing
    _running: set[asyncio.Task[None]] = field(default_factory=set)
    _open_streams: int = 0
    _queries: Allowance = field(init=False)
    _letters: Allowance = field(init=False)
    _heard: Allowance = field(init=False)
    _deaf: asyncio.TimerHandle | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        rate = self.names.queries_per_s
        now = loop.time()
        self._queries = Allowance(rate, BURST * rate, now)
        self._letters = Allowance(LETTERS_A_QUERY * rate, LETTERS_A_QUERY * BURST * rate, now)
        self._heard = Allowance(HEARD * rate, HEARD * BURST * rate, now)
        self.datagrams.setblocking(False)
        self.streams.setblocking(False)
        self._listen()

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self.datagrams.fileno(), self._hear_datagram)
        loop.add_reader(self.streams.fileno(), self._hear_stream)

    def _is_too_loud(self) -> bool:
        """While reading pauses, the kernel drops a flood at no cost."""
        loop = asyncio.get_running_loop()
        if self._heard.take(1, loop.time()):
            return False
        for each in (self.datagrams, self.streams):
            loop.remove_reader(each.fileno())
        self._deaf = loop.call_later(DEAF_S, self._listen)
        return True

    def close(self) -> None:
        loop = asyncio.get_running_loop()
        if self._deaf is not None:
            self._deaf.cancel()
        for each in (self.datagrams, self.streams):
            if each.fileno() >= 0:
                loop.remove_reader(each.fileno())
                each.close()
        for task in self._running:
            task.cancel()

    def _hear_datagram(self) -> None:
        """One message per loop iteration, so that a flood does not delay the agent."""
        if self._is_too_loud():
            return
        try:
            message, sender = self.datagrams.recvfrom(dns_messages.MAX_MESSAGE_BYTES + 1)
        except OSError:
            return
        self._spawn(self._answer_datagram(message, sender))

    async def _answer_datagram(self, message: bytes, sender: tuple[str, int]) -> None:
        answer = await self._answer(message)
        if answer is not None:
            with contextlib.suppress(OSError):  # full or closed: the client retries
                self.datagrams.sendto(answer, sender)

    def _hear_stream(self) -> None:
        if self._is_too_loud():
            return
        try:
            stream, _ = self.streams.accept()
        except OSError:
            return
        if self._open_streams >= MAX_STREAMS:
            stream.close()
            return
        stream.setblocking(False)
        self._open_streams += 1
        self._spawn(self._serve_stream(stream))

    async def _serve_stream(self, stream: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(STREAM_WITHIN_S):
                (length,) = struct.unpack("!H", await _exactly(loop, stream, 2))
                message = await _exactly(loop, stream, min(length, dns_messages.MAX_MESSAGE_BYTES))
                answer = await self._answer(message)
                if answer is not None:
                    await loop.sock_sendall(stream, struct.pack("!H", len(answer)) + answer)
        except (OSError, TimeoutError):
            pass
        finally:
            self._open_streams -= 1
            stream.close()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _answer(self, message: bytes) -> bytes | None:
        try:
            question = dns_messages.read_question(message)
        except dns_messages.BadMessage:
            self.tally.refused += 1
            return None  # no answer: it could be used for amplification
        if question.kind != dns_messages.A:
            # Sandbox networks carry no IPv6; other record types carry text.
            self.tally.answered += 1
            return dns_messages.write_answer(question, dns_messages.NO_ERROR)
        known = self.names.known.get(question.name)
        if known is not None or not self.names.asks:
            return self._say(question, known or (), dns_messages.MAX_TTL_S)
        now = asyncio.get_running_loop().time()
        affordable = self._queries.take(1, now) and self._letters.take(
            dns_messages.cost(question.name), now
        )
        if not affordable or len(self._running) > MAX_WAITING:
            self.tally.refused += 1
            return dns_messages.write_answer(question, dns_messages.REFUSED)
        if not question.name:
            return self._say(question, (), 0)
        said = await self._ask(question.name)
        if said is None or said.code not in (dns_messages.NO_ERROR, dns_messages.NO_NAME):
            self.tally.failed += 1
            return dns_messages.write_answer(question, dns_messages.SERVER_FAILURE)
        return self._say(question, said.addresses, said.ttl_s)

    def _say(
        self, question: dns_messages.Question, found: Sequence[IPv4Address], ttl_s: int
    ) -> bytes:
        """A name without a permitted address is reported missing, even if it exists."""
        reachable = [address for address in found if self.names.may_reach(address)]
        self.tally.answered += 1
        self.tally.stripped += len(found) - len(reachable)
        if not reachable and self.report is not None:
            self.report(question.name)
        code = dns_messages.NO_ERROR if reachable else dns_messages.NO_NAME
        return dns_messages.write_answer(question, code, reachable, ttl_s)

    async def _ask(self, name: str) -> dns_messages.DnsAnswer | None:
        self.tally.forwarded += 1
        for server in self.names.servers:
            try:
                async with asyncio.timeout(self.names.within_s):
                    answer = await _ask_by_datagram(server, name)
                    if answer.truncated:
                        answer = await _ask_by_stream(server, name)
                return answer
            except (OSError, TimeoutError, dns_messages.BadMessage):
                continue
        return None


def _family(server: Server) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in server[0] else socket.AF_INET


async def _ask_by_datagram(server: Server, name: str) -> dns_messages.DnsAnswer:
    """Use a fresh port and id against forged answers."""
    loop = asyncio.get_running_loop()
    number = secrets.randbelow(1 << 16)
    with socket.socket(_family(server), socket.SOCK_DGRAM) as asking:
        asking.setblocking(False)
        await loop.sock_connect(asking, server)
        await loop.sock_sendall(asking, dns_messages.write_question(number, name))
        while True:
            message = await loop.sock_recv(asking, dns_messages.MAX_MESSAGE_BYTES)
            with contextlib.suppress(dns_messages.BadMessage):
                return dns_messages.read_answer(message, number, name)


async def _ask_by_stream(server: Server, name: str) -> dns_messages.DnsAnswer:
    loop = asyncio.get_running_loop()
    number = secrets.randbelow(1 << 16)
    with socket.socket(_family(server), socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        await loop.sock_connect(asking, server)
        question = dns_messages.write_question(number, name)
        await loop.sock_sendall(asking, struct.pack("!H", len(question)) + question)
        (length,) = struct.unpack("!H", await _exactly(loop, asking, 2))
        return dns_messages.read_answer(await _exactly(loop, asking, length), number, name)


async def _exactly(loop: asyncio.AbstractEventLoop, stream: socket.socket, length: int) -> bytes:
    got = bytearray()
    while len(got) < length:
        more = await loop.sock_recv(stream, length - len(got))
        if not more:
            raise ConnectionResetError("ended early")
        got += more
    return bytes(got)
