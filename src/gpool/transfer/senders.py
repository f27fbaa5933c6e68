"""HTTP senders for threads and for asyncio; they know nothing of what they send.

The one for threads is on the client's hot path: small requests use kept connections of our own (`connections`),
streams and files the HTTP library's transport.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import BinaryIO

import httpx2

from gpool.core.errors import Forbidden, GpoolError, Unreachable
from gpool.core.model import MIB
from gpool.transfer.artifacts import download, upload
from gpool.transfer.connections import KEPT_IDLE_S, KeptConnections, Waits, head_of
from gpool.transfer.keys import pinned_context, wrong_certificate
from gpool.transfer.object_stores import StoreAccess, request_to
from gpool.transfer.requests import (
    AWAY,
    Address,
    AskedPauses,
    Landing,
    LeaseRef,
    Patience,
    Pause,
    Reply,
    Request,
    Steps,
    origin_of,
    patiently,
)

CONNECT_S, READ_S = 10.0, 60.0
STORE_TIMEOUT = {"connect": 5.0, "read": READ_S, "write": READ_S, "pool": READ_S}
CHUNK_BYTES = MIB
PATIENT = Patience(10.0, 0.1, 5.0)
ASKED_S = 60.0
"""Most time that a transfer waits because the server asks for it."""
FIRST_CONTACT_S = 2.0
"""Patience before the first answer: the server is more likely off than restarting."""


Vouch = Callable[[Request], Mapping[str, str]]
"""Returns headers that authenticate this request; raises `Unreachable` while it cannot."""


def _headers(token: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


def _tls(address: Address) -> ssl.SSLContext | bool:
    address.refuse_if_open()
    return True if address.fingerprint is None else pinned_context(address.fingerprint)


def _body(request: Request) -> bytes:
    return request.body if isinstance(request.body, bytes) else request.body.read()


def _unreachable(address: Address, error: httpx2.TransportError | OSError) -> GpoolError:
    wrong = wrong_certificate(error)
    if wrong is not None:
        return Forbidden(f"{address.url}: {wrong}")
    what = str(error) or type(error).__name__
    return Unreachable(f"{address.url} does not answer ({what}); is the server running?")


def _store_away(stores: StoreAccess, request: Request, error: httpx2.TransportError) -> Unreachable:
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
        stores.failed(request.path)
    origin = origin_of(request.path)
    return Unreachable(f"the object store at {origin} does not answer ({error!s:.200})")


def _lands(request: Request, status: int) -> Landing | None:
    into = request.into
    if into is None or status not in (200, 206):
        return None
    if status == 200 and into.size:
        into.begin_again()
    return into


@contextmanager
def _part_of(target: Path) -> Iterator[BinaryIO]:
    """File beside the target: it replaces the target on success, else it is kept for a resume."""
    part = target.with_name(target.name + ".part")
    part.touch()
    with part.open("r+b") as file:
        try:
            yield file
        except GpoolError:
            if not file.seek(0, os.SEEK_END):
                part.unlink()
            raise
    part.replace(target)


class Sender:
    """Thread-safe."""

    def __init__(
        self,
        address: Address,
        token: str | None,
        random: Random,
        *,
        patience: Patience = PATIENT,
        transport: httpx2.BaseTransport | None = None,
        stores: StoreAccess | None = None,
    ) -> None:
        self._address, self._random, self._patience = address, random, patience
        self._stores = stores or StoreAccess(address)
        self._to_stores: httpx2.HTTPTransport | None = None
        self._direct: KeptConnections | None = None  # None: an application in this process
        if transport is None:
            tls = httpx2.create_ssl_context(_tls(address))
            is_tls = address.url.lower().startswith("https:")
            self._direct = KeptConnections(address.url, tls if is_tls else None)
            limits = httpx2.Limits(max_connections=32, keepalive_expiry=KEPT_IDLE_S)
            transport = httpx2.HTTPTransport(verify=tls, limits=limits)
        self._transport = transport
        self._base = httpx2.URL(address.url)
        self._prefix = self._base.raw_path.rstrip(b"/")
        self._target = self._prefix.decode("ascii")
        self._headers = [
            ("Host", self._base.netloc.decode()),
            ("User-Agent", "gpool"),
            *_headers(token).items(),
        ]
        self._closed = threading.Event()
        self._answered = False
        self.date: str | None = None
        """The server's clock at its last answer, as HTTP writes it."""

    def close(self) -> None:
        self._closed.set()
        self._transport.close()
        if self._to_stores is not None:
            self._to_stores.close()
        if self._direct is not None:
            self._direct.close()

    def send(self, request: Request, read_s: float = READ_S) -> Reply:
        """`Unreachable` without a reply."""
        if self._direct is not None and request.into is None:
            return self.exchange(request, read_s)
        with self.open(request, read_s) as answer:
            landing = _lands(request, answer.status_code)
            if landing is None:
                return Reply(answer.status_code, answer.headers, _read(answer))
            for (
                piece
            ) in answer.iter_bytes():  # unsized: a sized iterator loses its buffer on a break
                landing.write(piece)
            return Reply(answer.status_code, answer.headers)

    def exchange(self, request: Request, read_s: float) -> Reply:
        """Send over a kept connection and read the whole reply."""
        assert self._direct is not None
        body = _body(request)
        pairs = (*self._headers, *request.headers.items())
        head = head_of(request.method, self._target + request.path, pairs, len(body))
        try:
            reply = self._direct.exchange(
                request.method, head, body, Waits(CONNECT_S, read_s, READ_S)
            )
        except OSError as error:
            raise _unreachable(self._address, error) from error
        self._answered = self._answered or reply.status not in AWAY
        self.date = reply.headers.get("date", self.date)
        return reply

    @contextmanager
    def open(self, request: Request, read_s: float = READ_S) -> Iterator[httpx2.Response]:
        """A broken connection raises `Unreachable`, in the block too."""
        pairs = [*self._headers, *request.headers.items()]
        built = httpx2.Request(
            request.method,
            self._base.copy_with(raw_path=self._prefix + request.path.encode("ascii")),
            headers=pairs,
            content=_body(request) or None,
            extensions={
                "timeout": {"connect": CONNECT_S, "read": read_s, "write": READ_S, "pool": read_s}
            },
        )
        try:
            answer = self._transport.handle_request(built)
            self._answered = self._answered or answer.status_code not in AWAY
            self.date = answer.headers.get("date", self.date)
            try:
                yield answer
            finally:
                with suppress(httpx2.TransportError):
                    answer.close()
        except httpx2.TransportError as error:
            raise _unreachable(self._address, error) from error

    def pauses(self) -> Iterator[float]:
        patience = self._patience
        if not self._answered:
            patience = replace(patience, total_s=min(FIRST_CONTACT_S, patience.total_s))
        return patience.pauses(self._random)

    def wait(self, seconds: float) -> bool:
        """True if the sender was closed meanwhile."""
        return self._closed.wait(seconds)

    def carry_out(self, begin: Callable[[], Steps]) -> None:
        steps = patiently(begin, self.pauses, AskedPauses(ASKED_S, self._random))
        came: Reply | Unreachable | None = None
        with suppress(StopIteration):
            while True:
                step = next(steps) if came is None else steps.send(came)
                if isinstance(step, Pause):
                    came = None
                    if self.wait(step.seconds):
                        raise Unreachable(f"the connection to {self._address.url} was closed")
                    continue
                try:
                    came = self._send_to_store(step) if step.to_store else self.send(step)
                except Unreachable as error:
                    came = error

    def _send_to_store(self, request: Request) -> Reply:
        destination = self._stores.destination(request.path)
        built = request_to(destination, request, _body(request), STORE_TIMEOUT)
        if self._to_stores is None:
            self._to_stores = httpx2.HTTPTransport()
        try:
            answer = self._to_stores.handle_request(built)
            try:
                landing = _lands(request, answer.status_code)
                if landing is None:
                    return Reply(answer.status_code, answer.headers, answer.read())
                for piece in answer.iter_bytes():
                    landing.write(piece)
                return Reply(answer.status_code, answer.headers)
            finally:
                with suppress(httpx2.TransportError):
                    answer.close()
        except httpx2.TransportError as error:
            raise _store_away(self._stores, request, error) from error

    def upload(self, file: Path, sha256: str, size: int, lease: LeaseRef | None = None) -> None:
        self.carry_out(lambda: upload(file, sha256, size, lease))

    def download(self, sha256: str, target: Path, lease: LeaseRef | None = None) -> None:
        """Write a complete, verified file or none."""
        with _part_of(target) as file:
            landing = Landing(file)
            self.carry_out(lambda: download(sha256, landing, lease))


