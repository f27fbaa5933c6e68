"""Servers with own, empty data directories on one database have the same keys and certificate."""

from __future__ import annotations

import asyncio
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest
from pydantic import SecretStr

from gpool.core.errors import Invalid
from gpool.server.first_start import ensure_operator
from gpool.server.replicas.shared_secrets import CERTIFICATE, OPERATOR, SharedSecrets
from gpool.server.store.operations.identity import sealed_fields
from tests.server.replicas.replica_desks import replica_desks
from tests.server.server_desk import StoppedClock, open_desk

pytestmark = pytest.mark.anyio


def given(folder: Path, *names: str) -> dict[str, Any]:
    return {
        "folders": [folder / name for name in names],
        "master_key": SecretStr(token_hex(32)),
        "tls": True,
        "artifact_folder": folder / "artifacts",
    }


async def test_a_server_with_an_empty_folder_has_the_pool_s_certificate_and_operator_key(
    url: str, tmp_path: Path
) -> None:
    async with replica_desks(url, tmp_path, **given(tmp_path, "a", "b")) as (_, (first, second)):
        shown, other = first.desk.server.certificate, second.desk.server.certificate
        assert shown is not None
        assert other is not None
        assert shown.fingerprint == other.fingerprint
        assert first.desk.server.pinned == second.desk.server.pinned
        files = [each.desk.server.settings.data / "server.pem" for each in (first, second)]
        assert files[0].read_bytes() == files[1].read_bytes()
        assert files[1].stat().st_mode & 0o777 == 0o600
        assert first.desk.key == second.desk.key
        assert (await second.desk.get("/v1/me")).json()["name"] == "operator"
        for name, plain in ((CERTIFICATE, files[0].read_bytes()), (OPERATOR, b"gpool")):
            stored = await first.desk.server.store.read(sealed_fields.server_secret(name))
            assert stored is not None
            assert plain[:40] not in stored, "it is encrypted"


async def test_a_server_s_own_certificate_gives_way_to_that_of_the_pool(
    url: str, tmp_path: Path
) -> None:
    wanted = given(tmp_path, "a")
    alone = await open_desk(tmp_path / "b", StoppedClock(), tls=True)
    before = alone.server.pinned
    await alone.http.aclose()
    await alone.server.store.close()
    async with replica_desks(url, tmp_path, **wanted) as (_, (first,)):
        again = {**wanted, "folders": [tmp_path / "b"]}
        async with replica_desks(url, tmp_path, **again) as (_, (second,)):
            assert second.desk.server.pinned == first.desk.server.pinned != before


async def test_a_revoked_operator_key_is_replaced_for_all_servers(url: str, tmp_path: Path) -> None:
    async with replica_desks(url, tmp_path, **given(tmp_path, "a", "b")) as (_, (first, second)):
        [key] = (await first.desk.get("/v1/keys")).json()["items"]
        answer = await first.desk.http.delete(f"/v1/keys/{key['id']}")
        assert answer.status_code in (200, 204), answer.text
        await second.follow()
        made = await ensure_operator(second.desk.server)
        assert made != second.desk.key
        assert await ensure_operator(first.desk.server) == made


async def test_servers_that_start_at_the_same_moment_agree(url: str, tmp_path: Path) -> None:
    wanted = given(tmp_path)
    names, clock = [tmp_path / name for name in "abc"], StoppedClock()
    del wanted["folders"]
    desks = await asyncio.gather(
        *(open_desk(name, clock, database_url=url, **wanted) for name in names)
    )
    try:
        assert len({desk.server.pinned for desk in desks}) == 1
        assert len({desk.server.gate.name for desk in desks}) == 1
        for desk in desks:
            assert await desks[0].server.credentials.who(desk.key) is not None
    finally:
        for desk in desks:
            await desk.http.aclose()
            await desk.server.replica.stop()  # type: ignore[attr-defined]
            await desk.server.store.close()


async def test_a_server_with_another_master_key_does_not_start_and_says_why(
    url: str, tmp_path: Path
) -> None:
    async with replica_desks(url, tmp_path, **given(tmp_path, "a")) as (_, (first,)):
        with pytest.raises(Invalid, match=r"another master key.*GPOOL_SERVER_MASTER_KEY"):
            async with replica_desks(url, tmp_path, **given(tmp_path, "b")):
                pass
        found = SharedSecrets(first.desk.server.store, first.desk.server.sealer)
        assert await found.find(CERTIFICATE) is not None  # control: the first one reads it
