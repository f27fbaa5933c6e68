"""Artifacts straight to and from a real S3 store: what is signed, what is refused, what is removed."""

from __future__ import annotations

import asyncio
import hashlib
import random
from pathlib import Path
from random import Random
from typing import Any

import httpx2
import pytest

from gpool.core.model import MIB, EndReason, Instant, OutputFile, Permission
from gpool.server.actions.quotas import set_quota
from gpool.server.actions.tasks import direct_uploads
from gpool.server.blobs.multipart import PART_BYTES, MultipartUploads, part_bytes_of, part_sizes
from gpool.server.scheduling.loops import PruneStore
from gpool.server.store.identity_values import GivenQuota
from gpool.server.store.operations.identity import teams, users
from gpool.server.store.operations.tasks import artifacts
from gpool.transfer.object_stores import StoreAccess
from gpool.transfer.requests import Address, LeaseRef
from gpool.transfer.senders import AsyncSender
from gpool.wire.frames import Finished, LogChunk, Started
from tests.server.server_desk import Desk, StoppedClock, open_desk

pytestmark = pytest.mark.anyio

RANDOM = random.Random(15)
FILE = 9 * MIB
LARGE = PART_BYTES + 3 * MIB
DAYS = 400 * 86_400
"""The desk's clock stands still in the past; the store's does not."""


