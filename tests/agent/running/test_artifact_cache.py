"""The artifact cache: one fetch for many, nothing removed in use, never past its cap for long."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path

import pytest

from gpool.agent.running.artifact_cache import ArtifactCache
from gpool.core.errors import NotFound, StaleLease
from gpool.transfer.requests import LeaseRef

LEASE = LeaseRef(1, 1)
CONTENTS = {hashlib.sha256(letter * 100).hexdigest(): letter * 100 for letter in (b"a", b"b", b"c")}
A, B, C = CONTENTS


def fill(target: Path) -> None:
    target.write_bytes(CONTENTS[target.name])


def leave_part(target: Path) -> None:
    target.with_name(f"{target.name}.part").write_bytes(b"x" * 60)


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


class Source:
    """Hands out 100 bytes per artifact, when it is allowed to."""

    def __init__(self) -> None:
        self.fetched: list[str] = []
        self.open = asyncio.Event()
        self.open.set()
        self.missing: set[str] = set()
        self.refused: set[LeaseRef] = set()

    async def __call__(self, sha256: str, target: Path, lease: LeaseRef) -> None:
        self.fetched.append(sha256)
        leave_part(target)
        await self.open.wait()
        if lease in self.refused:
            raise StaleLease("an old lease")
        if sha256 in self.missing:
            raise NotFound(f"no {sha256}")
        os.unlink(f"{target}.part")
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


def test_what_an_earlier_agent_left_spoilt_is_never_given_out(tmp_path: Path) -> None:
    """A machine that lost power may keep a name and not its bytes."""

    async def story() -> None:
        (tmp_path / A).write_bytes(b"\0" * 100)
        source = Source()
        cache = ArtifactCache(tmp_path, source)
        asking = [cache.read(A, LEASE) for _ in range(3)]
        assert set(await asyncio.gather(*asking)) == {b"a" * 100}
        assert source.fetched == [A]

    asyncio.run(story())


def test_one_who_comes_as_the_last_gives_up_gets_a_fetch_of_its_own(tmp_path: Path) -> None:
    async def story() -> None:
        source = Source()
        source.open.clear()
        cache = ArtifactCache(tmp_path, source)
        first = asyncio.create_task(cache.read(A, LEASE))
        while not source.fetched:  # noqa: ASYNC110 - the moment between two steps is what is tried
            await asyncio.sleep(0)
        first.cancel()
        second = asyncio.create_task(cache.read(A, LEASE))
        await asyncio.wait([first])
        source.open.set()
        assert await second == b"a" * 100
        assert first.cancelled()

    asyncio.run(story())


def test_a_refusal_to_one_lease_is_never_anothers(tmp_path: Path) -> None:
    async def story() -> None:
        source = Source()
        source.refused = {LEASE}
        source.open.clear()
        cache = ArtifactCache(tmp_path, source)
        old = asyncio.create_task(cache.read(A, LEASE))
        new = asyncio.create_task(cache.read(A, LeaseRef(2, 1)))
        await asyncio.sleep(0)
        source.open.set()
        await asyncio.wait([old, new])
        assert isinstance(old.exception(), StaleLease)
        assert new.result() == b"a" * 100

    asyncio.run(story())


def test_parts_nobody_waits_for_count_and_go_first(tmp_path: Path) -> None:
    async def story() -> None:
        leave_part(tmp_path / C)
        source = Source()
        source.missing = {B}
        cache = ArtifactCache(tmp_path, source, cap_bytes=200)
        with pytest.raises(NotFound):
            await cache.read(B, LEASE)
        assert names(tmp_path) == {f"{B}.part", f"{C}.part"}
        await cache.read(A, LEASE)
        assert names(tmp_path) == {A, f"{B}.part"}
        source.missing = set()
        await cache.read(B, LEASE)
        assert names(tmp_path) == {A, B}

    asyncio.run(story())


def test_what_was_used_last_is_known_after_a_restart(tmp_path: Path) -> None:
    async def story() -> None:
        cache = ArtifactCache(tmp_path, Source())
        for sha256 in (A, B, C):
            await cache.read(sha256, LEASE)
        for sha256 in (A, B, C):
            os.utime(tmp_path / sha256, (1, 1))
        await cache.read(A, LEASE)
        ArtifactCache(tmp_path, Source(), cap_bytes=100)
        assert names(tmp_path) == {A}

    asyncio.run(story())
