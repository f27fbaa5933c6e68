"""Ten bombs at once beside an honest task, in one real agent of a real server: what the honest task loses, and whether a
beat of the agent's was missed. The same honest task beside ten idle sandboxes of the same limits is what it is held
against, in the same run, turn about.

    python -m bench.bombs [--rounds 3] [--quick] [--json FILE]

On few cores it is the limits that protect the honest task, so they are said: it leases half a processor, each bomb a
twentieth, and the rest is the agent's and the server's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import httpx2

from tests.tools.processes import SHORT_LEASE, Pool, eventually

BEAT_S = float(SHORT_LEASE["GPOOL_SERVER_BEAT_S"])
SLOWER_AT_MOST = 0.15
HONEST_CPUS, BOMB_CPUS = 0.5, 0.05
BOMB_MEMORY, BOMB_DISK = "256MB", "256MB"
HONEST = """
import hashlib, time
def work():
    wrote = 0.0
    for turn in range({turns}):
        block = hashlib.sha256(b"x" * 1_000_000).digest() * 1000
        sorted(block)
        began = time.perf_counter()
        kept.write(block)
        wrote += time.perf_counter() - began
    return wrote
with open("kept", "wb") as kept:
    began = time.perf_counter()
    wrote = work()
print("took", time.perf_counter() - began, wrote, time.process_time())
"""
IDLE = "while True: time.sleep(1000)"
BOMBS = {
    "fork": """
while True:
    try:
        if os.fork() == 0:
            time.sleep(1000)
    except OSError:
        pass""",
    "threads": """
def wait(): time.sleep(1000)
while True:
    try:
        threading.Thread(target=wait, daemon=True).start()
    except RuntimeError:
        pass""",
    "memory": """
eat = "held = []\\nwhile True: held.append(bytearray(1 << 20))"
while True:
    subprocess.run([sys.executable, "-c", eat])""",
    "shm": """
while True:
    for folder in ("/dev/shm", "/tmp"):
        try:
            with open(folder + "/full", "wb", buffering=0) as full:
                while True: full.write(bytes(1 << 20))
        except OSError:
            os.unlink(folder + "/full")""",
    "disk": """
while True:
    with open("full", "wb", buffering=0) as full:
        for _ in range(200):
            full.write(os.urandom(1 << 10) * 1024)
        os.fsync(full.fileno())""",
    "inodes": """
while True:
    for number in range(20_000):
        open(f"empty-{number}", "w").close()
    for number in range(20_000):
        os.unlink(f"empty-{number}")""",
    "stdout": """
line = b"y" * 65535 + b"\\n"
while True:
    os.write(1, line)""",
    "descriptors": """
held = []
while True:
    try:
        held.append(os.dup(0))
    except OSError:
        for one in held: os.close(one)
        held.clear()""",
    "spin": """
for attempt in (lambda: os.nice(-20), lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(99))):
    try:
        attempt()
    except OSError:
        pass
for _ in range(8):
    os.fork()
while True:
    pass""",
    "daemons": """
for _ in range(20):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True: pass
        os._exit(0)
while True:
    time.sleep(1000)""",
}
PREAMBLE = "import os, signal, subprocess, sys, threading, time\nprint('up', flush=True)\n"


@dataclass(frozen=True, slots=True)
class Turn:
    """One honest task beside ten others."""

    beside: str
    took_s: float
    wrote_s: float  # of it, with files
    cpu_s: float
    longest_silence_s: float
    ended_early: dict[str, str]


@dataclass(frozen=True, slots=True)
class Found:
    turns: list[Turn]
    slower: float
    longest_silence_s: float
    beats_missed: int

    @property
    def holds(self) -> bool:
        return self.slower <= SLOWER_AT_MOST and self.beats_missed == 0


class Beats:
    """Watches the server's view of the node: when each beat came."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._key = {"Authorization": f"Bearer {pool.key}"}
        self._seen: list[datetime] = []
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="beats")
        self._watcher.start()

    def _watch(self) -> None:
        with httpx2.Client(timeout=60, trust_env=False) as client:
            while not self._over.wait(BEAT_S / 4):
                answer = client.get(f"{self._pool.address}/v1/nodes", headers=self._key)
                [node] = answer.raise_for_status().json()["items"]
                beat = datetime.fromisoformat(node["last_beat_at"])
                if not self._seen or beat != self._seen[-1]:
                    self._seen.append(beat)

    def stop(self) -> None:
        self._over.set()
        self._watcher.join()

    def silences_s(self, since: int = 0) -> list[float]:
        return [(after - before).total_seconds() for before, after in pairwise(self._seen[since:])]

    @property
    def count(self) -> int:
        return len(self._seen)


