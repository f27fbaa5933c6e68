"""A server's end of the agent's channel and artifact routes, in this process, speaking the real frames."""

from __future__ import annotations

import asyncio
import hashlib
from http import HTTPStatus
from pathlib import Path

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from gpool.core.model import Allocation, TaskSpec
from gpool.wire.frames import (
    Beat,
    BeatSeen,
    Finished,
    Grants,
    HandedBack,
    Hello,
    Lease,
    Line,
    LogChunk,
    Recorded,
    Refused,
    Released,
    ReportItem,
    Reports,
    ServerFrame,
    Welcome,
    decode_from_agent,
    encode,
)

SECRET = "gpn_secret"


class Desk:
    """Welcomes, confirms, records; keeps every report. Its artifacts can only be fetched."""

    def __init__(self, ttl_us: int = 30_000_000, margin_us: int = 5_000_000) -> None:
        self.ttl_us, self.margin_us = ttl_us, margin_us
        self.hellos: list[Hello] = []
        self.items: list[ReportItem] = []
        self.batches = 0
        self.artifacts: dict[str, bytes] = {}
        self.refuse: Refused | None = None
        self.mute = False  # confirms nothing any more
        self.changed = asyncio.Event()
        self.connection: ServerConnection | None = None
        self.beat = 0
        self.specs: dict[TaskSpec, int] = {}
        self._server: Server | None = None

    async def __aenter__(self) -> Desk:
        self._server = await serve(
            self.converse,
            "127.0.0.1",
            0,
            process_request=self.artifact,
            compression=None,
            max_size=None,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{next(iter(self._server.sockets)).getsockname()[1]}"

    def artifact(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.headers.get("Authorization") != f"Bearer {SECRET}":
            return connection.respond(HTTPStatus.UNAUTHORIZED, "no")
        if not request.path.startswith("/v1/artifacts/"):
            return None
        data = self.artifacts.get(request.path.rsplit("/", 1)[1])
        if data is None:
            return connection.respond(HTTPStatus.NOT_FOUND, "no such artifact")
        headers = Headers({"Content-Length": str(len(data)), "Connection": "close"})
        return Response(200, "OK", headers, data)

    def keep(self, data: bytes) -> str:
        sha256 = hashlib.sha256(data).hexdigest()
        self.artifacts[sha256] = data
        return sha256

    async def converse(self, connection: ServerConnection) -> None:
        self.connection = connection
        async for message in connection:
            assert isinstance(message, bytes)
            frame = decode_from_agent(message)
            match frame:
                case Hello() if self.refuse is not None:
                    await connection.send(encode(self.refuse))
                case Hello():
                    self.hellos.append(frame)
                    self.beat = frame.beat
                    await self.say(Welcome(1, frame.beat, self.ttl_us, self.margin_us, 200_000, ()))
                case Beat() if not self.mute:
                    self.beat = frame.number
                    await self.say(BeatSeen(frame.number))
                case Reports():
                    self.batches += 1
                    self.items += frame.items
                    await self.say(Recorded(frame.sequence))
            self.changed.set()

    async def say(self, frame: ServerFrame) -> None:
        assert self.connection is not None
        await self.connection.send(encode(frame))

    async def grant(
        self, spec: TaskSpec, leases: list[Lease], number: int = 0, *, owner: bool = False
    ) -> None:
        known = self.specs.setdefault(spec, len(self.specs))
        line = Line(Allocation(number, 1000, 1 << 30), 7, owner, known, tuple(leases))
        await self.say(Grants(self.beat, ((known, spec),), (line,)))

    async def until(self, wanted: object, within: float = 10.0) -> None:
        """Wait until `wanted()` holds; looked at whenever something arrived."""
        assert callable(wanted)
        async with asyncio.timeout(within):
            while not wanted():
                self.changed.clear()
                await self.changed.wait()

    def ends(self) -> dict[int, Finished | Released | HandedBack]:
        kinds = (Finished, Released, HandedBack)
        return {item.task: item for item in self.items if isinstance(item, kinds)}

    def log_of(self, task: int) -> bytes:
        return b"".join(i.data for i in self.items if isinstance(i, LogChunk) and i.task == task)


def secret_file(folder: Path) -> Path:
    file = folder / "secret"
    file.write_text(SECRET + "\n")
    return file
