"""Spies, by torch. `spy PART`: counts what a victim (`cuda_client.py fill`) left in that part of the free memory.

`control`: one process frees its marked memory to its own allocator and takes it again: there the mark must be found.
"""

from __future__ import annotations

import json
import sys

import torch

MARK = 0xA7
CHUNK = 1 << 30


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def take(part: float) -> list[torch.Tensor]:
    free, _ = torch.cuda.mem_get_info()
    held: list[torch.Tensor] = []
    for _ in range(int(free * part) // CHUNK):
        try:
            held.append(torch.empty(CHUNK, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            break
    return held


def found(held: list[torch.Tensor]) -> dict[str, int]:
    marks = others = 0
    for each in held:
        counts = [(part == MARK).sum() for part in each.split(1 << 28)]
        nonzero = [torch.count_nonzero(part) for part in each.split(1 << 28)]
        marks += int(sum(int(c) for c in counts))
        others += int(sum(int(c) for c in nonzero))
    return {"looked": len(held) * CHUNK, "marks": marks, "nonzero": others}


word, part = sys.argv[1], float(sys.argv[2])
total = torch.cuda.mem_get_info()[1]
if word == "spy":
    # a little is left for the counting itself
    say(of=total, **found(take(part)))
else:
    mine = take(part)
    for each in mine:
        each.fill_(MARK)
    torch.cuda.synchronize()
    del each, mine
    say(control=True, of=total, **found(take(part)))
