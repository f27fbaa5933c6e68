"""How fast sandboxes start and runners answer: fresh sandboxes a second for /bin/true, no-op calls a second.

python -m bench.sandbox [--json FILE] [--sandboxes 300] [--calls 20000] [--at-once 2]
python -m bench.sandbox --count 1000     that many in a row, some of them untidy: how long start and tear-down take, and
                                         what is left of them (processes, mounts, groups, namespaces, files, descriptors)
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import pickle
import resource
import sys
import tempfile
import time
from pathlib import Path

import cloudpickle
import uvloop

from gpool.agent.runtime.bubblewrap.runtime import BubblewrapRuntime
from gpool.agent.runtime.protocol import (
    CallAnswer,
    CommandJob,
    FunctionCall,
    RunnerJob,
    SandboxLimits,
)
from gpool.agent.runtime.slots import FIRST_UID

LIMITS = SandboxLimits(cpu_milli=2000, memory_bytes=1 << 30)
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
        await runner.send(
            [FunctionCall(number, name, arguments) for number in range(sent, sent + room)]
        )
        sent += room
        got += sum(isinstance(event, CallAnswer) for event in await anext(events))
    took = time.perf_counter() - began
    cpu = (spent_s() - before) / count * 1e6
    trips = []
    for number in range(300):
        start = time.perf_counter()
        await runner.send([FunctionCall(count + number, name, arguments)])
        await anext(events)
        trips.append(time.perf_counter() - start)
    await runner.remove()
    return {
        "per_second": count / took,
        "agent_cpu_us": cpu,
        "round_trip_p50_us": sorted(trips)[150] * 1e6,
    }


SETTLE_S = 1.0  # the launcher gets the next child ready after each end
ROW = (
    "echo up; exec sleep 1000",
    "echo up; for n in 1 2 3 4; do (setsid sleep 1000 &) ; done; sleep 1000",
    "echo up; mkdir -p a/b/c; head -c 1000000 /dev/zero > a/b/c/d; cp -r a /tmp; cp -r a /dev/shm; sleep 1000",
    "trap '' TERM INT HUP; echo up; mkfifo f; sleep 1000 & kill -STOP $!; kill -STOP $$",
    "echo up; mkdir m; cd m; for n in 1 2 3 4 5 6 7 8; do mkdir d; cd d; done; chmod 0 .; sleep 1000",
)


def tree_of(root: int) -> set[int]:
    """The process and everything below it."""
    found, wave = {root}, [root]
    while wave:
        below = []
        for pid in wave:
            try:
                for thread in os.listdir(f"/proc/{pid}/task"):
                    text = Path(f"/proc/{pid}/task/{thread}/children").read_text()
                    below += [int(word) for word in text.split()]
            except OSError:
                continue
        found.update(below)
        wave = below
    return found


def census(data: Path, tag: str) -> dict[str, set[str]]:
    """What there is of this agent and its sandboxes, by kind."""
    kinds: dict[str, set[str]] = {
        name: set()
        for name in ("processes", "mounts", "groups", "namespaces", "files", "descriptors")
    }
    for pid in tree_of(os.getpid()):
        own = Path(f"/proc/{pid}")
        kinds["processes"].add(str(pid))
        kinds["mounts"].update(
            f"{pid} {line}" for line in (own / "mountinfo").read_text().splitlines()
        )
        kinds["namespaces"].update(os.readlink(entry) for entry in (own / "ns").iterdir())
        kinds["descriptors"].update(f"{pid} {entry.name}" for entry in (own / "fd").iterdir())
    kinds["groups"] = {str(path) for path in Path("/sys/fs/cgroup").rglob(f"{tag}*")}
    shared = [path for path in Path("/dev/shm").iterdir() if path.stat().st_uid >= FIRST_UID]
    kinds["files"] = {str(path) for path in [*data.rglob("*"), *shared]}
    return kinds


async def in_a_row(count: int) -> dict[str, float]:
    """Start, see it run, end it, remove it; again and again."""
    starts, ends = [], []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        runtime = BubblewrapRuntime(data)

        async def one(number: int) -> None:
            job = CommandJob(("sh", "-c", ROW[number % len(ROW)]), (), (), (), LIMITS)
            began = time.perf_counter()
            sandbox = await runtime.start_command(job)
            assert await anext(sandbox.output()) == (1, b"up\n")
            up = time.perf_counter()
            await sandbox.remove()
            ends.append(time.perf_counter() - up)
            starts.append(up - began)

        for number in range(len(ROW)):  # the launcher starts, the first slot is made
            await one(number)
        await asyncio.sleep(SETTLE_S)
        before = census(data, runtime.groups.prefix)
        starts.clear()
        ends.clear()
        for number in range(count):
            await one(number)
        await asyncio.sleep(SETTLE_S)
        after = census(data, runtime.groups.prefix)
        await runtime.close()
        closed = census(data, runtime.groups.prefix)
        assert not closed["groups"], closed["groups"]
    found = {f"{kind} left": float(len(after[kind]) - len(before[kind])) for kind in after}
    for name, times in (("start", sorted(starts)), ("tear-down", sorted(ends))):
        found[f"{name} p50 ms"] = times[len(times) // 2] * 1000
        found[f"{name} p99 ms"] = times[len(times) * 99 // 100] * 1000
        found[f"{name} most ms"] = times[-1] * 1000
    return found


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
    parser.add_argument("--count", type=int, help="so many in a row, and what is left of them")
    options = parser.parse_args()
    if options.count:
        row = uvloop.run(in_a_row(options.count))
        for what, figure in row.items():
            print(f"{what:24} {figure:10,.1f}")
        if options.json:
            options.json.write_text(json.dumps(row, indent=2) + "\n")
        sys.exit(any(figure for what, figure in row.items() if what.endswith("left")))
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
