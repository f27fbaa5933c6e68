"""Two halves of a GPU side by side, by MPS and by time slices, alternating: the ratio of what both have done together.

`halves.py [ROUNDS]`: all of it. `halves.py work`: one half, as a task; prints when each of its steps ended, so that only
the time in which both ran counts. Loops: the transformer of training.py, products of two matrices.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WINDOW_S, BETWEEN_S, START_S = 2.0, 0.3, 22.0
PRODUCTS = 500  # a step
LATEST_S = float(os.environ.get("LATEST_S", "290"))
PAIR_S, END_S = 74.0, 5.0  # seconds of both modes
MODES = {"mps": 18486, "timeslice": 18487}
WANTED = 1.05
JUDGED = ("transformer, batch 1", "products of 512")
LOOPS = (*JUDGED, "transformer, batch 4")
"""Loops that leave a part of the card idle when alone are judged; the last one fills it."""


def wall() -> float:
    return time.clock_gettime(time.CLOCK_REALTIME)


def work() -> None:
    """Run each loop in its window by the clock, which is the same in both tasks."""
    import torch  # noqa: PLC0415
    from training import transformer  # noqa: PLC0415

    x = torch.randn(512, 512, device="cuda")

    def products() -> None:
        for _ in range(PRODUCTS):
            x @ x

    training = transformer()
    steps: dict[str, Callable[[], object]] = {
        "transformer, batch 1": training(1),
        "products of 512": products,
        "transformer, batch 4": training(4),
    }
    for step in steps.values():
        for _ in range(4):
            step()
    torch.cuda.synchronize()
    print(json.dumps({"ready": wall()}), flush=True)
    start = float(sys.argv[2])
    ended: dict[str, list[float]] = {}
    for at, name in enumerate(LOOPS):
        begin = start + at * (WINDOW_S + BETWEEN_S)
        threading.Event().wait(max(0.0, begin - wall()))
        times = ended[name] = []
        while wall() < begin + WINDOW_S:
            steps[name]()
            torch.cuda.synchronize()
            times.append(round(wall() - begin, 5))
    print(json.dumps({"ended": ended}), flush=True)


def counted(both: list[dict[str, list[float]]], name: str) -> float:
    """Steps a second of both, from the first step of the later one to the last step of the earlier one."""
    if any(len(one.get(name, ())) < 2 for one in both):
        return 0.0
    first = max(one[name][0] for one in both)
    last = min(one[name][-1] for one in both)
    if last - first < WINDOW_S / 2:
        return 0.0
    steps = sum(sum(1 for at in one[name] if first < at <= last) for one in both)
    return steps / (last - first)


def side_by_side(mode: str) -> dict[str, float]:
    from pool import pause, pool, say, wait_free  # noqa: PLC0415 - not in a task

    wait_free()
    with pool(MODES[mode], mode) as made:
        start = str(wall() + START_S)
        inputs = ("--input", "training.py", "--input", "halves.py")
        words = ("run", "--gpu", "0.5", "--memory", "16GB", *inputs)
        command = ("--", "python3", "halves.py", "work", start)
        with made.begun(*words, *command) as one:
            pause(0.5)  # the second finds the files uploaded
            with made.begun(*words, *command) as two:
                ran = [one(60), two(60)]
        both = [each.told("ended") or {} for each in ran]
        found = {name: round(counted(both, name), 2) for name in LOOPS}
        slack = [round(float(start) - (each.told("ready") or 0.0), 2) for each in ran]
        say(step=mode, ready_before_start_s=slack, steps_per_s=found)
        if not all(found.values()):
            brief = [
                (each.rc, [line[-300:] for line in (*each.out, *each.err)][-6:]) for each in ran
            ]
            say(step=mode, failed=brief)
    return found


def main(rounds: int) -> int:
    from pool import BEGAN, say, set_back  # noqa: PLC0415

    runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    try:
        for _ in range(rounds):
            if LATEST_S - END_S - (time.perf_counter() - BEGAN) < PAIR_S:
                say(step="late", rounds=len(runs["mps"]))
                break
            for mode, each in runs.items():
                each.append(side_by_side(mode))
    finally:
        set_back()
        failed = report(runs)
    return failed


def report(runs: dict[str, list[dict[str, float]]]) -> bool:
    def best(mode: str, name: str) -> float:
        return max((one[name] for one in runs[mode]), default=0.0)

    ratios = {
        name: round(best("mps", name) / best("timeslice", name), 3)
        for name in LOOPS
        if best("timeslice", name)
    }
    verdict: dict[str, Any] = {
        "verdict": "halves",
        "pass": min(ratios.get(name, 0.0) for name in JUDGED) >= WANTED,
        "mps / time slices": ratios,
        "wanted": dict.fromkeys(JUDGED, WANTED),
        "rounds": {mode: len(each) for mode, each in runs.items()},
    }
    print(json.dumps(verdict), flush=True)
    if os.environ.get("OUT"):
        text = json.dumps({**verdict, "all": runs}, indent=1)
        Path(os.environ["OUT"], "halves.json").write_text(text + "\n")
    return not verdict["pass"]


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work()
    else:
        sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 3))
