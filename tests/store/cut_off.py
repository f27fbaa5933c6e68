"""A PostgreSQL store whose packets are dropped by nftables, and later not: seconds until a write and a read fail.

Run in a network namespace of its own: `python -m tests.store.cut_off`, which prints JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import suppress

from gpool.core.errors import Unreachable
from gpool.core.model import Instant
from gpool.server.store import open_store
from gpool.server.store.operations.identity import users
from gpool.server.store.operations.leases.grants import take_term
from tests.tools.postgres_cluster import cluster
from tests.tools.replica_set import dropped

HOST = "127.0.1.1"
GIVE_UP_S = 30.0


async def measured(url: str, port: int) -> dict[str, float]:
    store = await open_store(url)
    assert await store.write(take_term(Instant(1))) == 1
    assert await store.read(users.user_by_name("nobody")) is None
    found = {}
    with dropped(HOST, port):
        for name, ask in (
            ("write", lambda: store.write(take_term(Instant(2)))),
            ("next write", lambda: store.write(take_term(Instant(3)))),
            ("read", lambda: store.read(users.user_by_name("nobody"))),
        ):
            began = time.monotonic()
            with suppress(Unreachable, TimeoutError):
                async with asyncio.timeout(GIVE_UP_S):
                    await ask()
            found[name] = time.monotonic() - began
    assert await store.write(take_term(Instant(4))) > 1
    assert await store.read(users.user_by_name("nobody")) is None
    await store.close()
    return found


if __name__ == "__main__":
    with cluster(["127.0.0.1", HOST]) as database:
        found = asyncio.run(measured(database.url(HOST), database.port))
    sys.stdout.write(json.dumps(found))
