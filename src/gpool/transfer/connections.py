"""Kept HTTP/1.1 connections to one server, for requests and replies that fit into memory. Sends one request at a time.

An HTTP library costs a small request more CPU than the server's database does. Raises `OSError` without a reply.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import monotonic
from urllib.parse import urlsplit

from gpool.core.errors import Invalid
from gpool.transfer.requests import Reply

MOST_CONNECTIONS = 32
KEPT_IDLE_S = 60.0
"""Idle time of a kept connection; the server keeps it longer."""
MAX_HEAD_BYTES = 64 * 1024
READ_BYTES = 64 * 1024
JOINED_BYTES = 64 * 1024
"""A body up to this size is sent with its head."""
_DEFAULT_PORTS = {"http": 80, "https": 443}


class BadReply(OSError):
    """The bytes received are not a reply, or end within one."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Time limits in seconds, of a connection attempt and of each read or write."""

    connect_s: float
    read_s: float
    write_s: float


class HttpConnection:
    """One socket. `idle_since` is the time of the last reply."""

    __slots__ = ("_buffer", "_socket", "idle_since", "is_reusable")

    def __init__(self, opened: socket.socket) -> None:
        self._socket = opened
        self._buffer = b""
        self.idle_since = 0.0
        self.is_reusable = False

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends a read in another thread
        self._socket.close()

    @property
    def is_alive(self) -> bool:
        """Whether an idle connection can be used again; readable means that the server closed it."""
        if monotonic() - self.idle_since > KEPT_IDLE_S:
            return False
        if not hasattr(select, "poll"):  # Windows, where `select` takes any socket number
            return not select.select([self._socket], [], [], 0)[0]
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def exchange(self, method: str, head: bytes, body: bytes, waits: Waits) -> tuple[Reply, bool]:
        """Return the reply, and whether the connection can be used again."""
        early: OSError | None = None
        try:
            self._limit(waits.write_s)
            if len(body) <= JOINED_BYTES:
                self._send(head + body)
            else:
                self._send(head)
                self._send(body)
        except (BrokenPipeError, ConnectionResetError) as error:
            early = error  # the server may have replied before it closed
        self._limit(waits.read_s)
        try:
            return self._reply(method, is_whole=early is None)
        except OSError:
            if early is not None:
                raise early from None
            raise

    def _limit(self, seconds: float) -> None:
        if self._socket.gettimeout() != seconds:
            self._socket.settimeout(seconds)

    def _send(self, data: bytes) -> None:
        sent = self._socket.send(data)
        if sent < len(data):  # each write has the whole time limit
            rest = memoryview(data)[sent:]
            while rest:
                rest = rest[self._socket.send(rest) :]

    # ---- replies (RFC 9112)

    def _reply(self, method: str, *, is_whole: bool) -> tuple[Reply, bool]:
        while True:
            version, status, headers = _parsed_head(self._until(b"\r\n\r\n"))
            if status >= 200:
                break
        coding = headers.get("transfer-encoding")
        length = headers.get("content-length")
        is_kept = is_whole and version == "HTTP/1.1" and "close" not in _words(headers)
        if method == "HEAD" or status in (204, 304):
            body = b""
        elif coding is not None:
            if coding.lower() != "chunked":
                raise BadReply(f"a reply with transfer coding {coding[:40]!r}")
            body = b"".join(self._chunks())
        elif length is not None:
            if not (length.isascii() and length.isdigit() and len(length) < 19):
                raise BadReply(f"a reply of length {length[:40]!r}")
            body = self._exactly(int(length))
        else:
            body, is_kept = self._rest(), False
        if self._buffer:  # nothing was asked for
            is_kept = False
        return Reply(status, headers, body), is_kept

    def _receive(self) -> bytes:
        data = self._socket.recv(READ_BYTES)
        if not data:
            raise BadReply("the connection was closed before the end of the reply")
        return data

    def _until(self, end: bytes) -> bytes:
        while (at := self._buffer.find(end)) < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise BadReply(f"a line or head of more than {MAX_HEAD_BYTES} bytes")
            self._buffer += self._receive()
        found, self._buffer = self._buffer[:at], self._buffer[at + len(end) :]
        return found

    def _exactly(self, size: int) -> bytes:
        if len(self._buffer) < size:
            found = bytearray(self._buffer)
            while len(found) < size:
                found += self._receive()
            self._buffer = bytes(found)
        found_, self._buffer = self._buffer[:size], self._buffer[size:]
        return found_

    def _chunks(self) -> Iterator[bytes]:
        while True:
            text = self._until(b"\r\n").split(b";", 1)[0].strip()
            if not text or len(text) > 16 or text.strip(b"0123456789abcdefABCDEF"):
                raise BadReply(f"a chunk of size {text[:40]!r}")
            size = int(text, 16)
            if not size:
                break
            yield self._exactly(size)
            if self._exactly(2) != b"\r\n":
                raise BadReply("a chunk without an end of line")
        while self._until(b"\r\n"):
            pass  # trailers

    def _rest(self) -> bytes:
        found = bytearray(self._buffer)
        self._buffer = b""
        while data := self._socket.recv(READ_BYTES):
            found += data
        return bytes(found)


