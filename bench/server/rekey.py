"""Changing keys while serving: how fast sealed fields move to a new key, and what requests notice of it.

    python -m bench.rekey [--fields 100000] [--quick] [--json FILE]

The server is a process of its own. Fields are secrets of tasks, a hundred each. Meanwhile one client submits a task and
reads its account in turn; `before` is the same with no rotation. At the end every field is opened with the new key.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import httpx2

from gpool.server.clock import SystemClock
from gpool.server.identity.envelope import FieldLocation
from gpool.server.identity.sealer import MasterSource, Sealer
from gpool.server.store.drivers.opening import open_store
from gpool.server.store.operations.identity import sealed_fields
from gpool.server.store.values import SealedField
from tests.tools.processes import Pool

EACH = 100
P99_MS = 300.0


@dataclass(frozen=True, slots=True)
class Rekeyed:
    fields: int
    seconds: float
    fields_per_s: int
    requests: int
    before_p50_ms: float
    before_p99_ms: float
    during_p50_ms: float
    during_p99_ms: float
    opened: int
    load: float

    def short_of(self) -> list[str]:
        said = []
        if self.opened < self.fields:
            said.append(f"{self.fields - self.opened} fields do not open")
        if self.during_p99_ms > P99_MS:
            said.append(f"p99 of requests is {self.during_p99_ms} ms")
        return said


class Client(threading.Thread):
    """Asks until it is stopped, and keeps how long each answer took."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(name="client")
        self._pool = pool
        self._done = threading.Event()
        self.took_ms: list[float] = []

    def run(self) -> None:
        headers = {"authorization": f"Bearer {self._pool.key}"}
        with httpx2.Client(base_url=self._pool.address, headers=headers, trust_env=False) as http:
            while not self._done.is_set():
                began = perf_counter()
                http.post("/v1/tasks", json={"command": ["true"]}).raise_for_status()
                between = perf_counter()
                http.get("/v1/me").raise_for_status()
                self.took_ms += [(between - began) * 1000, (perf_counter() - between) * 1000]

    def stop(self) -> list[float]:
        self._done.set()
        self.join()
        return sorted(self.took_ms)


def measure(folder: Path, fields: int) -> Rekeyed:
    pool = Pool(folder)
    pool.start(agents=())
    try:
        for number in range(fields // EACH):
            given = {f"SECRET_{i}": f"{number}-{i}-{os.urandom(8).hex()}" for i in range(EACH)}
            document = {"command": ["true"], "secrets": given}
            pool.ask("POST", "/v1/tasks", document).raise_for_status()
        client = Client(pool)
        client.start()
        threading.Event().wait(5)
        before = client.stop()
        client = Client(pool)
        client.start()
        began = perf_counter()
        told = pool.ask("POST", "/v1/admin/keys/rotate", {}).json()
        while told["left"]:
            threading.Event().wait(0.5)
            told = pool.ask("GET", "/v1/admin/keys").json()
        seconds = perf_counter() - began
        during = client.stop()
    finally:
        pool.stop()
    opened = asyncio.run(_open_all(folder / "data"))
    return Rekeyed(
        fields=fields,
        seconds=round(seconds, 2),
        fields_per_s=round(fields / seconds),
        requests=len(during),
        before_p50_ms=_quantile(before, 0.5),
        before_p99_ms=_quantile(before, 0.99),
        during_p50_ms=_quantile(during, 0.5),
        during_p99_ms=_quantile(during, 0.99),
        opened=opened,
        load=round(os.getloadavg()[0], 1),
    )


async def _open_all(data: Path) -> int:
    """How many secrets of tasks open, all under keys that are not retired."""
    store = await open_store(f"sqlite:///{data / 'gpool.db'}")
    sealer = Sealer(store, MasterSource(data / "master.key"), SystemClock().now)
    live = {key.id for key in await sealer.look_again() if key.retired_at is None}
    opened = 0
    after: SealedField | None = None
    while page := await store.read(sealed_fields.sealed_fields(after, 5000)):
        after = page[-1]
        for field in page:
            plain = await sealer.open(
                FieldLocation(field.table, field.row, field.column), field.sealed
            )
            opened += field.table == "task_secrets" and bool(plain) and field.sealed[1:9] in live
    await store.close()
    return opened


def _quantile(ordered: list[float], share: float) -> float:
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 2)


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--fields", type=int, default=100_000)
    asked.add_argument("--quick", action="store_true", help="10,000 fields")
    asked.add_argument("--json", type=Path)
    options = asked.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), 10_000 if options.quick else options.fields)
    print(f"{found.fields} sealed fields moved to a new key while serving (load {found.load})\n")
    print("| | measured | promised |\n|---|---|---|")
    print(f"| fields/s | {found.fields_per_s} ({found.seconds} s) | |")
    print(f"| fields that open afterwards | {found.opened} | {found.fields} |")
    print(f"| requests before, p50 · p99 ms | {found.before_p50_ms} · {found.before_p99_ms} | |")
    during = f"{found.during_p50_ms} · {found.during_p99_ms}"
    print(f"| requests meanwhile, p50 · p99 ms | {during} | p99 ≤ {P99_MS:g} |")
    if options.json:
        options.json.write_text(json.dumps(asdict(found), indent=2) + "\n")
    short = found.short_of()
    for said in short:
        print(f"falls short: {said}")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