def named(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Counted(httpx2.ASGITransport):
    """Counts the bytes of bodies that pass through the server, in both directions."""

    def __init__(self, desk: Desk) -> None:
        super().__init__(app=desk.app, raise_app_exceptions=False)
        self.passed = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.passed += len(await request.aread())
        answer = await super().handle_async_request(request)
        self.passed += len(await answer.aread())
        return answer


class Person:
    """A client with an account of its own, which may reach the store or not."""

    def __init__(
        self, desk: Desk, headers: dict[str, str], stores: frozenset[str] = frozenset()
    ) -> None:
        self.desk, self.headers = desk, headers
        self.transport = Counted(desk)
        address, key = Address("http://127.0.0.1:1"), headers["authorization"].split()[1]
        self.sender = AsyncSender(
            address, key, Random(1), transport=self.transport, stores=StoreAccess(address, stores)
        )

    async def post(self, path: str, document: Any = None) -> httpx2.Response:
        return await self.desk.bare.post(path, json=document, headers=self.headers)

    async def parts(self, content: bytes, size: int | None = None, **more: Any) -> httpx2.Response:
        part = {"number": 1, "sha256": named(content[:PART_BYTES])}
        document = {"size_bytes": size or len(content), "parts": [part], **more}
        return await self.post(f"/v1/artifacts/{named(content)}/parts", document)

    async def complete(self, content: bytes, *pieces: bytes) -> httpx2.Response:
        digests = {"part_sha256s": [named(piece) for piece in pieces or (content,)]}
        return await self.post(f"/v1/artifacts/{named(content)}/complete", digests)

    async def delete(self, content: bytes) -> httpx2.Response:
        path = f"/v1/artifacts/{named(content)}"
        return await self.desk.bare.delete(path, headers=self.headers)


async def person(desk: Desk, name: str = "ann", quota: int | None = None) -> Person:
    headers = await desk.person(name, Permission.CONSUMER)
    if quota is not None:
        user = await desk.server.store.read(users.user_by_name(name))
        assert user is not None
        await set_quota(desk.server, user, ("user", user.id), GivenQuota(storage_bytes=quota))
    return Person(desk, headers)


async def charged(desk: Desk, name: str = "ann") -> int:
    user = await desk.server.store.read(users.user_by_name(name))
    assert user is not None
    return (await desk.server.store.read(teams.usage_of("user", user.id))).storage_bytes


def multipart(desk: Desk) -> MultipartUploads:
    found = desk.server.blobs.direct
    assert found is not None
    return found


async def stored(desk: Desk) -> int:
    """Bytes in the bucket: objects, and parts of unfinished uploads."""
    size = 0
    for shard in range(256):
        size += sum(each.size for each in await desk.server.blobs.listed(f"{shard:02x}"))
    for upload in await multipart(desk).unfinished():
        parts = await multipart(desk).parts(upload.key, upload.upload_id)
        size += sum(part.size for part in parts or ())
    return size


def put(signed: dict[str, Any], body: bytes, **headers: str) -> int:
    sent = {**signed["headers"], "content-length": str(len(body)), **headers}
    return httpx2.put(signed["url"], content=body, headers=sent, trust_env=False).status_code


# ---- transfers


@pytest.mark.parametrize("size", [FILE, LARGE], ids=["one part", "two parts"])
async def test_bytes_travel_past_the_server_both_ways(
    bucket_desk: Desk, tmp_path: Path, size: int
) -> None:
    ann = await person(bucket_desk)
    content = RANDOM.randbytes(size)
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(content)
    await ann.sender.upload(source, named(content), size)
    await ann.sender.download(named(content), target)
    assert target.read_bytes() == content
    assert ann.transport.passed < 10_000
    assert await charged(bucket_desk) == size == await stored(bucket_desk)
    assert await multipart(bucket_desk).unfinished() == []
    await ann.sender.close()


async def test_small_artifacts_go_through_the_server(bucket_desk: Desk, tmp_path: Path) -> None:
    ann = await person(bucket_desk)
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(content := RANDOM.randbytes(100_000))
    await ann.sender.upload(source, named(content), len(content))
    await ann.sender.download(named(content), target)
    assert target.read_bytes() == content
    assert ann.transport.passed > 200_000
    assert await stored(bucket_desk) == len(content)
    await ann.sender.close()


@pytest.mark.parametrize("public", ["http://127.0.0.1:9", "http://10.255.255.1:9000"])
async def test_a_client_that_cannot_reach_the_store_uses_the_server(
    data: Path, bucket: dict[str, Any], tmp_path: Path, public: str
) -> None:
    """Refused connection, and a private address that the client does not dial."""
    desk = await open_desk(data, StoppedClock(), **bucket, s3_public_endpoint=public)
    assert desk.server.blobs.direct is not None  # agents elsewhere may reach it
    async with desk.http, desk.bare:
        ann = await person(desk)
        source, target = tmp_path / "source", tmp_path / "target"
        source.write_bytes(content := RANDOM.randbytes(FILE))
        await ann.sender.upload(source, named(content), FILE)
        await ann.sender.download(named(content), target)
        assert target.read_bytes() == content
        assert ann.transport.passed > 2 * FILE
        await ann.sender.close()
    await desk.server.blobs.close()
    await desk.server.store.close()


async def test_an_interrupted_upload_continues_with_the_missing_part(
    bucket_desk: Desk, tmp_path: Path
) -> None:
    ann = await person(bucket_desk)
    content = RANDOM.randbytes(LARGE)
    [signed] = (await ann.parts(content)).json()["parts"]
    assert put(signed, content[:PART_BYTES]) == 200
    again = (await ann.parts(content)).json()
    assert (again["part_bytes"], again["stored"]) == (PART_BYTES, [1])
    assert (await ann.complete(content)).status_code == 409  # the control: a part is missing
    (source := tmp_path / "source").write_bytes(content)
    await ann.sender.upload(source, named(content), LARGE)
    assert await stored(bucket_desk) == LARGE
    await ann.sender.close()


async def test_a_node_s_output_travels_past_the_server(bucket_desk: Desk, tmp_path: Path) -> None:
    desk = bucket_desk
    agent = await desk.agent()
    task = await desk.command()
    await desk.schedule()
    [lease] = agent.leases()
    await agent.report(Started(lease.task, lease.epoch))
    await desk.http_of(agent).aclose()  # gives the agent its token
    counted, address = Counted(desk), Address("http://127.0.0.1:1")
    sender = AsyncSender(
        address,
        None,
        Random(1),
        vouch=agent.badge.vouch,
        transport=counted,
        stores=StoreAccess(address, frozenset()),
    )
    (source := tmp_path / "source").write_bytes(content := RANDOM.randbytes(FILE))
    await sender.upload(source, named(content), FILE, LeaseRef(lease.task, lease.epoch))
    assert counted.passed < 10_000
    output = OutputFile("out", named(content), FILE)
    ended = Finished(lease.task, 1, EndReason.EXITED, exit_code=0, outputs=(output,))
    await agent.report(ended)
    document = (await desk.get(f"/v1/tasks/{task}/result")).json()
    assert document["status"] == "succeeded"
    read = await desk.get(f"/v1/artifacts/{named(content)}")
    assert read.content == content
    await sender.close()


async def test_logs_are_sealed_into_the_bucket(bucket_desk: Desk) -> None:
    agent = await bucket_desk.agent()
    task = await bucket_desk.command()
    await bucket_desk.schedule()
    [lease] = agent.leases()
    await agent.report(
        Started(lease.task, 1),
        LogChunk(lease.task, 1, 0, 1, b"printed\n"),
        Finished(lease.task, 1, EndReason.EXITED, exit_code=0),
    )
    bucket_desk.clock.advance(1)
    await PruneStore(bucket_desk.server).run_once(bucket_desk.server.now)
    assert await stored(bucket_desk) > 0
    page = (await bucket_desk.get(f"/v1/tasks/{task}/logs")).json()
    assert [item["text"] for item in page["items"]] == ["printed\n"]


# ---- attacks


async def test_a_signed_part_takes_no_other_bytes(bucket_desk: Desk) -> None:
    ann = await person(bucket_desk)
    content = RANDOM.randbytes(FILE)
    [signed] = (await ann.parts(content)).json()["parts"]
    other = RANDOM.randbytes(FILE)
    assert put(signed, other) >= 400
    assert put(signed, content + b"x") >= 400
    assert put(signed, content[:-1]) >= 400
    free = {"x-amz-checksum-sha256": ""}
    assert put(signed, other, **free) >= 400
    elsewhere = {**signed, "url": signed["url"].replace("partNumber=1", "partNumber=2")}
    assert put(elsewhere, content) >= 400
    assert put(signed, content) == 200  # the control


async def test_one_part_under_a_false_name_is_not_signed(bucket_desk: Desk) -> None:
    ann = await person(bucket_desk)
    content = RANDOM.randbytes(FILE)
    lie = {"number": 1, "sha256": named(b"other bytes")}
    refused = await ann.parts(content, parts=[lie])
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid")


async def test_parts_under_a_false_name_are_found_out_and_removed(bucket_desk: Desk) -> None:
    """The store knows the parts' checksums, not the hash of the whole: the server reads it back."""
    ann = await person(bucket_desk)
    right, wrong = RANDOM.randbytes(LARGE), RANDOM.randbytes(LARGE)
    pieces = [wrong[:PART_BYTES], wrong[PART_BYTES:]]
    parts = [{"number": at + 1, "sha256": named(piece)} for at, piece in enumerate(pieces)]
    begun = await ann.parts(right, parts=parts)
    for signed, piece in zip(begun.json()["parts"], pieces, strict=True):
        assert put(signed, piece) == 200
    refused = await ann.complete(right, *pieces)
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid")
    assert "SHA-256" in refused.json()["detail"]
    assert (await stored(bucket_desk), await charged(bucket_desk)) == (0, 0)


async def test_a_url_stores_nothing_after_its_upload_was_deleted(bucket_desk: Desk) -> None:
    """Otherwise a quota of ten mebibytes would hold as much as one had URLs for."""
    ann = await person(bucket_desk, quota=10 * MIB)
    for _ in range(3):
        content = RANDOM.randbytes(FILE)
        [signed] = (await ann.parts(content)).json()["parts"]
        assert put(signed, content) == 200  # the control: until then it does
        assert (await ann.delete(content)).status_code == 204
        assert put(signed, content) >= 400
    assert (await stored(bucket_desk), await charged(bucket_desk)) == (0, 0)


async def test_a_url_stores_nothing_after_its_upload_was_completed(bucket_desk: Desk) -> None:
    ann = await person(bucket_desk)
    content = RANDOM.randbytes(FILE)
    [signed] = (await ann.parts(content)).json()["parts"]
    assert put(signed, content) == 200
    assert (await ann.complete(content)).status_code == 201
    assert (await ann.complete(content)).status_code == 201  # the reply was lost
    assert (await ann.delete(content)).status_code == 204
    assert put(signed, content) >= 400
    assert await stored(bucket_desk) == 0


async def test_an_upload_keeps_the_length_it_was_begun_with(bucket_desk: Desk) -> None:
    ann = await person(bucket_desk)
    content = RANDOM.randbytes(FILE)
    assert (await ann.parts(content)).status_code == 200
    refused = await ann.parts(content, FILE + MIB)
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid")
    assert await charged(bucket_desk) == FILE


async def test_a_stranger_s_completion_and_parts_are_not_mine(bucket_desk: Desk) -> None:
    ann, bob = await person(bucket_desk), await person(bucket_desk, "bob")
    content = RANDOM.randbytes(FILE)
    [signed] = (await ann.parts(content)).json()["parts"]
    assert put(signed, content) == 200
    assert (await bob.complete(content)).status_code == 409
    assert (await bob.parts(content)).json()["stored"] == []
    assert (await ann.complete(content)).status_code == 201
    read = await bucket_desk.bare.get(f"/v1/artifacts/{named(content)}", headers=bob.headers)
    assert read.status_code == 404


async def test_the_same_artifact_of_two_accounts_is_one_object(bucket_desk: Desk) -> None:
    ann, bob = await person(bucket_desk), await person(bucket_desk, "bob")
    content = RANDOM.randbytes(FILE)
    for who in (ann, bob):
        [signed] = (await who.parts(content)).json()["parts"]
        assert put(signed, content) == 200
        assert (await who.complete(content)).status_code == 201
    assert await stored(bucket_desk) == FILE
    assert await charged(bucket_desk) == await charged(bucket_desk, "bob") == FILE
    assert (await ann.delete(content)).status_code == 204
    read = await bucket_desk.bare.get(f"/v1/artifacts/{named(content)}", headers=bob.headers)
    assert read.content == content


async def test_two_replicas_that_complete_the_same_upload_agree(
    data: Path, bucket: dict[str, Any]
) -> None:
    """A client whose connection broke asks another replica, while the first still verifies."""
    first = await open_desk(data, StoppedClock(), **bucket)
    second = await open_desk(data, first.clock, **bucket)
    async with first.http, first.bare, second.http, second.bare:
        ann = await person(first)
        content = RANDOM.randbytes(LARGE)
        pieces = [content[:PART_BYTES], content[PART_BYTES:]]
        parts = [{"number": at + 1, "sha256": named(piece)} for at, piece in enumerate(pieces)]
        begun = await ann.parts(content, parts=parts)
        for signed, piece in zip(begun.json()["parts"], pieces, strict=True):
            assert put(signed, piece) == 200
        async with multipart(first).verifying, multipart(first).verifying:
            waiting = asyncio.create_task(ann.complete(content, *pieces))
            again = Person(second, ann.headers)
            while await multipart(first).unfinished():
                pass  # the first has not completed it yet
            assert (await again.complete(content, *pieces)).status_code == 201
            await again.sender.close()
        assert (await waiting).status_code in (201, 202)  # 202: a slow machine
        assert await stored(first) == LARGE == await charged(first)
        await ann.sender.close()
    for desk in (first, second):
        await desk.server.blobs.close()
        await desk.server.store.close()


# ---- garbage


async def test_an_upload_that_nobody_continues_is_aborted(bucket_desk: Desk) -> None:
    ann = await person(bucket_desk)
    content = RANDOM.randbytes(FILE)
    [signed] = (await ann.parts(content)).json()["parts"]
    assert put(signed, content) == 200
    prune = PruneStore(bucket_desk.server)
    await prune.run_once(bucket_desk.clock.advance(3600))
    assert await charged(bucket_desk) == FILE == await stored(bucket_desk)  # the control
    await prune.run_once(bucket_desk.clock.advance(86_400))
    assert (await charged(bucket_desk), await stored(bucket_desk)) == (0, 0)
    assert put(signed, content) >= 400


async def test_a_node_s_upload_is_aborted_when_its_lease_ends(bucket_desk: Desk) -> None:
    desk = bucket_desk
    ann = await person(desk, quota=10 * MIB)
    agent = await desk.agent()
    task = (await ann.post("/v1/tasks", {"command": ["true"]})).json()["ids"][0]
    await desk.schedule()
    [lease] = agent.leases()
    await agent.report(Started(lease.task, 1))
    content = RANDOM.randbytes(FILE)
    part = {"number": 1, "sha256": named(content)}
    path = f"/v1/artifacts/{named(content)}/parts"
    async with desk.http_of(agent, f"{task}:1") as node:
        begun = await node.post(path, json={"size_bytes": FILE, "parts": [part]})
        [signed] = begun.json()["parts"]
    assert put(signed, content) == 200
    prune = PruneStore(desk.server)
    await prune.run_once(desk.server.now)
    assert await charged(desk) > FILE  # the control: the lease is held
    await agent.report(Finished(lease.task, 1, EndReason.EXITED, exit_code=0))
    await prune.run_once(desk.server.now)
    assert await charged(desk) < MIB
    assert await stored(desk) == 0
    assert put(signed, content) >= 400


async def test_objects_and_uploads_that_no_row_names_are_swept(bucket_desk: Desk) -> None:
    """Left by a server that was killed between the store and its database."""
    ann = await person(bucket_desk)
    kept = RANDOM.randbytes(FILE)
    [signed] = (await ann.parts(kept)).json()["parts"]
    assert put(signed, kept) == 200
    assert (await ann.complete(kept)).status_code == 201
    blobs = bucket_desk.server.blobs
    lost = await blobs.put_bytes(b"lost")
    await multipart(bucket_desk).begin("ab/lost-upload")
    assert await stored(bucket_desk) == FILE + 4
    now = bucket_desk.clock.now()
    for shard in range(256):  # the control: younger than `before`
        await direct_uploads.sweep(bucket_desk.server, f"{shard:02x}", now)
    assert await stored(bucket_desk) == FILE + 4
    later = Instant(now + DAYS * 1_000_000)
    for shard in {lost.sha256[:2], named(kept)[:2]}:
        await direct_uploads.sweep(bucket_desk.server, shard, later)
    assert await stored(bucket_desk) == FILE
    assert await multipart(bucket_desk).unfinished() == []


async def test_a_late_removal_by_another_replica_spares_the_new_object(bucket_desk: Desk) -> None:
    """Two replicas: one has forgotten the artifact and stands still before it removes the bytes; the other stores the
    same artifact again meanwhile.
    """
    ann = await person(bucket_desk)
    content = RANDOM.randbytes(100_000)
    path = f"/v1/artifacts/{named(content)}"
    assert (
        await bucket_desk.bare.put(path, content=content, headers=ann.headers)
    ).status_code == 201
    late = await bucket_desk.server.write(artifacts.forget_artifacts([named(content)]))
    assert (
        await bucket_desk.bare.put(path, content=content, headers=ann.headers)
    ).status_code == 201
    for key in late:
        await bucket_desk.server.blobs.remove(key)
    read = await bucket_desk.bare.get(path, headers=ann.headers)
    assert read.content == content
    assert await stored(bucket_desk) == len(content)


async def test_artifacts_in_the_folder_are_read_after_a_change_to_a_bucket(
    data: Path, bucket: dict[str, Any]
) -> None:
    before = await open_desk(data, StoppedClock())
    content = b"in the folder"
    path = f"/v1/artifacts/{named(content)}"
    async with before.http:
        assert (await before.http.put(path, content=content)).status_code == 201
    await before.server.store.close()
    after = await open_desk(data, before.clock, **bucket)
    async with after.http:
        assert (await after.get(path)).content == content
        assert (await after.http.delete(path)).status_code == 204
        assert not after.files_of(named(content))
    await after.server.blobs.close()
    await after.server.store.close()


async def test_a_store_that_does_not_answer_turns_uploads_away_and_nothing_else(
    data: Path, bucket: dict[str, Any]
) -> None:
    away = {**bucket, "s3_endpoint": "http://127.0.0.1:9"}
    desk = await open_desk(data, StoppedClock(), **away)
    async with desk.http:
        content = b"content"
        refused = await desk.http.put(f"/v1/artifacts/{named(content)}", content=content)
        assert (refused.status_code, refused.json()["code"]) == (503, "unreachable")
        assert (await desk.post("/v1/tasks", {"command": ["true"]})).status_code == 202
        assert desk.server.blobs.direct is None
    await desk.server.blobs.close()
    await desk.server.store.close()


async def test_an_upload_in_parts_continues_after_the_store_was_away(
    data: Path, bucket: dict[str, Any]
) -> None:
    """All parts were on the server's disk when the store failed: the last one must be sent again, not byte N of N."""
    content = RANDOM.randbytes(3000)
    path = f"/v1/artifacts/{named(content)}"
    first, last = {"content-range": "bytes 0-1999/3000"}, {"content-range": "bytes 2000-2999/3000"}
    away = await open_desk(data, StoppedClock(), **{**bucket, "s3_endpoint": "http://127.0.0.1:9"})
    async with away.http:
        assert (await away.http.put(path, content=content[:2000], headers=first)).status_code == 202
        assert (await away.http.put(path, content=content[2000:], headers=last)).status_code == 503
        assert (await away.http.head(path)).headers["upload-offset"] == "2000"
    await away.server.blobs.close()
    await away.server.store.close()
    desk = await open_desk(data, away.clock, **bucket)
    async with desk.http:
        assert (await desk.http.put(path, content=content[2000:], headers=last)).status_code == 201
        assert (await desk.get(path)).content == content
    await desk.server.blobs.close()
    await desk.server.store.close()
    gone = await open_desk(data, desk.clock, **{**bucket, "s3_endpoint": "http://127.0.0.1:9"})
    async with gone.http:
        refused = await gone.get(path)
        assert (refused.status_code, refused.json()["code"]) == (503, "unreachable")
    await gone.server.blobs.close()
    await gone.server.store.close()


@pytest.mark.parametrize("size", [1, PART_BYTES, LARGE, 256 << 30, 1 << 45])
def test_parts_cover_an_artifact_exactly(size: int) -> None:
    sizes = part_sizes(size)
    assert sum(sizes) == size
    assert len(sizes) <= 10_000
    assert set(sizes[:-1]) <= {part_bytes_of(size)}
    assert part_bytes_of(size) % MIB == 0