def _parsed_head(head: bytes) -> tuple[str, int, dict[str, str]]:
    start, _, rest = head.decode("latin-1").partition("\r\n")
    version, _, status = start.partition(" ")
    number = status[:3]
    if version not in ("HTTP/1.1", "HTTP/1.0") or not (number.isascii() and number.isdigit()):
        raise BadReply(f"a reply that begins with {start[:40]!r}")
    headers: dict[str, str] = {}
    for line in rest.split("\r\n") if rest else ():
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise BadReply(f"a header {line[:40]!r}")
        name, value = name.lower(), value.strip()
        if name in headers:
            if name == "content-length" and headers[name] != value:
                raise BadReply("a reply of two lengths")
            value = value if name == "content-length" else f"{headers[name]}, {value}"
        headers[name] = value
    return version, int(number), headers


def _words(headers: dict[str, str]) -> list[str]:
    value = headers.get("connection")
    return [] if value is None else [word.strip().lower() for word in value.split(",")]


def head_of(method: str, target: str, headers: Iterable[tuple[str, str]], length: int) -> bytes:
    """Request line and headers; `Invalid` if a value would begin another header."""
    lines = [f"{method} {target} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in headers]
    if length or method in ("POST", "PUT", "PATCH"):
        lines.append(f"Content-Length: {length}")
    text = "\r\n".join(lines)
    is_split = text.count("\n") != len(lines) - 1 or text.count("\r") != len(lines) - 1
    if is_split or " " in target or "\0" in text or not text.isascii():
        raise Invalid(
            "a header or the path of the request has a line break, a space or a letter that is not ASCII; "
            "check the server's address and the key"
        )
    return f"{text}\r\n\r\n".encode("ascii")


class KeptConnections:
    """Thread-safe. `tls` is None for plain HTTP."""

    def __init__(self, url: str, tls: ssl.SSLContext | None) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or _DEFAULT_PORTS[parts.scheme]
        self._tls = tls
        self._lock = threading.Lock()
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._idle: list[HttpConnection] = []
        self._busy: set[HttpConnection] = set()
        self._is_closed = False

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            open_ = [*self._idle, *self._busy]
            self._idle.clear()
        for connection in open_:
            connection.close()

    def exchange(self, method: str, head: bytes, body: bytes, waits: Waits) -> Reply:
        with self._connection(waits) as connection:
            reply, connection.is_reusable = connection.exchange(method, head, body, waits)
            return reply

    @contextmanager
    def _connection(self, waits: Waits) -> Iterator[HttpConnection]:
        if not self._room.acquire(timeout=waits.read_s):
            raise TimeoutError(f"all {MOST_CONNECTIONS} connections are in use")
        try:
            connection = self._taken() or self._begin(self._connect(waits.connect_s))
            try:
                connection.is_reusable = False
                yield connection
            finally:
                self._give_back(connection)
        finally:
            self._room.release()

    def _taken(self) -> HttpConnection | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
                self._busy.add(connection)
            if connection.is_alive:
                return connection
            with self._lock:
                self._busy.discard(connection)
            connection.close()

    def _begin(self, connection: HttpConnection) -> HttpConnection:
        with self._lock:
            if not self._is_closed:
                self._busy.add(connection)
                return connection
        connection.close()
        raise ConnectionAbortedError("closed by this program")

    def _give_back(self, connection: HttpConnection) -> None:
        with self._lock:
            self._busy.discard(connection)
            if connection.is_reusable and not self._is_closed:
                connection.idle_since = monotonic()
                self._idle.append(connection)
                return
        connection.close()

    def _connect(self, connect_s: float) -> HttpConnection:
        opened = socket.create_connection((self._host, self._port), timeout=connect_s)
        try:
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                opened = self._tls.wrap_socket(opened, server_hostname=self._host)
        except BaseException:
            opened.close()
            raise
        return HttpConnection(opened)
