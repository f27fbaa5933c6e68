"""Pairs of a victim and a spy, two users one after the other on the same GPU: what of the one does the other find? JSON lines."""

from __future__ import annotations

import sys
import time

from pool import Ran, card_state, pool, say, set_back

PAIRS = int(sys.argv[1]) if len(sys.argv) > 1 else 20
LATEST_S = 225.0
RESIDUE = ("--input", "residue.py", "--", "python3", "residue.py")
FILL = ("--input", "cuda_client.py", "--", "python3", "cuda_client.py", "fill", "0.98")


def main() -> None:
    began = time.perf_counter()
    with pool(18474, "exclusive", "victim", "spy") as made:
        control = made.gpool("run", "--gpu", "1", *RESIDUE, "control", "0.3", user="victim")
        say(step="control", **control.brief())
        done, marks, nonzero, parts, faults = 0, 0, 0, [], []
        for pair in range(PAIRS):
            if time.perf_counter() - began > LATEST_S:
                say(step="late", pairs=pair)
                break
            victim = made.gpool("run", "--gpu", "1", *FILL, user="victim")
            spy = made.gpool("run", "--gpu", "1", *RESIDUE, "spy", "0.96", user="spy")
            if victim.rc != 0 or spy.rc != 0:
                faults.append((pair, victim.brief(), spy.brief()))
                continue
            done += 1
            marks += spy.told("marks")
            nonzero += spy.told("nonzero")
            parts.append(min(_part(victim, "filled"), _part(spy, "looked")))
            say(pair=pair, victim_s=victim.seconds, spy_s=spy.seconds, marks=marks, nonzero=nonzero)
        least = round(min(parts, default=0.0), 3)
        log = made.grep("gpu_scrubbed", "unclean")
        say(step="scrubs", log=log[-4:], scrubs=len(log), faults=faults[:3])
        verdict = {
            "pairs": done,
            "least part of the memory": least,
            "bytes of residue": marks,
            "bytes not zero": nonzero,
            "control found": control.told("marks"),
        }
        say(verdicts=verdict)


def _part(ran: Ran, name: str) -> float:
    return float(ran.told(name)) / float(ran.told("of"))


if __name__ == "__main__":
    say(before=card_state())
    try:
        main()
    finally:
        set_back()
        say(after=card_state())
