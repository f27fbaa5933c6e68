"""How soon a task has its environment: one that lies ready, from asking to a sandbox that has run a command, and one built cold.

python -m bench.environments [--json FILE] [--hits 100] [--builds 5]

Packages are made on the spot and lie in a folder, so no network is in the numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

import uvloop

from gpool.agent.environments import Environments, Indexes, UvBuilder, find_uv
from gpool.agent.environments.interpreters import own_interpreter
from gpool.agent.runtime.bubblewrap.runtime import BubblewrapRuntime
from gpool.agent.runtime.protocol import CommandJob, SandboxLimits
from gpool.core.model import Recipe
from gpool.core.specs.fields import environment_name, recipe
from tests.tools.packages import PackageIndex

LIMITS = SandboxLimits(cpu_milli=2000, memory_bytes=1 << 30)
MODULES = 40  # of a small package


async def started(environments: Environments, runtime: BubblewrapRuntime, wanted: Recipe) -> float:
    """Seconds from asking until a command in the sandbox has run: an upper bound of its start."""
    began = time.perf_counter()
    async with environments.prepare(environment_name(wanted), wanted, limits=LIMITS) as prepared:
        job = CommandJob(("/bin/true",), (), (), (), LIMITS, environment=prepared)
        sandbox = await runtime.start_command(job)
        async for _ in sandbox.output():
            pass
        assert (await sandbox.ended()).exit_code == 0
        ended = time.perf_counter() - began
        await sandbox.remove()
    return ended


async def measure(folder: Path, hits: int, builds: int) -> dict[str, float]:
    index = PackageIndex(folder / "index")
    code = "\n".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(50))
    for number in range(builds):
        modules = {f"small{number}/m{m}.py": code for m in range(MODULES)}
        index.wheel(f"small{number}", modules=modules, needs=("dependency",))
    index.wheel("dependency")
    runtime = BubblewrapRuntime(folder / "data")
    await runtime.sweep()
    uv, own = find_uv(), own_interpreter()
    assert uv is not None
    place = folder / "data" / "environments"
    environments = Environments(
        place,
        UvBuilder(runtime, place, uv, Indexes(index.address)),
        interpreters={own.minor: own},
        own=own.minor,
        clock=lambda: time.monotonic_ns() // 1000,
    )
    await environments.sweep()
    recipes = [recipe(packages=(f"small{n}",)) for n in range(builds)]
    cold = []
    for wanted in recipes:
        began = time.perf_counter()
        async with environments.prepare(environment_name(wanted), wanted, limits=LIMITS):
            cold.append(time.perf_counter() - began)
    nothing = Recipe()
    warm, plain, alone = [], [], []
    for n in range(hits):  # by turns: whatever else the machine does falls on all alike
        wanted = recipes[n % builds]
        warm.append(await started(environments, runtime, wanted))
        plain.append(await started(environments, runtime, nothing))
        began = time.perf_counter()
        async with environments.prepare(environment_name(wanted), wanted, limits=LIMITS):
            alone.append(time.perf_counter() - began)
    warm.sort()
    await environments.close()
    await runtime.close()
    return {
        "hit_p50_ms": warm[len(warm) // 2] * 1e3,
        "hit_p99_ms": warm[min(len(warm) - 1, len(warm) * 99 // 100)] * 1e3,
        "without_environment_p50_ms": statistics.median(plain) * 1e3,
        "hit_alone_p50_us": statistics.median(alone) * 1e6,
        "cold_build_p50_s": statistics.median(cold),
        "cold_build_max_s": max(cold),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--hits", type=int, default=100)
    parser.add_argument("--builds", type=int, default=5)
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        found = runner.run(measure(Path(folder), given.hits, given.builds))
    print(
        f"an environment that lies ready, until /bin/true has ended in its sandbox: "
        f"p50 {found['hit_p50_ms']:.1f} ms, p99 {found['hit_p99_ms']:.1f} ms"
    )
    print(
        f"a small one built cold: p50 {found['cold_build_p50_s']:.2f} s, slowest {found['cold_build_max_s']:.2f} s"
    )
    print(
        f"asking alone: p50 {found['hit_alone_p50_us']:.0f} us; the same sandbox without an environment: "
        f"p50 {found['without_environment_p50_ms']:.1f} ms"
    )
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
