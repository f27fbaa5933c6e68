"""Races of parallel refreshes with one token, over a real socket: one family survives each, nobody is signed out."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2
import uvloop

from gpool.server.app import open_server
from gpool.server.http import LimitedServer
from gpool.server.main import configuration
from gpool.server.settings import Settings

PARALLEL, RACES, QUICK_RACES = 50, 500, 50
PASSWORD = "a long enough password"


async def races(folder: Path, count: int) -> dict[str, Any]:
    settings = Settings(data=folder, port=0, password_passes=1, password_memory_kib=64)
    runner = LimitedServer(configuration(await open_server(settings)))
    serving = asyncio.create_task(runner.serve())
    while not runner.started:  # noqa: ASYNC110 - uvicorn tells it in no other way
        await asyncio.sleep(0.01)
    port = runner.servers[0].sockets[0].getsockname()[1]
    limits = httpx2.Limits(max_connections=PARALLEL)
    url = f"http://127.0.0.1:{port}"
    async with httpx2.AsyncClient(base_url=url, limits=limits, timeout=30) as http:
        account = {"name": "racer", "password": PASSWORD}
        await http.post("/v1/users", json=account)
        tokens = (await http.post("/v1/auth/password", json=account)).json()
        refused = forked = 0
        began = time.monotonic()
        for _ in range(count):
            token = {"refresh_token": tokens["refresh_token"]}
            answers = await asyncio.gather(
                *(http.post("/v1/auth/refresh", json=token) for _ in range(PARALLEL))
            )
            refused += sum(answer.status_code != 200 for answer in answers)
            good = [answer.json() for answer in answers if answer.status_code == 200]
            forked += len({each["refresh_token"] for each in good}) != 1
            tokens = good[0]
        took = time.monotonic() - began
        bearer = {"authorization": f"Bearer {tokens['access_token']}"}
        alive = (await http.get("/v1/me", headers=bearer)).status_code == 200
    runner.should_exit = True
    await serving
    return {
        "races": count,
        "parallel": PARALLEL,
        "refused": refused,
        "forked": forked,
        "signed_in_at_the_end": alive,
        "refreshes_per_second": round(count * PARALLEL / took),
    }


def main() -> None:
    count = RACES if "--full" in sys.argv else QUICK_RACES
    with (
        tempfile.TemporaryDirectory() as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        print(json.dumps(runner.run(races(Path(folder), count)), indent=2))


if __name__ == "__main__":
    main()
