"""Artifacts of several servers: one deletes while another uploads and names them, in a shared folder and in a bucket."""

from __future__ import annotations

import asyncio
import hashlib
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gpool.core.model import Instant, Permission
from gpool.server.actions.tasks import direct_uploads, outputs
from gpool.server.scheduling.loops import PruneStore
from gpool.server.server import Server
from gpool.server.store.protocol import Operation, operation
from gpool.server.store.rows import select, values
from tests.server.replicas.replica_desks import replica_desks
from tests.server.server_desk import Desk

pytestmark = pytest.mark.anyio

ROUNDS = 10
DICE = random.Random(155)


class _Stored(NamedTuple):
    sha256: str
    size_bytes: int
    object: str


@operation
def dangling() -> Operation[list[str]]:
    """References to artifacts that no row names."""
    return (
        yield from values(
            str,
            "SELECT r.sha256 FROM artifact_refs r WHERE NOT EXISTS "
            "(SELECT 1 FROM artifacts a WHERE a.sha256 = r.sha256)",
        )
    )


@operation
def stored() -> Operation[list[_Stored]]:
    return (yield from select(_Stored, "SELECT sha256, size_bytes, object FROM artifacts"))


async def check(server: Server) -> int:
    """Every reference has a row and every row its bytes; return the number of rows."""
    assert await server.store.read(dangling()) == []
    rows = await server.store.read(stored())
    for row in rows:
        at = await outputs.location_of(server, row.sha256)
        content = await server.blobs.read_range(at, 0, row.size_bytes)
        assert hashlib.sha256(content).hexdigest() == row.sha256
    return len(rows)


async def objects(server: Server) -> int:
    return sum([len(await server.blobs.listed(f"{shard:02x}")) for shard in range(256)])


@pytest.mark.parametrize("place", ["folder", "bucket", "encrypted"])
async def test_use_by_one_server_and_deletion_by_another_leave_no_dangling_reference(
    url: str, data: Path, place: str, request: pytest.FixtureRequest
) -> None:
    more: dict[str, Any] = {"encrypt_data": place == "encrypted", "keep_unreferenced_s": 0}
    if place == "bucket":
        more |= request.getfixturevalue("bucket")
    async with replica_desks(url, data, **more) as (clock, [first, second]):
        ann = await first.desk.person("ann", Permission.CONSUMER)
        seen = {"used": 0, "missing": 0, "deleted": 0, "refused": 0}

        async def use(desk: Desk, sha256: str, size: int) -> None:
            spec = {"path": "in", "sha256": sha256, "size_bytes": size}
            wanted = {"command": ["true", sha256], "inputs": [spec]}
            answer = await desk.bare.post("/v1/tasks", json=wanted, headers=ann)
            assert answer.status_code in (202, 409, 422), answer.text
            seen["used" if answer.status_code == 202 else "missing"] += 1

        async def delete(desk: Desk, sha256: str) -> None:
            answer = await desk.bare.delete(f"/v1/artifacts/{sha256}", headers=ann)
            assert answer.status_code in (204, 404, 409), answer.text
            seen["deleted" if answer.status_code == 204 else "refused"] += 1

        async def upload(desk: Desk, content: bytes) -> None:
            name = hashlib.sha256(content).hexdigest()
            for _ in range(5):
                path = f"/v1/artifacts/{name}"
                answer = await desk.bare.put(path, content=content, headers=ann)
                if answer.status_code == 201:
                    return
                assert answer.status_code == 503, answer.text  # deleted meanwhile: once more

        async def prune(desk: Desk) -> None:
            await PruneStore(desk.server).run_once(Instant(clock.now() + 1))

        async def delete_then_use(desk: Desk, sha256: str, size: int) -> None:
            await delete(desk, sha256)
            await use(desk, sha256, size)

        for number in range(ROUNDS):
            content = DICE.randbytes(3000)
            name, size = hashlib.sha256(content).hexdigest(), len(content)
            await upload(first.desk, content)
            clock.advance(1)
            work = [upload(first.desk, content), prune(second.desk)]
            if number % 2:
                work += [delete_then_use(second.desk, name, size), prune(first.desk)]
            else:
                work += [delete(second.desk, name), use(first.desk, name, size)]
            DICE.shuffle(work)
            await asyncio.gather(*work)
            await check(first.desk.server)
        assert seen["used"], seen
        assert seen["deleted"], seen
        left = await check(second.desk.server)
        later = Instant(clock.now() + 400 * 86_400_000_000)
        for shard in range(256):
            await direct_uploads.sweep(second.desk.server, f"{shard:02x}", later)
        assert await check(first.desk.server) == left == await objects(first.desk.server)
        if place == "bucket":
            for each in (first, second):
                await each.desk.server.blobs.close()
