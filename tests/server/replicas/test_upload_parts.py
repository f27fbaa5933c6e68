"""Parts of one upload arrive at different servers, which share a folder; without a common folder they do not start."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from secrets import token_hex
from typing import Any

import httpx2
import pytest
from pydantic import SecretStr

from gpool.core.errors import Invalid
from gpool.server.app import close_server
from tests.server.replicas.replica_desks import ReplicaDesk, executed, replica_desks
from tests.server.server_desk import Desk, StoppedClock, open_desk

pytestmark = pytest.mark.anyio
DATA = bytes(range(256)) * 64
SHA256 = hashlib.sha256(DATA).hexdigest()
PART = len(DATA) // 4


def given(folder: Path, *names: str) -> dict[str, Any]:
    return {
        "folders": [folder / name for name in names],
        "master_key": SecretStr(token_hex(32)),
    }


async def put(replica: ReplicaDesk, first: int, body: Any = None) -> httpx2.Response:
    last = first + PART - 1
    headers = {"Content-Range": f"bytes {first}-{last}/{len(DATA)}"}
    content = DATA[first : last + 1] if body is None else body
    return await replica.desk.http.put(f"/v1/artifacts/{SHA256}", content=content, headers=headers)


async def test_parts_of_one_upload_may_arrive_at_different_servers(
    url: str, tmp_path: Path
) -> None:
    shared = {**given(tmp_path, "a", "b"), "artifact_folder": tmp_path / "shared"}
    async with replica_desks(url, tmp_path, **shared) as (_, replicas):
        one, other = replicas
        codes = [
            (await put(replicas[number % 2], number * PART)).status_code for number in range(4)
        ]
        assert codes == [202, 202, 202, 201]
        for replica in replicas:
            found = await replica.desk.get(f"/v1/artifacts/{SHA256}")
            assert found.content == DATA
        assert await executed(url, "SELECT 1 FROM uploads") == []
        again = await one.desk.http.head(f"/v1/artifacts/{SHA256}")
        assert (again.status_code, other.desk.server.settings.folder) == (200, tmp_path / "shared")


async def test_a_part_is_refused_while_another_server_writes_one_and_after_its_death_accepted(
    url: str, tmp_path: Path
) -> None:
    async with replica_desks(url, tmp_path) as (_, (one, other)):
        began, rest = asyncio.Event(), asyncio.Event()

        async def slowly() -> AsyncIterator[bytes]:
            yield DATA[: PART // 2]
            began.set()
            await rest.wait()
            yield DATA[PART // 2 : PART]

        writing = asyncio.create_task(put(one, 0, slowly()))
        await began.wait()
        refused = await put(other, 0)
        assert refused.status_code == 409
        assert "wait for it" in refused.json()["detail"]
        rest.set()
        assert (await writing).status_code == 202
        await executed(url, "UPDATE uploads SET writer = 1")  # of a replica that died in a part
        assert (await put(other, PART)).status_code == 202
        assert [tuple(row) for row in await executed(url, "SELECT writer FROM uploads")] == [(0,)]


async def test_a_server_with_another_folder_does_not_start_beside_others(
    url: str, tmp_path: Path
) -> None:
    wanted = given(tmp_path, "a")
    async with replica_desks(url, tmp_path, **wanted):
        apart = {**wanted, "folders": [tmp_path / "b"]}
        with pytest.raises(Invalid, match="GPOOL_SERVER_ARTIFACT_FOLDER"):
            async with replica_desks(url, tmp_path, **apart):
                pass
        shared = {**apart, "artifact_folder": tmp_path / "a" / "artifacts"}
        async with replica_desks(url, tmp_path, **shared):  # control
            pass
    async with replica_desks(url, tmp_path, **apart):  # alone: the pool moved to another machine
        pass


async def test_of_two_servers_with_own_folders_that_start_at_once_one_goes_on(
    url: str, tmp_path: Path
) -> None:
    wanted, clock = given(tmp_path), StoppedClock()
    del wanted["folders"]
    opening = [open_desk(tmp_path / name, clock, database_url=url, **wanted) for name in ("a", "b")]
    found = await asyncio.gather(*opening, return_exceptions=True)
    desks = [each for each in found if isinstance(each, Desk)]
    try:
        assert [type(each) for each in found if not isinstance(each, Desk)] == [Invalid]
        assert len(desks) == 1
    finally:
        for desk in desks:
            await desk.http.aclose()
            await close_server(desk.server)
