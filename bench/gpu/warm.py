"""Times a PyTorch function on a real GPU three ways; see warm.sh. Prints one JSON line."""

from __future__ import annotations

import json
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import gpool

ROUNDS = 10


def product(number: int) -> Callable[[int], float]:
    """A function of its own for each number: its hash differs, so it has no live process yet."""

    def run(size: int) -> float:
        import torch  # noqa: PLC0415 - inside, where it runs

        x = torch.randn(size, size, device="cuda")
        return float((x @ x).sum().item()) + number

    return run


def timed(function: Any) -> float:
    began = perf_counter()
    function.remote(512)
    return perf_counter() - began


def main() -> None:
    cold = timed(gpool.task(gpu=1, cpus=2)(product(-1)))  # a runner of its own
    warmed = gpool.task(gpu=1, preload=["torch"])
    first = timed(warmed(product(0)))
    forks, live = [], []
    for number in range(1, ROUNDS + 1):
        function = warmed(product(number))
        forks.append(timed(function))
        live.append(timed(function))
    said = {
        "cold_s": cold,
        "first_with_preload_s": first,
        "fork_p50_s": median(forks),
        "fork_most_s": max(forks),
        "live_p50_s": median(live),
    }
    print(json.dumps({name: round(value, 4) for name, value in said.items()}))


main()
