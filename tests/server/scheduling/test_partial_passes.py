"""A pass that had to stop early is followed by another at once, and only while it gets somewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpool.core.scheduler.passes.starts import MAX_STARTS
from tests.server.server_desk import Desk, an_offer

pytestmark = pytest.mark.anyio


async def test_what_a_pass_leaves_out_is_started_by_the_next_without_a_tick(desk: Desk) -> None:
    room = MAX_STARTS + 20
    await desk.agent(offer=replace(an_offer(cpus=room), memory_bytes=room << 30))
    await desk.calls(MAX_STARTS + 50)
    wake = desk.server.picture.changed
    await wake.wait(0)
    assert await desk.schedule() == MAX_STARTS
    assert wake.called
    await wake.wait(0)
    assert (
        await desk.schedule() == 20
    )  # all that fits: the rest waits for room, and nothing is gained by looking
    assert not wake.called
