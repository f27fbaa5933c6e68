"""How fast sandboxes start and runners answer: fresh sandboxes a second for /bin/true, no-op calls a second.

python bench/sandbox.py [--json FILE] [--sandboxes 300] [--calls 20000] [--at-once 2]
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import pickle
import resource
import sys
import tempfile
import time
from pathlib import Path

import cloudpickle
import uvloop

from gpool.agent.runtime.bubblewrap import BubblewrapRuntime
from gpool.agent.runtime.protocol import Answer, Call, CommandJob, Limits, RunnerJob

LIMITS = Limits(cpu_milli=2000, memory_bytes=1 << 30)
LINE = 500  # calls in line at a runner, as the scheduler keeps them


def spent_s() -> float:
    """Processor seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def sandboxes(runtime: BubblewrapRuntime, count: int, at_once: int) -> dict[str, float]:
    left = iter(range(count))

    async def one_after_another() -> None:
        for _ in left:
            sandbox = await runtime.start_command(CommandJob(("/bin/true",), (), (), (), LIMITS))
            async for _ in sandbox.output():
                pass
            ended = await sandbox.ended()
            assert ended.exit_code == 0, ended
            await sandbox.remove()

    before, began = spent_s(), time.perf_counter()
    await asyncio.gather(*(one_after_another() for _ in range(at_once)))
    took = time.perf_counter() - began
    return {"per_second": count / took, "agent_cpu_us": (spent_s() - before) / count * 1e6}


async def calls(runtime: BubblewrapRuntime, count: int) -> dict[str, float]:
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    runner = await runtime.start_runner(RunnerJob(minor, (), (), LIMITS))
    pickled = cloudpickle.dumps(lambda value: value)
    name = hashlib.sha256(pickled).hexdigest()
    await runner.define(name, pickled)
    events = runner.events()
    arguments = pickle.dumps(((1,), {}))
    sent = got = 0
    before, began = spent_s(), time.perf_counter()
    while got < count:
        room = min(LINE - (sent - got), count - sent)
        await runner.send([Call(number, name, arguments) for number in range(sent, sent + room)])
        sent += room
        got += sum(isinstance(event, Answer) for event in await anext(events))
    took = time.perf_counter() - began
    cpu = (spent_s() - before) / count * 1e6
    trips = []
    for number in range(300):
        start = time.perf_counter()
        await runner.send([Call(count + number, name, arguments)])
        await anext(events)
        trips.append(time.perf_counter() - start)
    await runner.remove()
    return {
        "per_second": count / took,
        "agent_cpu_us": cpu,
        "round_trip_p50_us": sorted(trips)[150] * 1e6,
    }


async def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as data:
        runtime = BubblewrapRuntime(Path(data))
        found = {
            "runner calls": await calls(runtime, options.calls),
            "fresh sandboxes": await sandboxes(runtime, options.sandboxes, options.at_once),
        }
        await runtime.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    parser.add_argument("--sandboxes", type=int, default=300)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="60 sandboxes, 5,000 calls")
    options = parser.parse_args()
    if options.quick:
        options.sandboxes, options.calls = 60, 5000
    found = uvloop.run(measure(options))
    print("| what | per second | agent CPU | round trip |\n|---|---|---|---|")
    for what, figures in found.items():
        trip = figures.get("round_trip_p50_us")
        shown = f"{trip:,.0f} µs" if trip else "-"
        cpu = f"{figures['agent_cpu_us']:,.0f} µs"
        print(f"| {what} | {figures['per_second']:,.0f} | {cpu} | {shown} |")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
