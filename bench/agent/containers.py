"""How long a container takes to start: Docker (runc), Podman, gVisor, each on a private engine of its own.

python -m bench.containers [--json FILE] [--count 10]

From the call of `start_command` to the first byte of output, to the end of `true`, and to a runner's first answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from gpool.agent.runtime.protocol import CommandJob, SandboxLimits
from tests.tools.components import missing
from tests.tools.runtimes import MAKERS, NEEDS, caller

LIMITS = SandboxLimits(cpu_milli=2000, memory_bytes=512 << 20)


async def one(runtime: Any) -> tuple[float, float, float]:
    began = time.perf_counter()
    job = CommandJob(("echo", "up"), (), (), (), LIMITS)
    sandbox = await runtime.start_command(job)
    first = 0.0
    async for _ in sandbox.output():
        first = first or time.perf_counter() - began
    await sandbox.ended()
    await sandbox.remove()
    whole = time.perf_counter() - began
    began = time.perf_counter()
    calling = await caller(runtime, LIMITS)
    await calling.call(abs, -1)
    answered = time.perf_counter() - began
    await calling.runner.remove()
    return first, whole, answered


async def measure(kind: str, count: int, data: Path) -> dict[str, float]:
    runtime = MAKERS[kind](data)
    try:
        await one(runtime)  # the first finds nothing in the cache
        took = [await one(runtime) for _ in range(count)]
    finally:
        await runtime.close()
    names = ("first_byte_ms", "start_to_removed_ms", "first_answer_ms")
    return {
        f"{name}_p50": statistics.median(each[at] for each in took) * 1000
        for at, name in enumerate(names)
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--count", type=int, default=10)
    chosen = parser.parse_args()
    found = {}
    for kind, component in NEEDS.items():
        reason = missing(component)
        if reason is not None:
            print(f"{kind:10} not measured: {reason}")
            continue
        with tempfile.TemporaryDirectory() as data:
            found[kind] = asyncio.run(measure(kind, chosen.count, Path(data)))
        print(f"{kind:10}", "  ".join(f"{name} {ms:.0f}" for name, ms in found[kind].items()))
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
