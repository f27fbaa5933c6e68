"""The audit record: read by operators, checked by anybody, and no change to it goes unseen."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from gpool.core.errors import Conflict
from gpool.server.actions import audit
from gpool.server.store.operations.identity import audit as operations
from gpool.server.store.protocol import Operation, Statement, operation
from tests.server.server_desk import Desk

pytestmark = pytest.mark.anyio

TAMPERINGS = [
    "UPDATE audit SET outcome = 'ok' WHERE number = 1500",
    "UPDATE audit SET actor = 'u-0000000000001' WHERE number = 1",
    "UPDATE audit SET at = at + 1 WHERE number = 2500",
    'UPDATE audit SET facts = \'[["a","b"]]\' WHERE number = 7',
    "UPDATE audit SET hash = zeroblob(32) WHERE number = 2500",
    "DELETE FROM audit WHERE number = 1200",
    "DELETE FROM audit WHERE number > 2400",
    "DELETE FROM audit",
    "UPDATE audit SET number = number + 1 WHERE number = 2500",
    "UPDATE audit SET address = (SELECT address FROM audit WHERE number = 9) || 'x' WHERE number = 8",
]


async def fill(desk: Desk, count: int) -> None:
    entries = [
        audit.entry(
            desk.server.now, None, "sign_in", f"user {number}", outcome="refused", address="::1"
        )
        for number in range(count)
    ]
    await audit.note(desk.server, *entries)


async def test_the_record_is_paged_newest_first(desk: Desk) -> None:
    await fill(desk, 250)
    first = (await desk.get("/v1/audit?limit=200")).json()
    second = (await desk.get(f"/v1/audit?limit=200&cursor={first['next']}")).json()
    numbers = [item["number"] for item in first["items"] + second["items"]]
    assert numbers == list(range(250, 0, -1))
    assert second["next"] is None


@pytest.mark.parametrize("tampering", TAMPERINGS)
async def test_no_change_to_the_record_goes_unseen(desk: Desk, data: Path, tampering: str) -> None:
    await fill(desk, 2500)
    whole = (await desk.get("/v1/audit?verify=true")).json()
    assert (whole["whole"], whole["entries"]) == (True, 2500)
    with sqlite3.connect(data / "gpool.db") as raw:
        for trigger in raw.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'"):
            raw.execute(f"DROP TRIGGER {trigger[0]}")
        assert raw.execute(tampering).rowcount
    broken = (await desk.get("/v1/audit?verify=true")).json()
    assert broken["whole"] is False, tampering


async def test_a_record_linked_anew_is_caught_by_a_head_that_was_kept(
    desk: Desk, data: Path
) -> None:
    await fill(desk, 10)
    head = (await desk.get("/v1/audit?verify=true")).json()["head"]
    with sqlite3.connect(data / "gpool.db") as raw:
        for trigger in raw.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'"):
            raw.execute(f"DROP TRIGGER {trigger[0]}")
        raw.execute("DELETE FROM audit")
        raw.execute("UPDATE audit_head SET number = 0, hash = NULL")
    desk.clock.advance(1)
    await fill(desk, 11)  # as if it had always been so
    assert (await desk.get("/v1/audit?verify=true")).json()["whole"] is True  # the control
    assert (await desk.get(f"/v1/audit?verify=true&anchor={head}")).json()["whole"] is False


async def test_an_entry_is_written_with_its_effect_or_not_at_all(desk: Desk) -> None:
    @operation
    def effect(fails: bool) -> Operation[int]:
        yield Statement("SELECT 1")
        if fails:
            raise Conflict("no")
        return 7

    noted = audit.entry(desk.server.now, None, "effect")
    with pytest.raises(Conflict):
        await desk.server.write(audit.audited(effect(True), [noted]))
    assert await desk.server.store.read(operations.head()) is None
    assert await desk.server.write(audit.audited(effect(False), lambda n: [noted] * n)) == 7
    found = await desk.server.store.read(operations.entries(0, 100))
    assert len(found) == 7
