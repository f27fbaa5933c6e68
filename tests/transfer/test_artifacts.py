"""Artifacts up and down through both senders, against a server that forgets, stumbles and cheats."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import httpx2
import pytest

from gpool.core.errors import BadGpuSpec, InternalFault, NotFound, StaleLease, Unreachable
from gpool.transfer.artifacts import download, upload
from gpool.transfer.requests import (
    PART_BYTES,
    Address,
    AskedPauses,
    Landing,
    LeaseRef,
    Patience,
    Pause,
    Reply,
    Request,
    error_from,
    hash_of,
    patiently,
)
from gpool.transfer.senders import AsyncSender, Sender

ADDRESS = Address("http://pool.test")
NONE_ASKED = AskedPauses(0.0, Random(1))
TRIES = 8


class Counting(Patience):
    """Gives up after so many tries, however long they took."""

    def pauses(self, random: Random) -> Iterator[float]:
        return iter([0.0001] * (TRIES - 1))


QUICK = Counting()


class Shelf:
    """The server's side of the artifact routes; `stumbles` requests fail on the way first."""

    def __init__(self) -> None:
        self.whole: dict[str, bytes] = {}
        self.parts: dict[str, bytearray] = {}
        self.seen: list[httpx2.Request] = []
        self.stumbles: set[int] = set()
        self.cut_downloads_at: int | None = None

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.seen.append(request)
        if len(self.seen) in self.stumbles:
            raise httpx2.ConnectError("stumbled")
        sha256 = request.url.path.rsplit("/", 1)[1]
        match request.method:
            case "HEAD":
                if sha256 in self.whole:
                    return httpx2.Response(200)
                offset = str(len(self.parts.get(sha256, b"")))
                return httpx2.Response(404, headers={"Upload-Offset": offset})
            case "PUT":
                return self.put(sha256, request)
        return self.get(sha256, request)

    def put(self, sha256: str, request: httpx2.Request) -> httpx2.Response:
        if (given := request.headers.get("Content-Range")) is None:
            self.whole[sha256] = request.content
            return httpx2.Response(201)
        span, total = given.removeprefix("bytes ").split("/")
        part = self.parts.setdefault(sha256, bytearray())
        assert int(span.split("-")[0]) == len(part)
        part += request.content
        if len(part) == int(total):
            self.whole[sha256] = bytes(self.parts.pop(sha256))
            return httpx2.Response(201)
        return httpx2.Response(202, headers={"Upload-Offset": str(len(part))})

    def get(self, sha256: str, request: httpx2.Request) -> httpx2.Response:
        if sha256 not in self.whole:
            problem = {"code": "not_found", "detail": "no such artifact", "status": 404}
            return httpx2.Response(404, json=problem)
        data, status = self.whole[sha256], 200
        if (wanted := request.headers.get("Range")) is not None:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(data):
                return httpx2.Response(416)
            data, status = data[start:], 206
        if self.cut_downloads_at is not None:
            cut, self.cut_downloads_at = self.cut_downloads_at, None

            def broken() -> object:
                yield data[:cut]
                raise httpx2.ReadError("cut")

            async def broken_too() -> object:
                yield data[:cut]
                raise httpx2.ReadError("cut")

            class Both(httpx2.SyncByteStream, httpx2.AsyncByteStream):
                def __iter__(self):  # type: ignore[no-untyped-def]
                    return broken()

                def __aiter__(self):  # type: ignore[no-untyped-def]
                    return broken_too()

            return httpx2.Response(status, stream=Both())
        return httpx2.Response(status, content=data)


class Both:
    """The same operations by either sender."""

    def __init__(self, kind: str, shelf: Shelf) -> None:
        self.kind, self.transport = kind, httpx2.MockTransport(shelf)

    def do(self, name: str, *arguments: object) -> None:
        if self.kind == "threads":
            sender = Sender(ADDRESS, "gpn_x", Random(1), patience=QUICK, transport=self.transport)
            try:
                getattr(sender, name)(*arguments)
            finally:
                sender.close()
            return

        async def go() -> None:
            sender = AsyncSender(
                ADDRESS, "gpn_x", Random(1), patience=QUICK, transport=self.transport
            )
            try:
                await getattr(sender, name)(*arguments)
            finally:
                await sender.close()

        asyncio.run(go())


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture(params=["threads", "asyncio"])
def both(request: pytest.FixtureRequest, shelf: Shelf) -> Both:
    return Both(request.param, shelf)


@pytest.fixture
def make(tmp_path: Path) -> Callable[[bytes], tuple[Path, str, int]]:
    def made(data: bytes) -> tuple[Path, str, int]:
        file = tmp_path / "source"
        file.write_bytes(data)
        return (file, *hash_of(file))

    return made


def test_a_small_file_goes_up_under_its_lease(both: Both, shelf: Shelf, make) -> None:  # type: ignore[no-untyped-def]
    file, sha256, size = make(b"small")
    both.do("upload", file, sha256, size, LeaseRef(7, 3))
    assert shelf.whole == {sha256: b"small"}
    assert {r.headers["Gpool-Lease"] for r in shelf.seen} == {"t-0000000000007:3"}
    assert shelf.seen[0].headers["Authorization"] == "Bearer gpn_x"


