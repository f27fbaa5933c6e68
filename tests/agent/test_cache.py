"""The artifact cache: one fetch for many, nothing removed in use, never past its cap for long."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gpool.agent.cache import ArtifactCache
from gpool.core.errors import NotFound
from gpool.transfer.artifacts import LeaseRef

LEASE = LeaseRef(1, 1)
A, B, C = "a" * 64, "b" * 64, "c" * 64


def fill(target: Path) -> None:
    target.write_bytes(target.name[:1].encode() * 100)


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


class Source:
    """Hands out 100 bytes per artifact, when it is allowed to."""

    def __init__(self) -> None:
        self.fetched: list[str] = []
        self.open = asyncio.Event()
        self.open.set()
        self.missing: set[str] = set()

    async def __call__(self, sha256: str, target: Path, lease: LeaseRef) -> None:
        self.fetched.append(sha256)
        await self.open.wait()
        if sha256 in self.missing:
            raise NotFound(f"no {sha256}")
        fill(target)


def test_many_who_ask_at_once_cause_one_fetch(tmp_path: Path) -> None:
    async def story() -> None:
        source = Source()
        source.open.clear()
        cache = ArtifactCache(tmp_path, source)
        asking = [asyncio.create_task(cache.read(A, LEASE)) for _ in range(20)]
        await asyncio.sleep(0)
        source.open.set()
        assert set(await asyncio.gather(*asking)) == {b"a" * 100}
        assert source.fetched == [A]

    asyncio.run(story())


def test_one_who_gives_up_never_spoils_it_for_the_others(tmp_path: Path) -> None:
    async def story() -> None:
        source = Source()
        source.open.clear()
        cache = ArtifactCache(tmp_path, source)
        first, second = (asyncio.create_task(cache.read(A, LEASE)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        source.open.set()
        assert await second == b"a" * 100

    asyncio.run(story())


def test_the_least_used_goes_first_past_the_cap(tmp_path: Path) -> None:
    async def story() -> None:
        cache = ArtifactCache(tmp_path, Source(), cap_bytes=250)
        for sha256 in (A, B, A, C):
            await cache.read(sha256, LEASE)
        assert names(tmp_path) == {A, C}

    asyncio.run(story())


def test_a_file_in_use_is_never_removed(tmp_path: Path) -> None:
    async def story() -> None:
        cache = ArtifactCache(tmp_path, Source(), cap_bytes=0)
        async with cache.held(A, LEASE) as file:
            await cache.read(B, LEASE)
            assert file.exists()
        assert names(tmp_path) == set()

    asyncio.run(story())


def test_a_failed_fetch_is_tried_again_by_the_next_who_asks(tmp_path: Path) -> None:
    async def story() -> None:
        source = Source()
        source.missing = {A}
        cache = ArtifactCache(tmp_path, source)
        with pytest.raises(NotFound):
            await cache.read(A, LEASE)
        source.missing = set()
        assert await cache.read(A, LEASE) == b"a" * 100

    asyncio.run(story())


def test_what_an_earlier_agent_fetched_is_found_again(tmp_path: Path) -> None:
    async def story() -> None:
        await ArtifactCache(tmp_path, Source()).read(A, LEASE)
        source = Source()
        assert await ArtifactCache(tmp_path, source).read(A, LEASE) == b"a" * 100
        assert source.fetched == []

    asyncio.run(story())