@contextmanager
def beside(pool: Pool, codes: dict[str, str]) -> Iterator[dict[str, str]]:
    """The tasks run; name -> id. Cancelled and gone at the end."""
    tasks = {}
    for name, code in codes.items():
        wanted = {
            "command": ["python", "-c", PREAMBLE + code],
            "cpus": BOMB_CPUS,
            "memory": BOMB_MEMORY,
            "disk": BOMB_DISK,
        }
        tasks[name] = pool.ask("POST", "/v1/tasks", wanted).json()["ids"][0]
    for task in tasks.values():
        pool.until_status(task, "running", within_s=60)
    try:
        yield tasks
    finally:
        for task in tasks.values():
            pool.ask("DELETE", f"/v1/tasks/{task}")
        eventually(
            "everything is gone",
            lambda: pool.ask("GET", "/v1/nodes").json()["items"][0]["running"] == 0,
            within_s=60,
        )


def turn(pool: Pool, kind: str, codes: dict[str, str], turns: int, beats: Beats) -> Turn:
    with beside(pool, codes) as tasks:
        first = beats.count - 1
        wanted = {
            "command": ["python", "-c", HONEST.format(turns=turns)],
            "cpus": HONEST_CPUS,
            "memory": "512MB",
        }
        honest = pool.ask("POST", "/v1/tasks", wanted).json()["ids"][0]
        pool.until_status(honest, "succeeded", within_s=300)
        items = pool.ask("GET", f"/v1/tasks/{honest}/logs").json()["items"]
        said = "".join(item["text"] for item in items)
        took, wrote, cpu = map(float, said.split()[1:])
        seen = {name: pool.status(task) for name, task in tasks.items()}
        early = {
            name: f"{task['status']}: {task.get('reason')}"
            for name, task in seen.items()
            if task["status"] != "running"
        }
    return Turn(kind, took, wrote, cpu, max(beats.silences_s(first), default=0.0), early)


def measure(rounds: int, turns: int) -> Found:
    with (
        tempfile.TemporaryDirectory() as folder,
        Pool(Path(folder), SHORT_LEASE) as pool,
    ):
        beats = Beats(pool)
        idle = dict.fromkeys(BOMBS, IDLE)
        done = []
        try:
            for _ in range(rounds):
                done.append(turn(pool, "idle", idle, turns, beats))
                done.append(turn(pool, "bombs", BOMBS, turns, beats))
                print(*(f"  {each}" for each in done[-2:]), sep="\n", file=sys.stderr)
        finally:
            beats.stop()
        median = {
            kind: statistics.median(each.took_s for each in done if each.beside == kind)
            for kind in ("idle", "bombs")
        }
        silences = beats.silences_s()
        return Found(
            done,
            median["bombs"] / median["idle"] - 1,
            max(silences),
            sum(int(silence / BEAT_S + 0.5) - 1 for silence in silences if silence > 2 * BEAT_S),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=1500, help="of the honest task's work")
    parser.add_argument("--quick", action="store_true", help="one round of a third of the work")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    options = parser.parse_args()
    rounds, turns = (1, options.turns // 3) if options.quick else (options.rounds, options.turns)
    found = measure(rounds, turns)
    print(f"honest task beside ten bombs: {found.slower:+.1%} (at most {SLOWER_AT_MOST:+.0%})")
    print(f"beats missed: {found.beats_missed}; longest silence {found.longest_silence_s:.2f} s")
    if options.json:
        options.json.write_text(json.dumps(asdict(found), indent=2) + "\n")
    sys.exit(not found.holds)


if __name__ == "__main__":
    main()
