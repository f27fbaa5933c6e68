"""How fast a function starts that needs numpy, when its user has nothing running: warm against cold, in one run.

    python -m bench.warm [--json FILE] [--rounds 40] [--module numpy] [--quick]

`sandbox`: from asking the runtime for a runner to the first answer. `pool`: from `.remote()` to the value, a user that
the pool has never seen each time, over a real server and agent. *warm* takes a sandbox that was prepared before;
*cold* is the same function without `preload`, which imports the module itself. They alternate. A warm sample whose
sandbox turns out younger than the call was none, and is counted apart. Bar: the sandbox's warm median, 15 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import uvloop

from gpool.agent.runtime.bubblewrap.runtime import BubblewrapRuntime
from gpool.agent.runtime.protocol import RunnerJob, SandboxLimits
from gpool.agent.runtime.runner_calls import PYTHON
from gpool.client.client import Client
from tests.tools.processes import Daemon, Pool, eventually
from tests.tools.runtimes import Caller

BAR_MS = 15.0
LIMITS = SandboxLimits(cpu_milli=2000, memory_bytes=1 << 30)
WARM_WITHIN_S = 60.0


def user_of(module: str) -> Callable[[], tuple[bool, float]]:
    """The function of the user: whether the module was there, and how long its parent process had been."""

    def use() -> tuple[bool, float]:
        there = module in sys.modules
        __import__(module)
        started = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19])
        up = time.clock_gettime(time.CLOCK_BOOTTIME)
        return there, up - started / os.sysconf("SC_CLK_TCK")

    return use


def quantiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "p50_ms": round(ordered[len(ordered) // 2] * 1000, 2),
        "p99_ms": round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1000, 2),
        "samples": len(ordered),
    }


async def sandboxes(rounds: int, module: str) -> dict[str, dict[str, float]]:
    use = user_of(module)
    took: dict[str, list[float]] = {"warm": [], "cold": [], "cold, preload": []}
    plain = RunnerJob(PYTHON, (("NAME", "value"),), (), LIMITS)
    early = RunnerJob(PYTHON, (("NAME", "value"),), (), LIMITS, preload=(module,))
    with tempfile.TemporaryDirectory() as folder:
        runtime = BubblewrapRuntime(Path(folder))
        try:
            for number in range(rounds + 1):
                ready = await runtime.warm_runner(early, LIMITS)
                for name in took:
                    began = time.perf_counter()
                    if name == "warm":
                        await ready.assign(early.env)
                        calling = Caller(ready)
                    else:
                        job = plain if name == "cold" else early
                        calling = Caller(await runtime.start_runner(job))
                    answer = await calling.call(use)
                    assert not answer.raised, answer.error_text
                    if number:  # the first starts the launcher
                        took[name].append(time.perf_counter() - began)
                    await calling.runner.remove()
        finally:
            await runtime.close()
    return {name: quantiles(times) for name, times in took.items()}


def fresh_user(pool: Pool, number: int) -> Client:
    """Signed in, connected, and never seen before."""
    account = {"name": f"user-{number}", "password": f"a long password, number {number}"}
    near = httpx2.HTTPTransport(local_address=f"127.0.{2 + number // 200}.{1 + number % 200}")
    with httpx2.Client(base_url=pool.address, transport=near, timeout=60) as http:
        http.post("/v1/users", json=account).raise_for_status()
        signed_in = http.post("/v1/auth/password", json=account).raise_for_status()
    client = Client(pool.address, signed_in.json()["access_token"])
    client.api.get_json("/v1/me")
    return client


def await_one_past(agent: Daemon, taken: int) -> None:
    eventually("a sandbox is warm", lambda: agent.said().count("warmed") > taken, WARM_WITHIN_S)


def pooled(rounds: int, module: str) -> dict[str, dict[str, float]]:
    use = user_of(module)
    took: dict[str, list[float]] = {"warm": [], "cold": []}
    missed = 0
    with tempfile.TemporaryDirectory() as folder, Pool(Path(folder)) as pool:
        agent = pool.agents["first"]
        taken = 0
        for number in range(2 * rounds + 2):
            warm = number % 2 == 0
            client = fresh_user(pool, number)
            if warm and number:
                await_one_past(agent, taken)
            # the node is the operator's: its values are unpickled on request only
            task = client.task(use, preload=[module] if warm else [], results="pickle")
            began = time.perf_counter()
            there, age = task.remote()
            spent = time.perf_counter() - began
            client.close()
            assert there is warm
            was_ready = age > spent
            if number >= 2:
                if was_ready is warm:
                    took["warm" if warm else "cold"].append(spent)
                else:
                    missed += 1
            taken += was_ready
    found = {name: quantiles(times) for name, times in took.items()}
    found["warm"]["not warm after all"] = missed
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--module", default="numpy")
    parser.add_argument("--quick", action="store_true", help="8 rounds")
    options = parser.parse_args()
    rounds = 8 if options.quick else options.rounds
    found: dict[str, Any] = {
        "sandbox": uvloop.run(sandboxes(rounds, options.module)),
        "pool": pooled(rounds, options.module),
        "load": round(os.getloadavg()[0], 1),
    }
    print(f"| {options.module} | p50 | p99 | samples |\n|---|---|---|---|")
    for where in ("sandbox", "pool"):
        for name, figures in found[where].items():
            spent = f"{figures['p50_ms']:.1f} ms | {figures['p99_ms']:.1f} ms"
            print(f"| {where}, {name} | {spent} | {figures['samples']} |")
    print(
        f"\n{found['pool']['warm']['not warm after all']} not warm after all; load {found['load']}"
    )
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    sys.exit(found["sandbox"]["warm"]["p50_ms"] > BAR_MS)


if __name__ == "__main__":
    main()