def _read(answer: httpx2.Response) -> bytes:
    stream = answer.stream
    if "content-encoding" in answer.headers or not isinstance(stream, httpx2.SyncByteStream):
        return answer.read()
    return b"".join(stream)


async def _to_its_end(work: Callable[[bytes], None], data: bytes) -> None:
    """Wait for the thread despite cancellation: a later write must not overlap."""
    running = asyncio.ensure_future(asyncio.to_thread(work, data))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


async def _read_body(request: Request) -> bytes:
    if isinstance(request.body, bytes):
        return request.body
    return await asyncio.to_thread(request.body.read)


async def _received(request: Request, answer: httpx2.Response) -> Reply:
    landing = _lands(request, answer.status_code)
    if landing is None:
        return Reply(answer.status_code, answer.headers, await answer.aread())
    held = bytearray()  # a thread per piece would cost more than the writes
    try:
        async for piece in answer.aiter_bytes():
            held += piece
            if len(held) >= CHUNK_BYTES:
                whole, held = bytes(held), bytearray()
                await _to_its_end(landing.write, whole)
    finally:
        landing.write(bytes(held))
    return Reply(answer.status_code, answer.headers)


class AsyncSender:
    def __init__(
        self,
        address: Address,
        token: str | None,
        random: Random,
        *,
        vouch: Vouch | None = None,
        patience: Patience = PATIENT,
        transport: httpx2.AsyncBaseTransport | None = None,
        stores: StoreAccess | None = None,
        current: Callable[[], Address] | None = None,
    ) -> None:
        """`current` returns the server to ask now, one with the certificate of `address`."""
        self._current = current or (lambda: address)
        self._random, self._patience = random, patience
        self._stores = stores or StoreAccess(address)
        self._to_stores: httpx2.AsyncHTTPTransport | None = None
        self._vouch = vouch
        self._http = httpx2.AsyncClient(
            headers=_headers(token),
            timeout=httpx2.Timeout(READ_S, connect=CONNECT_S),
            transport=transport or httpx2.AsyncHTTPTransport(verify=_tls(address)),
        )

    async def close(self) -> None:
        await self._http.aclose()
        if self._to_stores is not None:
            await self._to_stores.aclose()

    async def send(self, request: Request) -> Reply:
        content = await _read_body(request)
        vouched = self._vouch(request) if self._vouch is not None else {}
        address = self._current()
        built = self._http.build_request(
            request.method,
            address.url.rstrip("/") + request.path,
            headers={**request.headers, **vouched},
            content=content,
        )
        try:
            answer = await self._http.send(built, stream=True)
            try:
                if answer.status_code == 401 and self._vouch is not None:
                    raise Unreachable(f"{address.url} rejected the node's proof")
                return await _received(request, answer)
            finally:
                await answer.aclose()
        except httpx2.TransportError as error:
            raise _unreachable(address, error) from error

    async def _send_to_store(self, request: Request) -> Reply:
        destination = await asyncio.to_thread(self._stores.destination, request.path)
        built = request_to(destination, request, await _read_body(request), STORE_TIMEOUT)
        if self._to_stores is None:
            self._to_stores = httpx2.AsyncHTTPTransport()
        try:
            answer = await self._to_stores.handle_async_request(built)
            try:
                return await _received(request, answer)
            finally:
                await answer.aclose()
        except httpx2.TransportError as error:
            raise _store_away(self._stores, request, error) from error

    async def carry_out(self, begin: Callable[[], Steps]) -> None:
        asked = AskedPauses(ASKED_S, self._random)
        steps = patiently(begin, lambda: self._patience.pauses(self._random), asked)
        came: Reply | Unreachable | None = None
        with suppress(StopIteration):
            while True:
                step = next(steps) if came is None else steps.send(came)
                if isinstance(step, Pause):
                    came = None
                    await asyncio.sleep(step.seconds)
                    continue
                try:
                    sent = self._send_to_store(step) if step.to_store else self.send(step)
                    came = await sent
                except Unreachable as error:
                    came = error

    async def upload(
        self, file: Path, sha256: str, size: int, lease: LeaseRef | None = None
    ) -> None:
        await self.carry_out(lambda: upload(file, sha256, size, lease))

    async def download(self, sha256: str, target: Path, lease: LeaseRef | None = None) -> None:
        with _part_of(target) as file:
            landing = await asyncio.to_thread(Landing, file)  # hashes the existing bytes
            await self.carry_out(lambda: download(sha256, landing, lease))
