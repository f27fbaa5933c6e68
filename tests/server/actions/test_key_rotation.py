"""RotateKeys change while the server serves: every field moves, none is lost, and a crash in the middle changes nothing."""

from __future__ import annotations

import base64
import secrets
from pathlib import Path

import pytest

from gpool.core.errors import InternalFault, Invalid
from gpool.core.ids import SpecId
from gpool.core.model import Permission
from gpool.server.identity import sealer as sealing
from gpool.server.identity.envelope import FieldLocation
from gpool.server.identity.sealer import MasterSource, Sealer, secret_place
from gpool.server.scheduling.loops import RotateKeys
from gpool.server.store.operations.identity import sealed_fields
from tests.server.server_desk import Desk, open_desk

pytestmark = pytest.mark.anyio


async def plant(desk: Desk, count: int) -> dict[tuple[int, str], bytes]:
    """So many secrets, straight into the store."""
    sealer = desk.server.sealer
    planted = {}
    for _ in range(count // 10):
        spec = SpecId(desk.server.ids.next())
        fields = []
        for number in range(10):
            name, value = f"NAME/{number}", secrets.token_bytes(20)
            planted[spec, name] = value
            fields.append((name, await sealer.seal(secret_place(spec, name), value)))
        await desk.server.store.write(sealed_fields.put_secrets(spec, fields))
    return planted


async def opened(sealer: Sealer, desk: Desk) -> dict[tuple[int, str], bytes]:
    found = {}
    for field in await desk.server.store.read(sealed_fields.sealed_fields(None, 100_000)):
        place = FieldLocation(field.table, field.row, field.column)
        plain = await sealer.open(place, field.sealed)
        if field.table == "task_secrets":
            spec, _, name = field.row.partition("/")
            found[int(spec), name] = plain
    return found


async def no_pause() -> None:
    return


async def test_a_rotation_moves_every_field_and_then_forgets_the_old_key(desk: Desk) -> None:
    planted = await plant(desk, 1200)
    told = await desk.post("/v1/admin/keys/rotate", {})
    assert told.status_code == 202
    # One field more: the key that signs tokens.
    assert told.json() == {"data_keys": 1, "retired": 1, "fields": 1201, "left": 1201, "masters": 1}
    await RotateKeys(desk.server).run_once(desk.server.now)
    told = await desk.get("/v1/admin/keys")
    assert told.json() == {"data_keys": 2, "retired": 1, "fields": 1201, "left": 0, "masters": 1}
    assert await opened(desk.server.sealer, desk) == planted
    desk.clock.advance(sealing.GRACE / 1_000_000)
    await RotateKeys(desk.server).run_once(desk.server.now)
    assert (await desk.get("/v1/admin/keys")).json()["data_keys"] == 1
    assert await opened(desk.server.sealer, desk) == planted


async def test_a_rotation_that_was_cut_off_is_finished_by_the_next_server(
    desk: Desk, data: Path
) -> None:
    planted = await plant(desk, 1200)
    await desk.post("/v1/admin/keys/rotate", {})

    class Crash(Exception):
        pass

    async def crash() -> None:
        raise Crash

    with pytest.raises(Crash):
        await desk.server.sealer.rekey(crash)
    assert (await desk.get("/v1/admin/keys")).json()["left"] == 1201 - sealing.PAGE
    other = await open_desk(data, desk.clock)
    await RotateKeys(other.server).run_once(other.server.now)
    assert (await other.get("/v1/admin/keys")).json()["left"] == 0
    assert await opened(other.server.sealer, other) == planted
    await other.http.aclose()
    await other.server.store.close()


async def test_what_another_server_seals_during_a_rotation_is_never_lost(
    desk: Desk, data: Path
) -> None:
    other = await open_desk(data, desk.clock)
    before = await plant(other, 10)
    await desk.post("/v1/admin/keys/rotate", {})
    await RotateKeys(desk.server).run_once(desk.server.now)
    meanwhile = await plant(other, 10)  # it has not heard: still under its retired key
    desk.clock.advance(sealing.GRACE / 1_000_000)
    await RotateKeys(desk.server).run_once(desk.server.now)
    later = await plant(other, 10)
    await RotateKeys(other.server).run_once(other.server.now)
    await RotateKeys(desk.server).run_once(desk.server.now)
    assert await opened(desk.server.sealer, desk) == before | meanwhile | later
    await other.http.aclose()
    await other.server.store.close()


async def test_a_new_master_wraps_every_key_and_the_old_one_opens_nothing(
    desk: Desk, data: Path
) -> None:
    planted = await plant(desk, 20)
    old = (data / "master.key").read_text()
    assert (await desk.post("/v1/admin/keys/rotate", {"master": True})).status_code == 202
    new = (data / "master.key").read_text()
    assert new != old
    assert len(new.split()) == 1
    assert (data / "master.key").stat().st_mode & 0o777 == 0o600
    assert await opened(desk.server.sealer, desk) == planted
    fresh = Sealer(desk.server.store, MasterSource(data / "master.key"), desk.clock.now)
    assert await opened(fresh, desk) == planted
    stale = Sealer(desk.server.store, MasterSource(data / "none", old), desk.clock.now)
    with pytest.raises(Invalid, match="which is missing"):
        await opened(stale, desk)


async def test_a_master_from_a_variable_or_a_command_is_changed_where_it_comes_from(
    desk: Desk, data: Path, tmp_path: Path
) -> None:
    one = (data / "master.key").read_text().strip()
    two = base64.b64encode(secrets.token_bytes(32)).decode()
    place = FieldLocation("sessions", "s", "seed_sealed")
    by_text = Sealer(desk.server.store, MasterSource(tmp_path / "none", one), desk.clock.now)
    kept = await by_text.seal(place, b"seed")
    printed = tmp_path / "keys"
    printed.write_text(f"{two}\n{one}\n")
    command = MasterSource(tmp_path / "none", "", f"cat {printed}")
    by_command = Sealer(desk.server.store, command, desk.clock.now)
    assert await by_command.open(place, kept) == b"seed"
    assert await by_command.rotate_master() == 2
    printed.write_text(two)
    alone = Sealer(desk.server.store, command, desk.clock.now)
    assert await alone.open(place, kept) == b"seed"
    assert not (tmp_path / "none").exists()


async def test_a_thousand_swapped_ciphertexts_never_open(desk: Desk) -> None:
    await plant(desk, 1000)
    fields = await desk.server.store.read(sealed_fields.sealed_fields(None, 1000))
    shifted = [*fields[1:], fields[0]]
    opens = 0
    for here, there in zip(fields, shifted, strict=True):
        place = FieldLocation(here.table, here.row, here.column)
        assert await desk.server.sealer.open(place, here.sealed)  # the control
        try:
            await desk.server.sealer.open(place, there.sealed)
            opens += 1
        except InternalFault:
            pass
    assert opens == 0


async def test_only_operators_see_or_change_keys(desk: Desk) -> None:
    headers = await desk.person("carol", Permission.CONSUMER, Permission.PROVIDER)
    for method, path in (
        ("GET", "/v1/admin/keys"),
        ("POST", "/v1/admin/keys/rotate"),
        ("GET", "/v1/audit"),
    ):
        answer = await desk.bare.request(method, path, headers=headers)
        assert answer.status_code == 403, answer.text
        assert (await desk.bare.request(method, path)).status_code == 401
