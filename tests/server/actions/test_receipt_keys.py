"""Receipt keys on a real server: created and replaced by operators, read by anybody, kept across restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpool.core.model import Permission
from gpool.server.scheduling.loops import RotateKeys
from gpool.server.store.operations.identity import receipt_keys
from gpool.wallet import canonical_json
from gpool.wallet.receipt_keys import KeyHistory, parse_history
from tests.server.server_desk import Desk, open_desk

pytestmark = pytest.mark.anyio
ROTATE = "/v1/admin/receipt-keys/rotate"


async def fetched(desk: Desk) -> KeyHistory:
    """The public history as a stranger reads it; parsing checks its signatures."""
    answer = await desk.bare.get("/v1/receipt-keys")
    assert answer.status_code == 200, answer.text
    return parse_history(canonical_json.encode(answer.json()))


async def rotated(desk: Desk, **headers: str) -> KeyHistory:
    answer = await desk.post(ROTATE, headers=headers)
    assert answer.status_code == 200, answer.text
    return parse_history(canonical_json.encode(answer.json()))


async def test_a_pool_has_no_receipt_key_until_an_operator_creates_one(desk: Desk) -> None:
    missing = await desk.bare.get("/v1/receipt-keys")
    assert missing.status_code == 404
    assert "gpool admin receipt-keys rotate" in missing.json()["detail"]
    first = await rotated(desk)
    assert first.pool == desk.server.gate.name
    assert first.keys[0].from_ms == desk.clock.now() // 1000
    assert await fetched(desk) == first


async def test_every_rotation_continues_the_history_also_when_the_clock_went_back(
    desk: Desk,
) -> None:
    before = await rotated(desk)
    for seconds in (60, 0, -1):
        desk.clock.advance(seconds)
        after = await rotated(desk)
        assert after.extends(before)
        assert len(after.keys) == len(before.keys) + 1
        before = after
    assert await fetched(desk) == before


async def test_the_private_half_of_a_replaced_key_is_gone(desk: Desk) -> None:
    await rotated(desk)
    await rotated(desk)
    old, new = await desk.server.store.read(receipt_keys.receipt_keys())
    assert (old.sealed, new.sealed is None) == (None, False)


async def test_the_same_request_rotates_once(desk: Desk) -> None:
    first = await rotated(desk, **{"idempotency-key": "one"})
    again = await rotated(desk, **{"idempotency-key": "one"})
    assert first == again == await fetched(desk)
    assert len((await rotated(desk, **{"idempotency-key": "two"})).keys) == 2


async def test_the_history_is_kept_across_restarts_and_new_encryption_keys(
    desk: Desk, data: Path
) -> None:
    before = await rotated(desk)
    await desk.post("/v1/admin/keys/rotate", {"master": True})
    await RotateKeys(desk.server).run_once(desk.server.now)
    other = await open_desk(data, desk.clock)
    after = await rotated(other)  # opens the key that was sealed anew
    assert after.extends(before)
    await other.http.aclose()
    await other.server.store.close()


async def test_only_operators_rotate_and_the_audit_log_names_the_key(desk: Desk) -> None:
    headers = await desk.person("carol", Permission.CONSUMER, Permission.PROVIDER)
    assert (await desk.bare.post(ROTATE, headers=headers)).status_code == 403
    assert (await desk.bare.post(ROTATE)).status_code == 401
    await rotated(desk)
    (row,) = await desk.server.store.read(receipt_keys.receipt_keys())
    entries = (await desk.get("/v1/audit")).json()["items"]
    assert ("receipt_keys.rotate", row.id) in [(one["action"], one["thing"]) for one in entries]
