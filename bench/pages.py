"""Time of the pages with 1,000 GPUs and 10,000 tasks, and bytes of a first load: `python -m bench.pages`.

The server is in this process, without sockets. Views are rendered for every request, as for the first viewer.
"""

from __future__ import annotations

import asyncio
import gzip
import statistics
import tempfile
import time
from pathlib import Path

from gpool.server.web.live import LiveViews
from gpool.server.web.rendering import static_files
from tests.server.server_desk import Desk, StoppedClock, an_offer, open_desk

NODES, GPUS, TASKS, TURNS = 125, 8, 10_000, 40
WITHIN_MS = 200


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        desk = await open_desk(Path(folder), StoppedClock())
        async with desk.http:
            tasks = await _fill(desk)
            print(f"{NODES * GPUS} GPUs on {NODES} nodes, {TASKS} tasks, {TURNS} requests each")
            print(f"{'page':<14}{'p50 ms':>8}{'p95 ms':>8}{'kB':>7}")
            for path in ("/", "/?q=bench-7", "/tasks", "/tasks/new", "/nodes"):
                await _measure(desk, path, [path] * TURNS)
            await _measure(desk, "/tasks/ID", [f"/tasks/{task}" for task in tasks])
            await _first_load(desk)
        await desk.server.store.close()


async def _fill(desk: Desk) -> list[str]:
    """Return the newest tasks, which wait: another one for each request."""
    for number in range(NODES):
        desk.clock.advance(1)  # joins are rate limited
        await desk.agent(f"bench-{number}", an_offer(8, GPUS))
    answer = await desk.post("/v1/tasks", {"command": ["true"], "copies": TASKS, "gpu": 1})
    assert answer.status_code == 202, answer.text
    await desk.schedule()
    return [str(id_) for id_ in answer.json()["ids"][-TURNS:]]


async def _measure(desk: Desk, name: str, paths: list[str]) -> None:
    took, size = [], 0
    for path in paths:
        desk.app.state.live_views = LiveViews()
        before = time.perf_counter()
        answer = await desk.get(path, headers={"accept": "text/html"})
        took.append((time.perf_counter() - before) * 1000)
        assert answer.status_code == 200, answer.text[:500]
        size = len(answer.content)
    p95 = statistics.quantiles(took, n=20)[-1]
    mark = "" if p95 <= WITHIN_MS else f"   past {WITHIN_MS} ms"
    print(f"{name:<14}{statistics.median(took):>8.0f}{p95:>8.0f}{size / 1000:>7.0f}{mark}")


async def _first_load(desk: Desk) -> None:
    files = sum(len(file.zipped) for file in static_files().values())
    page = len(gzip.compress((await desk.get("/sign-in")).content))
    print(f"first load: {(files + page) / 1000:.1f} kB compressed ({files / 1000:.1f} of files)")


if __name__ == "__main__":
    asyncio.run(main())
