"""Cost of charging: no-op calls (W1) with prices on and off in alternating rounds, and lives of tasks under `max_cost`.

python -m bench.priced [--calls 10000] [--rounds 5] [--lives 1000] [--quick] [--json FILE]

Two pools of real processes, each with an agent of two slots and a price that another user pays; only one of them charges. Both run
all the time; a round runs the calls in one, then in the other, and the next round in the opposite order. The ratio is that of
the medians. Then tasks with a `max_cost` live through retries, reclaims, preemptions, losses and stops on a SQLite file; the
figure is how many cost more than their cap. Fails if the ratio is below 0.85 or a cap is exceeded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Any

import httpx2

from gpool.client.client import Client
from gpool.server.store import open_inline
from tests.tools.charging_runs import ChargedTasks
from tests.tools.processes import Pool

QUICK = {"calls": 1000, "rounds": 1, "lives": 100}
LEAST_RATIO = 0.85
MONEY = 10**12
RATE = 400_000  # micro-credits an hour
NAMES = {False: "off", True: "on"}


def ignore(_: object) -> None:
    """The call of W1: returns nothing."""


def spin() -> None:
    """Take 0.1 seconds."""
    began = time.monotonic()
    while time.monotonic() < began + 0.1:
        pass


def one_round(pool: Pool, client: Client, calls: int) -> dict[str, float]:
    task = client.task(ignore)
    used, began = pool.server.cpu_s(), time.perf_counter()
    done = sum(1 for _ in client.map(task, [itertools.repeat(None, calls)]))
    took, used = time.perf_counter() - began, pool.server.cpu_s() - used
    assert done == calls
    return {"tasks_per_s": calls / took, "server_cpu_us": used / calls * 1e6}


def consumer(pool: Pool) -> Client:
    """Client of another user than the owner, with money."""
    account = {"name": "payer", "password": "a long and dull password"}
    with httpx2.Client(base_url=pool.address, trust_env=False, verify=False) as http:
        http.post("/v1/users", json=account).raise_for_status()
        found = http.post("/v1/auth/password", json=account).raise_for_status().json()
        token = {"authorization": f"Bearer {found['access_token']}"}
        me = http.get("/v1/me", headers=token).raise_for_status().json()["id"]
        made = http.post("/v1/keys", json={"name": "bench"}, headers=token).raise_for_status()
    pool.ask("POST", "/v1/admin/ledger/grants", {"to": me, "amount_microcredits": MONEY})
    return Client(pool.address, made.json()["key"])


def measured(calls: int, rounds: int) -> dict[str, Any]:
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    with ExitStack() as stack:
        pools: dict[bool, tuple[Pool, Client]] = {}
        for is_on in (False, True):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            pool = Pool(folder, {"GPOOL_SERVER_PRICES": str(is_on).lower()})
            stack.callback(pool.stop)
            pool.start_server()
            pool.join("first", "--slots", "2", "--price", f"{RATE / 1e6}/h")
            client = consumer(pool)
            stack.callback(client.close)
            one_round(pool, client, min(calls, 500))  # warm-up
            pools[is_on] = (pool, client)
        for number in range(rounds):
            order = (False, True) if number % 2 == 0 else (True, False)
            for is_on in order:
                found[is_on].append(one_round(*pools[is_on], calls))
        pool, client = pools[True]
        run = client.task(spin).submit()  # a no-op costs less than a micro-credit
        run.result()
        cost = pool.ask("GET", f"/v1/tasks/{run.id}").json()["cost_microcredits"]
        assert cost >= RATE // 2 // 36_000, cost  # one of two slots
    result: dict[str, Any] = {
        NAMES[is_on]: {name: median(one[name] for one in got) for name in got[0]}
        for is_on, got in found.items()
    }
    result["rounds"] = {NAMES[is_on]: got for is_on, got in found.items()}
    result["ratio"] = {name: result["on"][name] / result["off"][name] for name in result["on"]}
    return result


def capped(lives: int) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lives.db"
        with closing(open_inline(path, synchronous="OFF")) as store:
            tasks = ChargedTasks(store, seed=51)
            found = [tasks.run(number) for number in range(lives)]
    return {
        "lives": lives,
        "attempts": sum(life.attempts for life in found),
        "exceeded": sum(life.cost > life.max_cost for life in found),
        "used_up": sum(life.cost == life.max_cost for life in found),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lives", type=int, default=1000)
    parser.add_argument("--quick", action="store_true", help="1,000 calls, one round, 100 lives")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    asked = parser.parse_args()
    if asked.quick:
        asked.calls, asked.rounds, asked.lives = QUICK["calls"], QUICK["rounds"], QUICK["lives"]
    lives = capped(asked.lives)
    print(
        f"max_cost exceeded by {lives['exceeded']} of {lives['lives']} tasks ({lives['attempts']} attempts; "
        f"{lives['used_up']} used it up to the micro-credit)"
    )
    found = measured(asked.calls, asked.rounds)
    print(f"W1, {asked.calls} calls, median of {asked.rounds} rounds in alternating order, prices:")
    for name in ("off", "on", "ratio"):
        row = found[name]
        print(
            f"{name:6}  {row['tasks_per_s']:10.3f} tasks/s  {row['server_cpu_us']:10.3f} µs server CPU a task"
        )
    if asked.json:
        asked.json.write_text(json.dumps({**found, "max_cost": lives}, indent=1))
    is_fast = asked.quick or found["ratio"]["tasks_per_s"] >= LEAST_RATIO
    return 0 if is_fast and not lives["exceeded"] else 1


if __name__ == "__main__":
    sys.exit(main())
