"""Kernels that never end: how long until the task is ended, and until the GPU has done the next one's work. JSON lines."""

from __future__ import annotations

import json
import time

from pool import card_state, pause, pool, say, set_back

ROUNDS = 3
TIMEOUT_S = 12.0
WORK = ("--input", "work.py", "--", "python3", "work.py")
NEXT = (
    "--input",
    "cuda_client.py",
    "--",
    "sh",
    "-c",
    "echo | python3 cuda_client.py hold 1073741824",
)


def main() -> None:
    ends, nexts = [], []
    with pool(18475, "exclusive", "bob") as made:
        for kind in ("timeout", "cancel"):
            for _ in range(ROUNDS):
                words = ["run", "--gpu", "1"]
                if kind == "timeout":
                    words += ["--timeout", f"{TIMEOUT_S:g}s"]
                with made.begun(*words, *WORK, "hang") as hanging:
                    if kind == "timeout":
                        began = time.perf_counter()
                        ran = hanging(60)
                        took = time.perf_counter() - began - TIMEOUT_S
                    else:
                        pause(9)
                        listed = json.loads("".join(made.gpool("ps", "--json").out))
                        ids = [task["id"] for task in listed if task["status"] == "running"]
                        began = time.perf_counter()
                        cancelled = made.gpool("cancel", *ids[:1])
                        ran = hanging(60)
                        took = time.perf_counter() - began
                        say(cancelled=cancelled.brief())
                began = time.perf_counter()
                after = made.gpool("run", "--gpu", "1", *NEXT, user="bob", timeout=60)
                waited = time.perf_counter() - began
                say(
                    kind=kind,
                    ended_s=round(took, 2),
                    next_s=round(waited, 2),
                    hung=ran.brief(),
                    next=after.brief(),
                )
                if ran.told("hung") is None:
                    say(kind=kind, failed="it did not hang before it was ended")
                    continue
                ends.append(took)
                nexts.append(waited if after.told("took") else 999.0)
        say(log=made.grep("gpu_scrubbed", "unclean")[-6:])
    say(
        verdicts={
            "rounds": len(ends),
            "ended within (s)": round(max(ends, default=999.0), 2),
            "next task done within (s)": round(max(nexts, default=999.0), 2),
        }
    )


if __name__ == "__main__":
    try:
        main()
    finally:
        set_back()
        say(after=card_state())