def test_what_the_server_has_is_never_sent_again(both: Both, shelf: Shelf, make) -> None:  # type: ignore[no-untyped-def]
    file, sha256, size = make(b"small")
    shelf.whole[sha256] = b"small"
    both.do("upload", file, sha256, size)
    assert [r.method for r in shelf.seen] == ["HEAD"]


def test_an_empty_file_goes_up_and_comes_down(both: Both, shelf: Shelf, make, tmp_path) -> None:  # type: ignore[no-untyped-def]
    file, sha256, size = make(b"")
    both.do("upload", file, sha256, size)
    both.do("download", sha256, tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == b""


def test_a_large_file_goes_up_in_parts_and_on_after_a_stumble(
    both: Both,
    shelf: Shelf,
    make,  # type: ignore[no-untyped-def]
) -> None:
    data = Random(2).randbytes(2 * PART_BYTES + 5)
    file, sha256, size = make(data)
    shelf.stumbles = {3}
    both.do("upload", file, sha256, size)
    assert shelf.whole[sha256] == data
    assert [r.method for r in shelf.seen] == ["HEAD", "PUT", "PUT", "HEAD", "PUT", "PUT"]


def test_a_download_goes_on_where_it_was_cut(both: Both, shelf: Shelf, tmp_path: Path) -> None:
    data = Random(3).randbytes(3_000_000)
    sha256 = hashlib.sha256(data).hexdigest()
    shelf.whole[sha256] = data
    shelf.cut_downloads_at = 2_000_000
    both.do("download", sha256, tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == data
    assert shelf.seen[-1].headers["Range"] == "bytes=2000000-"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["got"]


def test_what_does_not_match_its_hash_never_lands(both: Both, shelf: Shelf, tmp_path: Path) -> None:
    shelf.whole["a" * 64] = b"something else"
    with pytest.raises(InternalFault, match="does not match its hash"):
        both.do("download", "a" * 64, tmp_path / "got")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_artifact_is_not_found_and_never_retried(
    both: Both, shelf: Shelf, tmp_path: Path
) -> None:
    with pytest.raises(NotFound, match="no such artifact"):
        both.do("download", "b" * 64, tmp_path / "got")
    assert len(shelf.seen) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_never_answers_is_unreachable(
    both: Both, shelf: Shelf, tmp_path: Path
) -> None:
    shelf.stumbles = set(range(100))
    with pytest.raises(Unreachable, match=r"pool\.test"):
        both.do("download", "b" * 64, tmp_path / "got")
    assert len(shelf.seen) == TRIES
    assert list(tmp_path.iterdir()) == []


def broken(count: int, moved: bool) -> list[Request | Pause]:
    """What a download of which `count` tries break asks for, with one pause's worth of patience."""
    landing = Landing(io.BytesIO())
    sha256 = hashlib.sha256(b"x" * count).hexdigest()
    steps = patiently(lambda: download(sha256, landing), lambda: iter([0.5]), NONE_ASKED)
    asked = [next(steps)]
    for _ in range(count):
        if moved:
            landing.write(b"x")
        asked += [steps.send(Unreachable("cut")), next(steps)]
    return asked


def test_patience_starts_over_when_bytes_have_moved_and_only_then() -> None:
    assert [type(step) for step in broken(1, moved=False)] == [Request, Pause, Request]
    with pytest.raises(Unreachable):
        broken(2, moved=False)
    with pytest.raises(StopIteration):  # after the last break nothing is missing
        broken(9, moved=True)


def waited(offsets: list[int]) -> list[Request | Pause]:
    """What an upload asks for while another of the same is at these offsets, with one pause's worth of patience."""
    sha256 = hashlib.sha256(b"x" * 99).hexdigest()
    steps = patiently(lambda: upload(b"x" * 99, sha256, 99), lambda: iter([0.5]), NONE_ASKED)
    asked = [next(steps)]
    busy = Reply(409, {}, json.dumps({"code": "conflict", "detail": "busy"}).encode())
    for offset in offsets:
        asked.append(steps.send(Reply(404, {"upload-offset": str(offset)})))
        asked += [steps.send(busy), next(steps)]
    return asked


def test_an_upload_waits_for_another_of_the_same_as_long_as_that_moves() -> None:
    assert len(waited([1, 2, 3, 4, 5, 6])) == 1 + 3 * 6
    with pytest.raises(Unreachable, match="not through yet"):
        waited([1, 2, 2, 2])


def test_a_problem_becomes_the_error_it_names() -> None:
    stale = Reply(409, {}, json.dumps({"code": "stale_lease", "detail": "old"}).encode())
    assert isinstance(error_from(stale), StaleLease)
    spec = {"code": "bad_gpu_spec", "detail": "what", "text": "H1OO", "position": 2}
    error = error_from(Reply(400, {}, json.dumps(spec).encode()))
    assert isinstance(error, BadGpuSpec)
    assert error.position == 2
    assert isinstance(error_from(Reply(502, {}, b"<html>")), Unreachable)
    assert isinstance(error_from(Reply(404, {})), NotFound)


def test_a_request_without_a_body_is_sent_as_it_is(shelf: Shelf) -> None:
    sender = Sender(ADDRESS, None, Random(1), transport=httpx2.MockTransport(shelf))
    try:
        assert sender.send(Request("HEAD", "/v1/artifacts/" + "c" * 64)).status == 404
    finally:
        sender.close()
    assert "Authorization" not in shelf.seen[0].headers
