"""An agent that is attacked: run by `stage.py` with secrets in its variables and words, it plants more, and runs tasks.

agent.py BASE WORD      BASE/order is JSON {"kinds", "parts", "control", "network", "words"}; prints one JSON document
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpool.agent.runtime.protocol import CommandJob, StagedInput
from tests.hostile.planting import Plants, planted
from tests.hostile.taking_case import LIMITS, changing, left, staged
from tests.tools.runtimes import MAKERS, left_over

PROBE = Path(__file__).with_name("probe")
ANSWERED = {"answer_s": 60.0, "within_s": 90.0}
"""Where everybody answers, they have the time it takes them."""
SETTLING_LOOKS = 1200
NEIGHBOUR = """
import os, sys, time
word = os.environ["NEIGHBOUR_MEMORY"]
kept = bytearray(("%s" % word).encode())
for path, name in (("kept", "NEIGHBOUR_WORK"), ("/tmp/kept", "NEIGHBOUR_TMP"), ("/dev/shm/kept", "NEIGHBOUR_SHM")):
    with open(path, "w") as file:
        file.write(os.environ[name] + " " + os.environ["SECRET"])
print("up", flush=True)
time.sleep(3000)
"""
NEIGHBOURS = (
    "NEIGHBOUR_MEMORY",
    "NEIGHBOUR_WORK",
    "NEIGHBOUR_TMP",
    "NEIGHBOUR_SHM",
    "NEIGHBOUR_VARIABLE",
)


async def run(runtime: Any, *argv: str, inputs: tuple[StagedInput, ...] = ()) -> bytes:
    sandbox = await runtime.start_command(CommandJob(argv, (), inputs, (), LIMITS))
    streams: dict[int, bytes] = {1: b"", 2: b""}
    try:
        async for stream, data in sandbox.output():
            streams[stream] += data
        ended = await sandbox.ended()
    finally:
        await sandbox.remove()
    if ended.exit_code != 0:
        raise AssertionError(f"the probe ended with {ended}: {streams[2][-2000:]!r}")
    return streams[1]


def results(printed: bytes) -> dict[str, Any]:
    lines = [json.loads(line) for line in printed.splitlines()]
    return {
        "became": {one["name"]: one["became"] for one in lines if "name" in one},
        "kernel": lines[-1]["kernel"],
    }


class Attacked:
    def __init__(self, base: Path, order: dict[str, Any], plants: Plants) -> None:
        self.base = base
        self.order = order
        self.plants = plants
        self.since = time.time() - 60  # noqa: TID251 - files carry this clock's time

    async def neighbour(self, runtime: Any) -> Any:
        """Another task of somebody else's, with secrets of its own, for as long as the attacks run."""
        env = tuple((name, self.plants.words[name]) for name in NEIGHBOURS)
        env = (*env, ("SECRET", self.plants.known["secret"]))
        argv = ("python", "-c", NEIGHBOUR, self.plants.words["NEIGHBOUR_WORD"])
        sandbox = await runtime.start_command(CommandJob(argv, env, (), (), LIMITS))
        async for _, data in sandbox.output():
            if b"up" in data:
                return sandbox
        raise AssertionError(f"the neighbour did not start: {await sandbox.ended()}")

    async def attack(self, kind: str) -> dict[str, Any]:
        data = self.base / f"data-{kind.replace(' ', '-')}"
        runtime = MAKERS[kind](data)
        await runtime.sweep()
        said: dict[str, Any] = {}
        parts = self.order["parts"]
        known = self.plants.known
        began = time.monotonic()
        try:
            if "probe" in parts or "crawl" in parts:
                neighbour = await self.neighbour(runtime)
                for place in data.glob("*/*/*/kept"):
                    known["files"]["neighbour"] = str(place)
                if "probe" in parts:
                    words = ("python", "probe/main.py", "known")
                    inputs = (*staged(), StagedInput("known", self.tell(), False))
                    said["probe"] = results(await run(runtime, *words, inputs=inputs))
                    said["probe_s"] = time.monotonic() - began
                if "crawl" in parts:
                    order = {"roots": ["/"], "pids": None, "since": self.since, "answer_s": 0.5}
                    words = ("python", "probe/crawl.py", json.dumps(order))
                    said["crawl"] = json.loads(await run(runtime, *words, inputs=tuple(staged())))
                    said["crawl_s"] = time.monotonic() - began
                if self.order["control"]:
                    said["control"] = self.control(neighbour)
                    said["control_s"] = time.monotonic() - began
                await neighbour.remove()
            if "outputs" in parts:
                work = data / "sandboxes" if kind == "bubblewrap" else None
                said["left"] = await left(runtime, self.base, known, work, "")
                said["deep"] = await left(runtime, self.base, known, None, "deep")
                rounds = 3 if kind == "microvm" else 40
                said["changing"] = await changing(runtime, self.base, known, rounds)
        finally:
            await runtime.close()
        said["left_over"] = [str(path) for path in left_over(data)]
        said["took_s"] = time.monotonic() - began
        return said

    def tell(self, **more: float) -> Path:
        """For an attack's eyes, as a file: a command line would be what it then finds."""
        path = self.base / "known"
        path.write_text(json.dumps(self.plants.known | more))
        return path

    def control(self, neighbour: Any) -> dict[str, Any]:
        """The same programs without any sandbox, beside the agent as the sandbox is."""
        here = self.base / "control"
        here.mkdir(mode=0o700)
        probe = subprocess.run(
            [sys.executable, str(PROBE / "main.py"), str(self.tell(**ANSWERED))],
            stdout=subprocess.PIPE,
            close_fds=False,
            cwd=here,
            check=True,
        )
        beside = [name for name in os.listdir("/proc") if name.isdecimal() and self.is_ours(name)]
        roots, answer_s = sorted(self.plants.roots), ANSWERED["answer_s"]
        order = {"roots": roots, "pids": beside, "since": self.since, "answer_s": answer_s}
        crawl = subprocess.run(
            [sys.executable, str(PROBE / "crawl.py"), json.dumps(order)],
            stdout=subprocess.PIPE,
            close_fds=False,
            cwd=here,
            check=True,
        )
        return {"probe": results(probe.stdout), "crawl": json.loads(crawl.stdout)}

    def is_ours(self, pid: str) -> bool:
        """This process and all below it: nobody else's is read."""
        while pid not in ("0", "1"):
            if pid == str(os.getpid()):
                return True
            try:
                pid = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                return False
        return False


