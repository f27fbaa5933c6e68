"""Tasks for the scripts here, by torch. `count UNTIL_S`: how many products by then. `check S`: a sum computed again and again."""

from __future__ import annotations

import json
import sys
import threading
import time

import torch


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def wall() -> float:
    return time.clock_gettime(time.CLOCK_REALTIME)


def count(start: float, seconds: float, size: int) -> None:
    """From one instant to another, so that two of it are measured side by side."""
    x = torch.randn(size, size, device="cuda")
    for _ in range(20):
        x @ x
    torch.cuda.synchronize()
    early = start - wall()
    threading.Event().wait(max(0.0, early))
    done, until = 0, start + seconds
    while wall() < until:
        for _ in range(20):
            x @ x
        torch.cuda.synchronize()
        done += 20
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    say(done=done, early=round(early, 2), sms=sms)


def check(seconds: float, gib: float) -> None:
    """Holds some memory full of ones and sums it up until the time is over: any change by others shows."""
    held = torch.ones(int(gib * (1 << 28)), device="cuda")
    wanted, sums, until = float(held.numel()), 0, wall() + seconds
    say(began=wall(), device=torch.cuda.get_device_name(0))
    while wall() < until:
        found = sum(part.double().sum().item() for part in held.split(1 << 26))
        if found != wanted:
            say(wrong=found, wanted=wanted)
            sys.exit(3)
        sums += 1
    say(sums=sums, right=True)


def hang() -> None:
    torch.ones(1, device="cuda")
    torch.cuda._sleep(10**14)  # more than a day
    say(hung=wall())
    torch.cuda.synchronize()


if __name__ == "__main__":
    word, *rest = sys.argv[1:]
    if word == "count":
        count(float(rest[0]), float(rest[1]), int(rest[2]))
    elif word == "check":
        check(float(rest[0]), float(rest[1]))
    elif word == "hang":
        hang()
