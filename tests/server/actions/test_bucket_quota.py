"""The attempts of `test_storage_quota` against a pool whose artifacts are in a real S3 bucket, and some by signed URLs."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gpool.core.model import Permission
from gpool.server.actions.quotas import set_quota
from gpool.server.store.identity_values import GivenQuota
from gpool.server.store.operations.identity import users
from tests.server.actions import test_storage_quota as by_server
from tests.server.actions.test_direct_uploads import put, stored
from tests.server.actions.test_storage_quota import FILE, QUOTA, RANDOM, Attacker, stored_bytes
from tests.server.server_desk import StoppedClock, an_offer, open_desk

pytestmark = pytest.mark.anyio


async def signed(attacker: Attacker, content: bytes, size: int = 0) -> list[dict[str, Any]]:
    sha256 = hashlib.sha256(content).hexdigest()
    wanted = {"size_bytes": size or len(content), "parts": [{"number": 1, "sha256": sha256}]}
    path = f"/v1/artifacts/{sha256}/parts"
    answer = await attacker.desk.bare.post(path, json=wanted, headers=attacker.headers)
    found: list[dict[str, Any]] = answer.json().get("parts", [])
    return found


async def sent(attacker: Attacker, content: bytes) -> None:
    for part in await signed(attacker, content):
        await asyncio.to_thread(put, part, content)


async def begun_and_left(attacker: Attacker) -> None:
    for _ in range(4):
        await sent(attacker, RANDOM.randbytes(FILE))


async def begun_at_once(attacker: Attacker) -> None:
    await asyncio.gather(*(sent(attacker, RANDOM.randbytes(FILE)) for _ in range(4)))


async def replayed_after_deletion(attacker: Attacker) -> None:
    kept = []
    for _ in range(4):
        content = RANDOM.randbytes(FILE)
        parts = await signed(attacker, content)
        kept += [(part, content) for part in parts]
        await attacker.delete(f"/v1/artifacts/{hashlib.sha256(content).hexdigest()}")
    for part, content in kept:
        await asyncio.to_thread(put, part, content)


async def both_ways(attacker: Attacker) -> None:
    """The same bytes to the store and, under the same name, in parts through the server."""
    for _ in range(2):
        content = RANDOM.randbytes(FILE)
        await sent(attacker, content)
        await attacker.put(content, **{"content-range": f"bytes 0-{FILE - 1}/{FILE}"})
        await attacker.put(RANDOM.randbytes(FILE))


BY_URL: tuple[Callable[[Attacker], Awaitable[None]], ...] = (
    begun_and_left,
    begun_at_once,
    replayed_after_deletion,
    both_ways,
)
BY_SERVER = (
    by_server.parts,
    by_server.parts_with_another_total,
    by_server.parallel,
    by_server.unmeasured,
    by_server.same_again,
    by_server.logs,
    by_server.checkpoints,
    by_server.upload_and_delete,
)
HARMLESS = {replayed_after_deletion}
"""A URL dies with its upload, quota or not: `test_direct_uploads` has its control."""


async def growth(
    attack: Callable[[Attacker], Awaitable[None]],
    data: Path,
    bucket: dict[str, Any],
    quota: int | None,
) -> int:
    desk = await open_desk(data, StoppedClock(), min_free_bytes=0, **bucket)
    async with desk.http, desk.bare:
        headers = await desk.person("eve", Permission.CONSUMER, Permission.PROVIDER)
        user = await desk.server.store.read(users.user_by_name("eve"))
        assert user is not None
        agent = await desk.agent(offer=an_offer(cpus=200))
        if quota is not None:
            await set_quota(desk.server, user, ("user", user.id), GivenQuota(storage_bytes=quota))
        before = stored_bytes(data) + await stored(desk)
        await attack(Attacker(desk, agent, user.id, headers))
        grown = stored_bytes(data) + await stored(desk) - before
    await desk.server.blobs.close()
    await desk.server.store.close()
    return grown


@pytest.mark.parametrize("attack", [*BY_SERVER, *BY_URL], ids=lambda attack: attack.__name__)
async def test_a_quota_of_ten_mebibytes_holds_in_the_bucket_too(
    data: Path, bucket: dict[str, Any], attack: Callable[[Attacker], Awaitable[None]]
) -> None:
    assert await growth(attack, data, bucket, QUOTA) <= QUOTA * 1.1


@pytest.mark.parametrize(
    "attack", [each for each in BY_URL if each not in HARMLESS], ids=lambda attack: attack.__name__
)
async def test_without_a_quota_the_same_attempt_fills_the_bucket(
    data: Path, bucket: dict[str, Any], attack: Callable[[Attacker], Awaitable[None]]
) -> None:
    assert await growth(attack, data, bucket, None) > QUOTA * 1.1
