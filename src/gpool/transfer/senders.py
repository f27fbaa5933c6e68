"""The two thin senders: one for threads, one for asyncio. What is sent and how replies read is decided elsewhere."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random

import httpx2

from gpool.core.errors import Invalid, Unreachable
from gpool.core.model import MIB
from gpool.transfer.artifacts import LeaseRef, Steps, download, upload
from gpool.transfer.requests import Address, Backoff, FilePart, Reply, Request

TIMEOUT = httpx2.Timeout(60.0, connect=10.0)
CHUNK_BYTES = MIB
PATIENT = Backoff()


def _headers(address: Address, token: str | None) -> dict[str, str]:
    if address.fingerprint is not None:
        raise Invalid(
            "this version cannot check a pinned certificate yet; "
            "use an address whose certificate the system trusts"
        )
    return {"Authorization": f"Bearer {token}"} if token else {}


def _body(request: Request) -> bytes:
    if isinstance(request.body, FilePart):
        with request.body.file.open("rb") as file:
            file.seek(request.body.offset)
            return file.read(request.body.length)
    return request.body


def _reply(answer: httpx2.Response, body: bytes) -> Reply:
    return Reply(answer.status_code, {k.lower(): v for k, v in answer.headers.items()}, body)


def _mode(status: int) -> str:
    return "ab" if status == 206 else "wb"


def _unreachable(address: Address, error: httpx2.TransportError) -> Unreachable:
    what = str(error) or type(error).__name__
    return Unreachable(f"{address.url} cannot be reached: {what}; is the server running?")


class Sender:
    """Sends from a thread."""

    def __init__(
        self,
        address: Address,
        token: str | None,
        random: Random,
        *,
        backoff: Backoff = PATIENT,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        self._address, self._random, self._backoff = address, random, backoff
        self._http = httpx2.Client(
            base_url=address.url,
            headers=_headers(address, token),
            timeout=TIMEOUT,
            transport=transport,
        )

    def close(self) -> None:
        self._http.close()

    def send(self, request: Request) -> Reply:
        """One request, one reply; `Unreachable` when there is none."""
        built = self._http.build_request(
            request.method, request.path, headers=dict(request.headers), content=_body(request)
        )
        try:
            answer = self._http.send(built, stream=request.into is not None)
            if request.into is None:
                return _reply(answer, answer.content)
            try:
                if answer.status_code not in (200, 206):
                    return _reply(answer, answer.read())
                with request.into.open(_mode(answer.status_code)) as file:
                    for chunk in answer.iter_bytes(CHUNK_BYTES):
                        file.write(chunk)
                return _reply(answer, b"")
            finally:
                answer.close()
        except httpx2.TransportError as error:
            raise _unreachable(self._address, error) from error

    def upload(self, file: Path, sha256: str, size: int, lease: LeaseRef | None = None) -> None:
        self._carry_out(lambda: upload(file, sha256, size, lease))

    def download(self, sha256: str, target: Path, lease: LeaseRef | None = None) -> None:
        self._carry_out(lambda: download(sha256, target, lease))

    def _carry_out(self, begin: Callable[[], Steps]) -> None:
        delays = self._backoff.delays(self._random)
        while True:
            try:
                self._run(begin())
            except Unreachable:
                delay = next(delays, None)
                if delay is None:
                    raise
                threading.Event().wait(delay)
            else:
                return

    def _run(self, steps: Steps) -> None:
        try:
            request = next(steps)
            while True:
                request = steps.send(self.send(request))
        except StopIteration:
            return


class AsyncSender:
    """Sends from an event loop."""

    def __init__(
        self,
        address: Address,
        token: str | None,
        random: Random,
        *,
        backoff: Backoff = PATIENT,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self._address, self._random, self._backoff = address, random, backoff
        self._http = httpx2.AsyncClient(
            base_url=address.url,
            headers=_headers(address, token),
            timeout=TIMEOUT,
            transport=transport,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def send(self, request: Request) -> Reply:
        """One request, one reply; `Unreachable` when there is none."""
        is_file = isinstance(request.body, FilePart)
        content = await asyncio.to_thread(_body, request) if is_file else _body(request)
        built = self._http.build_request(
            request.method, request.path, headers=dict(request.headers), content=content
        )
        try:
            answer = await self._http.send(built, stream=request.into is not None)
            if request.into is None:
                return _reply(answer, answer.content)
            try:
                if answer.status_code not in (200, 206):
                    return _reply(answer, await answer.aread())
                file = await asyncio.to_thread(request.into.open, _mode(answer.status_code))
                with file:
                    async for chunk in answer.aiter_bytes(CHUNK_BYTES):
                        await asyncio.to_thread(file.write, chunk)
                return _reply(answer, b"")
            finally:
                await answer.aclose()
        except httpx2.TransportError as error:
            raise _unreachable(self._address, error) from error

    async def upload(
        self, file: Path, sha256: str, size: int, lease: LeaseRef | None = None
    ) -> None:
        await self._carry_out(lambda: upload(file, sha256, size, lease))

    async def download(self, sha256: str, target: Path, lease: LeaseRef | None = None) -> None:
        await self._carry_out(lambda: download(sha256, target, lease))

    async def _carry_out(self, begin: Callable[[], Steps]) -> None:
        delays = self._backoff.delays(self._random)
        while True:
            try:
                await self._run(begin())
            except Unreachable:
                delay = next(delays, None)
                if delay is None:
                    raise
                await asyncio.sleep(delay)
            else:
                return

    async def _run(self, steps: Steps) -> None:
        try:
            request = next(steps)
            while True:
                reply = await self.send(request)
                request = await asyncio.to_thread(_step, steps, reply)  # may hash a large file
        except _Over:
            return


class _Over(Exception):
    """`StopIteration` may not cross a thread's future."""


def _step(steps: Steps, reply: Reply) -> Request:
    try:
        return steps.send(reply)
    except StopIteration:
        raise _Over from None
