"""How long a guest takes from the order to its command's first byte, and to its tear-down. Reported without a bar.

python -m bench.microvm [--json FILE] [--guests 10] [--disks DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

from gpool.agent.runtime.microvm.runtime import MicrovmRuntime
from gpool.agent.runtime.protocol import CommandJob, SandboxLimits

LIMITS = SandboxLimits(cpu_milli=1000, memory_bytes=256 << 20, disk_bytes=1 << 30)
ARGV = ("/bin/echo", "up")


async def one(runtime: MicrovmRuntime) -> tuple[float, float]:
    began = time.perf_counter()
    sandbox = await runtime.start_command(CommandJob(ARGV, (), (), (), LIMITS))
    stream = sandbox.output()
    assert await anext(stream) == (1, b"up\n")
    first = time.perf_counter() - began
    await sandbox.ended()
    began = time.perf_counter()
    await sandbox.remove()
    return first, time.perf_counter() - began


async def measure(data: Path, disks: Path | None, guests: int) -> dict[str, object]:
    runtime = MicrovmRuntime(data, disks=disks)
    await runtime.sweep()
    began = time.perf_counter()
    await one(runtime)  # builds the disks and probes the monitor
    first = time.perf_counter() - began
    try:
        took = [await one(runtime) for _ in range(guests)]
    finally:
        await runtime.close()
    starts, ends = sorted(start for start, _ in took), sorted(end for _, end in took)
    return {
        "monitor": runtime.monitor,
        "guests": guests,
        "first_ever_s": round(first, 2),
        "start_p50_s": round(starts[guests // 2], 2),
        "start_max_s": round(starts[-1], 2),
        "tear_down_p50_s": round(ends[guests // 2], 3),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--json", type=Path)
    options.add_argument("--guests", type=int, default=10)
    options.add_argument("--disks", type=Path)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as data:
        found = asyncio.run(measure(Path(data), chosen.disks, chosen.guests))
    for name, value in found.items():
        print(f"{name:18} {value}")
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