async def settled(held: int) -> int:
    """How many descriptors there are once no more than before are, or a minute later: what is closed may take a turn."""
    now = len(os.listdir("/proc/self/fd"))
    for _ in range(SETTLING_LOOKS):
        if now <= held:
            break
        await asyncio.sleep(0.05)
        now = len(os.listdir("/proc/self/fd"))
    return now


async def main(base: Path, order: dict[str, Any]) -> None:
    plants = Plants(words=dict(order["words"]), known=dict(order["network"]))
    plants.known["in environment"] = plants.words["variable GPOOL_TOKEN"]
    plants.known["in command line"] = plants.words["a word of the command line"]
    for name in (*NEIGHBOURS, "NEIGHBOUR_WORD"):
        plants.new(name)
    with planted(base, plants):
        attacked = Attacked(base, order, plants)
        held = len(os.listdir("/proc/self/fd"))
        said = {}
        for kind in order["kinds"]:
            with contextlib.suppress(asyncio.CancelledError):
                said[kind] = await attacked.attack(kind)
        after = await settled(held)
        whole = {
            "uid": os.geteuid(),
            "kernel": os.uname().version,
            "kinds": said,
            "words": plants.words,
            "descriptors": [held, after],
        }
        sys.stdout.write(json.dumps(whole))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    order = json.loads((place / "order").read_text())
    (place / "order").unlink()
    asyncio.run(main(place, order))
