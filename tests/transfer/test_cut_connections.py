"""Artifacts over real connections that are cut: both ways, through both senders, into the agent's cache."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from gpool.agent.running.artifact_cache import ArtifactCache
from gpool.core.errors import StaleLease, Unreachable
from gpool.transfer.requests import PART_BYTES, Address, LeaseRef, Patience
from gpool.transfer.senders import AsyncSender, Sender
from tests.tools.processes import PATIENCE_S

LEASE = LeaseRef(1, 1)
PATIENT = Patience(PATIENCE_S, 0.001, 0.01)
HASTY = Patience(0.2, 0.001, 0.01)


class Cutting:
    """A small server of artifacts on loopback. `cuts` are the numbers of bytes after which connections are cut, in turn."""

    def __init__(self) -> None:
        self.whole: dict[str, bytes] = {}
        self.parts: dict[str, bytearray] = {}
        self.cuts: list[int] = []
        self.ranges: list[str] = []
        self.sent = self.taken = 0
        self.conflicts: list[dict[str, object]] = []  # answered to PUTs, in turn
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._talks: dict[asyncio.Task[None], asyncio.Transport] = {}
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Cutting:
        self._thread.start()
        assert self._up.wait(PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    @property
    def address(self) -> Address:
        return Address(f"http://127.0.0.1:{self.port}")

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._talk, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._up.set()
        await self._stop.wait()
        server.close()
        talks = dict(
            self._talks
        )  # before Python 3.12 a server that is closed waits for none of them
        for transport in talks.values():
            transport.abort()
        await asyncio.gather(*talks, return_exceptions=True)
        await server.wait_closed()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talk = asyncio.current_task()
        assert talk is not None
        self._talks[talk] = writer.transport
        talk.add_done_callback(self._talks.pop)
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:] if line)}
        sha256 = path.rpartition("/")[2]
        if method == "HEAD":
            return await self._about(writer, sha256)
        if method == "GET":
            return await self._give(writer, sha256, headers)
        return await self._take(reader, writer, sha256, headers)

    async def _answer(
        self, writer: asyncio.StreamWriter, status: int, body: bytes = b"", **headers: object
    ) -> bool:
        lines = [
            f"HTTP/1.1 {status} X",
            *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items()),
        ]
        if "Content_Length" not in headers:
            lines.append(f"Content-Length: {len(body)}")
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await writer.drain()
        return True

    async def _about(self, writer: asyncio.StreamWriter, sha256: str) -> bool:
        if sha256 in self.whole:
            return await self._answer(writer, 200, Content_Length=len(self.whole[sha256]))
        here = len(self.parts.get(sha256, b""))
        return await self._answer(writer, 404, Upload_Offset=here)

    async def _give(
        self, writer: asyncio.StreamWriter, sha256: str, headers: dict[str, str]
    ) -> bool:
        data, first = self.whole[sha256], 0
        if (wanted := headers.get("range")) is not None:
            self.ranges.append(wanted)
            first = int(wanted.removeprefix("bytes=").rstrip("-"))
        rest = data[first:]
        cut = self.cuts.pop(0) if self.cuts else None
        await self._answer(writer, 206 if first else 200, Content_Length=len(rest))
        given = rest if cut is None else rest[:cut]
        self.sent += len(given)
        writer.write(given)
        await writer.drain()
        if cut is not None:
            writer.close()  # what was written still arrives, then the end comes too early
            await writer.wait_closed()
            return False
        return True

    async def _take(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        sha256: str,
        headers: dict[str, str],
    ) -> bool:
        length = int(headers["content-length"])
        total = length
        first = 0
        if (given := headers.get("content-range")) is not None:
            span, _, all_of_it = given.removeprefix("bytes ").partition("/")
            first, total = int(span.partition("-")[0]), int(all_of_it)
        part = self.parts.setdefault(sha256, bytearray())
        if self.conflicts or first != len(part):
            await reader.readexactly(length)
            problem = self.conflicts.pop(0) if self.conflicts else {"code": "conflict"}
            return await self._answer(writer, 409, json.dumps(problem).encode())
        cut = self.cuts.pop(0) if self.cuts else None
        body = await reader.readexactly(length if cut is None else min(cut, length))
        part += body
        self.taken += len(body)
        if cut is not None:
            return False
        if len(part) == total:
            self.whole[sha256] = bytes(self.parts.pop(sha256))
            return await self._answer(writer, 201)
        return await self._answer(writer, 202, Upload_Offset=len(part))


@pytest.fixture
def server() -> Iterator[Cutting]:
    with Cutting() as running:
        yield running


@pytest.fixture(params=["threads", "asyncio"])
def do(request: pytest.FixtureRequest, server: Cutting) -> Callable[..., None]:
    """The same operation by either sender."""

    def by_threads(name: str, *arguments: object, patience: Patience = PATIENT) -> None:
        sender = Sender(server.address, None, Random(1), patience=patience)
        try:
            getattr(sender, name)(*arguments)
        finally:
            sender.close()

    def by_loop(name: str, *arguments: object, patience: Patience = PATIENT) -> None:
        async def go() -> None:
            sender = AsyncSender(server.address, None, Random(1), patience=patience)
            try:
                await getattr(sender, name)(*arguments)
            finally:
                await sender.close()

        asyncio.run(go())

    return by_threads if request.param == "threads" else by_loop


def content(size: int, seed: int = 1) -> tuple[bytes, str]:
    data = Random(seed).randbytes(size)
    return data, hashlib.sha256(data).hexdigest()


def test_a_download_that_is_cut_again_and_again_sends_no_byte_twice(
    server: Cutting, do: Callable[..., None], tmp_path: Path
) -> None:
    data, sha256 = content(9_000_001)
    server.whole[sha256] = data
    server.cuts = [1, 2_500_000, 3, 4_000_000, 0]
    do("download", sha256, tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == data
    assert server.sent == len(data)
    assert [path.name for path in tmp_path.iterdir()] == ["got"]


def test_a_download_given_up_goes_on_in_the_next_try(
    server: Cutting, do: Callable[..., None], tmp_path: Path
) -> None:
    data, sha256 = content(3_000_000)
    server.whole[sha256] = data
    server.cuts = [1_000_000, *[0] * 10_000]
    with pytest.raises(Unreachable):
        do("download", sha256, tmp_path / "got", patience=HASTY)
    assert [path.name for path in tmp_path.iterdir()] == ["got.part"]
    server.cuts, server.sent = [], 0
    do("download", sha256, tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == data
    assert server.sent == 2_000_000


def test_a_spoilt_part_is_fetched_anew_and_never_lands(
    server: Cutting, do: Callable[..., None], tmp_path: Path
) -> None:
    data, sha256 = content(2_000_000)
    server.whole[sha256] = data
    (tmp_path / "got.part").write_bytes(b"\0" * 500_000)
    do("download", sha256, tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == data


def test_an_upload_that_is_cut_goes_on_where_the_server_is(
    server: Cutting, do: Callable[..., None], tmp_path: Path
) -> None:
    data, sha256 = content(2 * PART_BYTES + 77)
    file = tmp_path / "source"
    file.write_bytes(data)
    server.cuts = [5_000_000, 0, 3_000_000]
    do("upload", file, sha256, len(data))
    assert server.whole == {sha256: data}
    assert server.taken == len(data)


def test_an_upload_that_meets_another_of_the_same_goes_on_behind_it(
    server: Cutting, do: Callable[..., None], tmp_path: Path
) -> None:
    data, sha256 = content(1000)
    file = tmp_path / "source"
    file.write_bytes(data)
    server.parts[sha256] = bytearray(data[:400])
    server.conflicts = [{"code": "conflict", "detail": "another request is uploading it"}] * 3
    do("upload", file, sha256, len(data))
    assert server.whole == {sha256: data}


def test_an_old_lease_is_refused_and_not_tried_again(
    server: Cutting, do: Callable[..., None], tmp_path: Path
) -> None:
    data, sha256 = content(1000)
    file = tmp_path / "source"
    file.write_bytes(data)
    server.conflicts = [{"code": "stale_lease", "detail": "an old lease"}]
    with pytest.raises(StaleLease):
        do("upload", file, sha256, len(data), LEASE)
    assert server.whole == {}


def test_the_cache_gives_out_what_came_over_cut_connections_once(
    server: Cutting, tmp_path: Path
) -> None:
    data, sha256 = content(5_000_000)
    server.whole[sha256] = data
    server.cuts = [2_000_000, 1_000_000]

    async def story() -> None:
        sender = AsyncSender(server.address, None, Random(1), patience=PATIENT)
        cache = ArtifactCache(tmp_path, sender.download)
        try:
            found = await asyncio.gather(*(cache.read(sha256, LeaseRef(n, 1)) for n in range(5)))
        finally:
            await sender.close()
        assert set(found) == {data}

    asyncio.run(story())
    assert server.sent == len(data)


@pytest.mark.parametrize("pieces", range(0, 12, 2))
def test_a_fetch_called_off_at_any_moment_never_spoils_the_next(
    server: Cutting, tmp_path: Path, pieces: int
) -> None:
    data, sha256 = content(8_000_000)
    server.whole[sha256] = data

    async def story() -> None:
        sender = AsyncSender(server.address, None, Random(1), patience=PATIENT)
        cache = ArtifactCache(tmp_path, sender.download)
        first = asyncio.create_task(cache.read(sha256, LEASE))
        for _ in range(20 + pieces * 10):
            await asyncio.sleep(0)
        first.cancel()
        try:
            assert await cache.read(sha256, LeaseRef(2, 1)) == data
        finally:
            await asyncio.wait([first])
            await sender.close()

    asyncio.run(story())
    assert sorted(path.name for path in tmp_path.iterdir()) == [sha256]
