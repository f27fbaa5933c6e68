"""Provokes the MPS neighbour that was once reported as disturbed right after another agent on the card had been stopped.

One pool shares the card by MPS. In each trial a second agent on the same card has just run a task and is stopped, at
another moment of the neighbour's start: its stop overwrites all free memory of the card. Counts apart: wrong sums, a
neighbour that fails with an error (which `sharing.py` calls disturbed as well), short clients that fail.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from pool import Pool, Ran, card_state, pause, pool, say, set_back

LATEST_S = float(os.environ.get("LATEST_S", "150"))
LAST_TRIAL_S = 65.0  # a trial, the control and the pool's end
CHECK_S, GIB = 8, 2
SHORT = "for i in $(seq 18); do python3 cuda_client.py hold 2147483648 < /dev/null; sleep 0.1; done; true"
DELAYS_S = (0.5, 1.5, 2.5, 3.5, 4.5, 6.0)
"""From the neighbour's submission to the stop of the other agent; PyTorch opens the card after about four seconds."""


def neighbour_of(ran: Ran) -> str:
    if ran.told("wrong") is not None:
        return f"wrong sum {ran.told('wrong')} of {ran.told('wanted')}"
    if ran.rc != 0 or not ran.told("right"):
        return f"failed, rc {ran.rc}: " + " / ".join([*ran.err, *ran.out][-3:])[-400:]
    return "right"


def shorts_of(ran: Ran) -> Counter[str]:
    found: Counter[str] = Counter()
    for line in ran.lines:
        if "took" in line:
            found["took"] += 1
        elif "refused" in line:
            found[f"refused: {line.get('why')}"] += 1
        elif "failed" in line:
            found[f"failed: {line['failed']}"] += 1
    return found


def trial(shared: Pool, number: int, delay_s: float, sharing: str) -> dict[str, Any]:
    other = Pool(18500 + number, sharing)
    try:
        if not other.ready():
            return {"skipped": other.said(10)}
        size = ("--gpu", "1") if sharing == "exclusive" else ("--vram", "6GB")
        first = other.gpool(
            "run", *size, "--input", "cuda_client.py", "--", "python3", "cuda_client.py", "see"
        )
        work = ("--input", "work.py", "--", "python3", "work.py", "check", str(CHECK_S), str(GIB))
        client = ("--input", "cuda_client.py", "--", "sh", "-c", SHORT)
        took: list[float] = []

        def stop() -> None:
            pause(delay_s)
            began = time.perf_counter()
            other.stop()
            took.append(round(time.perf_counter() - began, 2))

        with (
            shared.begun("run", "--vram", "6GB", *work) as near,
            shared.begun("run", "--vram", "6GB", *client) as short,
        ):
            stopping = threading.Thread(target=stop)
            stopping.start()
            neighbour, shorts = near(45), short(45)
            stopping.join()
        found = {
            "other's task": first.rc,
            "stop_s": took,
            "neighbour": neighbour_of(neighbour),
            "shorts": dict(shorts_of(shorts)),
        }
        found["other's log"] = other.grep("scrub", "unclean", "card_", "mps")[-6:]
        if neighbour_of(neighbour) != "right" or len(found["shorts"]) != 1:
            found["log"] = shared.grep("unclean", "mps", "gpu_", "card_")[-8:]
            logs = Path("/run/gpool").glob("mps*/*/log/*")
            found["mps"] = {file.name: file.read_text()[-500:] for file in logs}
        return found
    finally:
        if other._up.poll() is None:
            other.stop()
        other.remove()


def main() -> int:
    began, rows = time.perf_counter(), []
    with pool(18483, "mps") as shared:
        for number in range(100):
            if time.perf_counter() - began > LATEST_S - LAST_TRIAL_S:
                break
            delay = DELAYS_S[number % len(DELAYS_S)]
            sharing = "exclusive" if number % 3 != 2 else "mps"
            row = {"trial": number, "delay_s": delay, "other": sharing}
            row |= trial(shared, number, delay, sharing)
            rows.append(row)
            say(**row)
        # the control: no other agent is stopped
        work = ("--input", "work.py", "--", "python3", "work.py", "check", str(CHECK_S), str(GIB))
        control = neighbour_of(shared.gpool("run", "--vram", "6GB", *work))
    verdict = {
        "verdict": "stopping",
        "pass": all(row.get("neighbour") == "right" for row in rows),
        "trials": len(rows),
        "neighbour": dict(Counter(str(row.get("neighbour", "skipped"))[:60] for row in rows)),
        "control": control,
    }
    print(json.dumps(verdict), flush=True)
    if os.environ.get("OUT"):
        text = json.dumps({**verdict, "rows": rows}, indent=1, default=str)
        Path(os.environ["OUT"], "stopping.json").write_text(text + "\n")
    return not verdict["pass"]


if __name__ == "__main__":
    say(before=card_state())
    try:
        sys.exit(main())
    finally:
        set_back()
        say(after=card_state())
