"""gpool's sandboxes against bare bwrap with the same isolation, in alternating rounds: rate of /bin/true, start and CPU time.

    python -m bench.bare_bwrap [--json FILE] [--rounds 5] [--sandboxes 100] [--at-once 2]

Bare bwrap has gpool's own options (namespaces, mounts, masks, filter) and its Landlock step, one process after the other in
each of `--at-once` threads, without cgroups, agent, log or result. Start: from the request to the command's first line of
output. CPU time is of everything below this process (with a cpuacct control group; else it is not shown). `--quick`: 2 rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import uvloop

from gpool.agent.runtime.bubblewrap import layout, seccomp
from gpool.agent.runtime.bubblewrap.layout import BwrapArguments, joined
from gpool.agent.runtime.bubblewrap.read_only import overlays_of
from gpool.agent.runtime.bubblewrap.runtime import BubblewrapRuntime, find_bwrap
from gpool.agent.runtime.descriptors import memory_file
from gpool.agent.runtime.protocol import CommandJob, SandboxLimits
from gpool.agent.runtime.work_directory import WorkDirectory

LIMITS = SandboxLimits(cpu_milli=1000, memory_bytes=1 << 30)
TRUE = ("/bin/true",)
SAY = ("/bin/echo", "up")
STARTS = 40
ACCOUNTS = Path("/sys/fs/cgroup/cpuacct")


@dataclass(frozen=True, slots=True)
class SandboxFigures:
    per_second: float
    start_p50_ms: float
    cpu_ms: float  # a sandbox; 0: unknown


class BareBwrap:
    """bwrap as an agent without root would call it: the same namespaces, overlays, masks, filter and Landlock domain."""

    def __init__(self, folder: Path) -> None:
        self._bwrap = find_bwrap()
        found = layout.prepare(folder / "inside")
        self._folder = folder
        (folder / "sandboxes").mkdir()
        read_only = overlays_of(self._bwrap, folder / "inside" / "empty")
        self._arguments = BwrapArguments(found, folder / "sandboxes", "", read_only)
        self._variables = b"\0".join(f"{n}={v}".encode() for n, v in found.variables)
        self._filter = seccomp.program()
        self._landlock = seccomp.landlock_version() if seccomp.perl() else 0
        self._made = iter(range(1 << 30))

    def start(self, argv: Sequence[str]) -> tuple[subprocess.Popen[bytes], WorkDirectory]:
        place = WorkDirectory(self._folder / "sandboxes" / str(next(self._made)), os.geteuid())
        place.make()
        common, words = self._arguments.of(
            place, CommandJob(tuple(argv), (), (), (), LIMITS), (), ()
        )
        texts = (common + joined(words), self._filter, self._variables)
        options, program, variables = given = [memory_file("given", text) for text in texts]
        try:
            command = [self._bwrap, "--args", str(options), "--seccomp", str(program), "--"]
            if seccomp.perl():
                command += seccomp.command(variables, 0, self._landlock)
            process = subprocess.Popen(
                [*command, *argv], pass_fds=given, stdout=subprocess.PIPE, env={}
            )
        finally:
            for descriptor in given:
                os.close(descriptor)
        return process, place

    def run(self, count: int, at_once: int) -> None:
        left = iter(range(count))
        failed = []

        def one_after_another() -> None:
            for _ in left:
                process, place = self.start(TRUE)
                if process.communicate()[0] or process.returncode:
                    failed.append(process.returncode)
                place.remove()

        threads = [threading.Thread(target=one_after_another) for _ in range(at_once)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert not failed, failed

    def start_ms(self) -> float:
        began = time.perf_counter()
        process, place = self.start(SAY)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        took = time.perf_counter() - began
        process.communicate()
        place.remove()
        return took * 1000


async def gpool_run(runtime: BubblewrapRuntime, count: int, at_once: int) -> None:
    left = iter(range(count))

    async def one_after_another() -> None:
        for _ in left:
            sandbox = await runtime.start_command(CommandJob(TRUE, (), (), (), LIMITS))
            async for _ in sandbox.output():
                pass
            ended = await sandbox.ended()
            assert ended.exit_code == 0, ended
            await sandbox.remove()

    await asyncio.gather(*(one_after_another() for _ in range(at_once)))


async def gpool_start_ms(runtime: BubblewrapRuntime) -> float:
    began = time.perf_counter()
    sandbox = await runtime.start_command(CommandJob(SAY, (), (), (), LIMITS))
    assert await anext(sandbox.output()) == (1, b"up\n")
    took = time.perf_counter() - began
    await sandbox.remove()
    return took * 1000


@contextlib.contextmanager
def accounted() -> Iterator[Path | None]:
    """A control group of this process and its children that counts their CPU time."""
    own = ACCOUNTS / f"gpool-bench-{os.getpid()}"
    try:
        own.mkdir()
        (own / "cgroup.procs").write_text("0")
    except OSError:
        yield None
        return
    try:
        yield own
    finally:
        (ACCOUNTS / "cgroup.procs").write_text("0")
        with contextlib.suppress(OSError):
            own.rmdir()


def cpu_ms(group: Path | None) -> float:
    return int((group / "cpuacct.usage").read_text()) / 1e6 if group is not None else 0.0


async def measure(
    options: argparse.Namespace, group: Path | None
) -> dict[str, list[SandboxFigures]]:
    found: dict[str, list[SandboxFigures]] = {"bwrap": [], "gpool": []}
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        bare = BareBwrap(Path(first))
        runtime = BubblewrapRuntime(Path(second))
        await gpool_run(runtime, 2 * options.at_once, options.at_once)  # launcher and slots
        bare.run(options.at_once, options.at_once)
        for number in range(options.rounds):
            names = ("bwrap", "gpool") if number % 2 == 0 else ("gpool", "bwrap")
            for name in names:
                before, began = cpu_ms(group), time.perf_counter()
                if name == "gpool":
                    await gpool_run(runtime, options.sandboxes, options.at_once)
                else:
                    bare.run(options.sandboxes, options.at_once)
                rate = options.sandboxes / (time.perf_counter() - began)
                spent = (cpu_ms(group) - before) / options.sandboxes
                starts = [
                    await gpool_start_ms(runtime) if name == "gpool" else bare.start_ms()
                    for _ in range(STARTS)
                ]
                found[name].append(SandboxFigures(rate, median(starts), spent))
        await runtime.close()
    return found


def summary(found: dict[str, list[SandboxFigures]]) -> dict[str, float]:
    """Medians of the rounds, and gpool's part of bwrap's rate, start and CPU time within each round."""
    pairs = list(zip(found["gpool"], found["bwrap"], strict=True))
    values = {
        f"{name} {field}": median(asdict(each)[field] for each in rows)
        for name, rows in found.items()
        for field in ("per_second", "start_p50_ms", "cpu_ms")
    }
    values["rate ratio"] = median(a.per_second / b.per_second for a, b in pairs)
    values["start ratio"] = median(a.start_p50_ms / b.start_p50_ms for a, b in pairs)
    return values


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sandboxes", type=int, default=100)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.sandboxes = 2, 40
    with accounted() as group:
        found = summary(uvloop.run(measure(options, group)))
    print("| | per second | start p50 | CPU a sandbox |\n|---|---|---|---|")
    for name in ("bwrap", "gpool"):
        spent = found[f"{name} cpu_ms"]
        shown = f"{spent:.1f} ms" if spent else "–"
        print(
            f"| {name} | {found[f'{name} per_second']:.0f} | {found[f'{name} start_p50_ms']:.1f} ms | {shown} |"
        )
    print(f"\nrate {found['rate ratio']:.2f} x bwrap, start {found['start ratio']:.2f} x bwrap")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
