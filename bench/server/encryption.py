"""Cost of encryption at rest: 10,000 no-op calls (W1) with and without it, in alternating rounds of one run.

python -m bench.encryption [--calls 10000] [--rounds 3] [--quick] [--json FILE]

Two pools of real processes, one that encrypts and one that does not, each with an agent of two slots. Both run all the
time; a round runs the calls in one, then in the other, and the next round in the opposite order. The ratio is that of
the medians. Processor seconds are those of the server process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from gpool.client.client import Client
from tests.tools.processes import Pool

QUICK = {"calls": 1000, "rounds": 1}
NAMES = {False: "plain", True: "encrypted"}


def ignore(_: object) -> None:
    """The call of W1: returns nothing."""


def one_round(pool: Pool, client: Client, calls: int) -> dict[str, float]:
    task = client.task(ignore)
    used, began = pool.server.cpu_s(), time.perf_counter()
    done = sum(1 for _ in client.map(task, [itertools.repeat(None, calls)]))
    took, used = time.perf_counter() - began, pool.server.cpu_s() - used
    assert done == calls
    return {"tasks_per_s": calls / took, "server_cpu_us": used / calls * 1e6}


def measured(calls: int, rounds: int) -> dict[str, Any]:
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    with ExitStack() as stack:
        pools: dict[bool, tuple[Pool, Client]] = {}
        for is_on in (False, True):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            settings = {"GPOOL_SERVER_ENCRYPT_DATA": str(is_on).lower()}
            pool = Pool(folder, settings)
            stack.callback(pool.stop)
            pool.start_server()
            pool.join("first", "--slots", "2")
            client = Client(pool.address, pool.key)
            stack.callback(client.close)
            one_round(pool, client, min(calls, 500))  # warm-up
            pools[is_on] = (pool, client)
        for number in range(rounds):
            order = (False, True) if number % 2 == 0 else (True, False)
            for is_on in order:
                found[is_on].append(one_round(*pools[is_on], calls))
    result: dict[str, Any] = {
        NAMES[is_on]: {name: median(one[name] for one in got) for name in got[0]}
        for is_on, got in found.items()
    }
    result["rounds"] = {NAMES[is_on]: got for is_on, got in found.items()}
    plain, encrypted = result["plain"], result["encrypted"]
    result["ratio"] = {name: encrypted[name] / plain[name] for name in plain}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="1,000 calls, one round")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    asked = parser.parse_args()
    calls, rounds = (
        (QUICK["calls"], QUICK["rounds"]) if asked.quick else (asked.calls, asked.rounds)
    )
    found = measured(calls, rounds)
    print(f"W1, {calls} calls, median of {rounds} rounds in alternating order")
    for name in ("plain", "encrypted", "ratio"):
        row = found[name]
        print(
            f"{name:10}  {row['tasks_per_s']:10.3f} tasks/s  {row['server_cpu_us']:10.3f} µs server CPU a task"
        )
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
