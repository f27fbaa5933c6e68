"""The bench's client sends again what got no answer on a connection that was kept, and gives up on a fresh one."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from bench.doors import Closed, Door

from tests.server.server_desk import serving

pytestmark = pytest.mark.anyio
TRUE = b'{"command":["true"]}'


async def test_it_survives_a_server_that_closes_idle_connections_at_once(data: Path) -> None:
    with serving(data, keep_alive_s=0.002) as live:
        door = Door(live.url, live.key, keyed=True)
        seen = set()
        for number in range(40):
            seen.update(await door.submit(TRUE))
            with anyio.move_on_after(number % 6 / 1000):
                await anyio.Event().wait()
        assert len(seen) == 40
        door.close()


async def test_a_server_that_never_answers_is_not_asked_for_ever() -> None:
    asked = []

    async def hang_up(stream: anyio.abc.SocketStream) -> None:
        asked.append(await stream.receive())
        await stream.aclose()

    listening = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listening.extra(anyio.abc.SocketAttribute.local_port)
    async with listening, anyio.create_task_group() as group:
        group.start_soon(listening.serve, hang_up)
        door = Door(f"http://127.0.0.1:{port}", "key")
        with pytest.raises(Closed):
            await door.submit(TRUE)
        group.cancel_scope.cancel()
    assert len(asked) == 1
