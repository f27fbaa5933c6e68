"""A small month of `bench.retention`: nothing that is stored grows after the retention time."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.retention import simulated, too_large

pytestmark = pytest.mark.anyio


async def test_thirty_days_of_use_are_no_larger_than_fifteen(data: Path) -> None:
    month = simulated(data, days=30, tasks=10, keep=7, steps=1, users=["ada"], encrypt_data=True)
    found = [day async for day in month]
    assert [grown for grown in too_large(found) if not grown.startswith("memory")] == []
    middle, last = found[14], found[-1]
    assert last.rows["tasks"] == middle.rows["tasks"] == 7 * 10
    assert last.folder_bytes > 0
