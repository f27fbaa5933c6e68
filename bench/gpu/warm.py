"""Times a PyTorch function on a real GPU: cold, forked from a warm parent, live; beside bare forks, alternating; see warm.sh.

Every call returns wall-clock times of its own steps, so that one run shows where the time between submission and result
goes. `warm.py bare`: the fork server of the comparison, no gpool: it forks for each line of its input.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import CLOCK_REALTIME, clock_gettime
from typing import Any

ROUNDS = int(os.environ.get("ROUNDS", "8"))
SIZE = 512
CPUS = int(os.environ.get("CPUS", "4"))
DEVICE = os.environ.get("DEVICE", "cuda")  # cpu: tries the script itself
STEPS = ("forked", "entered", "CUDA begins", "CUDA ready", "product done", "received")
WANTED = 1.25


def product(number: int) -> Callable[[int], dict[str, float]]:
    """A function of its own for each number: its hash differs, so it has no live process yet."""
    device = DEVICE

    def run(size: int) -> dict[str, float]:
        import os  # noqa: PLC0415 - inside, where it runs
        import time  # noqa: PLC0415

        def now() -> float:
            return time.clock_gettime(time.CLOCK_REALTIME)

        told = {"entered": now(), "number": float(number)}
        with open("/proc/self/stat") as stat:  # in hundredths of a second since boot
            ticks = int(stat.read().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        told["forked"] = now() - age
        import torch  # noqa: PLC0415

        told["CUDA begins"] = now()
        torch.zeros(1, device=device).item()
        told["CUDA ready"] = now()
        x = torch.randn(size, size, device=device)
        (x @ x).sum().item()
        told["product done"] = now()
        return told

    return run


def steps(began: float, told: dict[str, float]) -> dict[str, float]:
    """Milliseconds of each step since the one before."""
    found, before = {}, began
    for name in STEPS:
        found[name] = round(1000 * (told[name] - before), 1)
        before = told[name]
    return {**found, "all": round(1000 * (told["received"] - began), 1)}


def called(function: Any) -> dict[str, float]:
    began = clock_gettime(CLOCK_REALTIME)
    told = dict(function.remote(SIZE))
    return steps(began, told | {"received": clock_gettime(CLOCK_REALTIME)})


# ---- the comparison


def bare() -> None:
    """Lines in: `alone` (its predecessor has ended before), `after` (its predecessor is killed and waited for first),
    `beside` (killed, not waited for). Every child lives until the next line, as in a runner.
    """
    import torch  # noqa: PLC0415, F401

    sys.stdout.write("ready\n")
    sys.stdout.flush()
    child = dying = 0
    for line in sys.stdin:
        how = line.strip()
        if dying:
            os.waitpid(dying, 0)  # long over
        before, child, dying = child, 0, 0
        if before:
            os.kill(before, signal.SIGKILL)
            if how == "beside":
                dying = before
            else:
                os.waitpid(before, 0)
        if how == "end":  # `alone` finds no process
            sys.stdout.write("ended\n")
            sys.stdout.flush()
            continue
        child = os.fork()
        if child == 0:
            os.write(1, (json.dumps(product(0)(SIZE)) + "\n").encode())
            signal.pause()


class BareForks:
    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, __file__, "bare"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._line()

    def _line(self) -> str:
        assert self._server.stdout is not None
        return self._server.stdout.readline()

    def _say(self, word: str) -> str:
        assert self._server.stdin is not None
        self._server.stdin.write(word + "\n")
        self._server.stdin.flush()
        return self._line()

    def fork(self, how: str) -> dict[str, float]:
        if how == "alone":
            self._say("end")
        began = clock_gettime(CLOCK_REALTIME)
        told = json.loads(self._say(how))
        return steps(began, told | {"received": clock_gettime(CLOCK_REALTIME)})

    def close(self) -> None:
        self._say("end")
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


def middle(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(row[name] for row in rows) for name in rows[0]}


def main() -> int:
    import gpool  # noqa: PLC0415 - not in the comparison

    cold = called(gpool.task(gpu=1, cpus=2)(product(-1)))  # a runner of its own
    kinds = {
        "fork": gpool.task(gpu=1, preload=["torch"]),
        f"fork, {CPUS} cpus": gpool.task(gpu=1, cpus=CPUS, preload=["torch"]),
    }
    forks = BareForks()
    rows: dict[str, list[dict[str, float]]] = {}
    first: dict[str, float] = {}
    number = 0
    for kind, warmed in kinds.items():
        first[kind] = called(warmed(product(number)))["all"]
        for _ in range(ROUNDS):
            number += 1
            function = warmed(product(number))
            rows.setdefault(kind, []).append(called(function))
            rows.setdefault(f"live after {kind}", []).append(called(function))
            for how in ("alone", "after", "beside"):
                rows.setdefault(f"bare, {how}", []).append(forks.fork(how))
        number += 1
    forks.close()
    table = {kind: middle(each) for kind, each in rows.items()}
    print("ms since the step before, median\n| | " + " | ".join((*STEPS, "all")) + " |")
    print("|---" * (len(STEPS) + 2) + "|")
    for kind, row in table.items():
        print(f"| {kind} | " + " | ".join(str(row[name]) for name in (*STEPS, "all")) + " |")
    ratios = {kind: round(table[kind]["all"] / table["bare, alone"]["all"], 3) for kind in kinds}
    report = {
        "verdict": "warm",
        "pass": min(ratios.values()) <= WANTED,
        "cold_ms": cold["all"],
        "first_with_preload_ms": first,
        "fork / bare fork": ratios,
        "wanted": WANTED,
    }
    print(json.dumps(report), flush=True)
    if os.environ.get("OUT"):
        text = json.dumps({**report, "cold": cold, "table": table, "rows": rows}, indent=1)
        Path(os.environ["OUT"], "warm.json").write_text(text + "\n")
    return min(ratios.values()) > WANTED


if __name__ == "__main__":
    if sys.argv[1:] == ["bare"]:
        bare()
    else:
        sys.exit(main())
