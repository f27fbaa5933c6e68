"""What the pool's tasks usually ask for, and what free room is worth to them. A value: made from earlier arrivals, then only read.

Placement asks of every possible place: how much GPU that the usual tasks could have used does it spoil? Three things are
counted, all in thousandths of a GPU:

- **fragmentation**: free GPU that a task drawn from the mix could not use on that node, on average;
- **remnants**: the worth of the rest of a shared GPU (`remnants`), in GPUs, lost beyond what the task itself takes;
- **stranding**: free GPU that the node's free CPU or memory is too little to feed, at what the mix needs beside a GPU.

The sum is cut to steps: places that differ less than a step are equal and the next rule decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from gpool.core.model import GIB, GpuRequest, Requirements
from gpool.core.scheduler.place.remnants import GPU, remnant_values

MAX_KINDS = 128
COVERED = 0.95  # of all arrivals; what is rarer does not steer
WEIGHT = 10_000
"""The weights of a mix add up to this, so that everything stays an exact integer."""

_USUAL_VRAM = 24 * GIB  # to give a slice of memory a size where no card is at hand


@dataclass(frozen=True, slots=True)
class Weights:
    """How much each part of the price counts; all zero is plain best fit."""

    fragmentation: int = 1
    remnants: int = 10_000
    stranding: int = 1
    step: int = 80


@dataclass(frozen=True, slots=True)
class Pricing:
    """`mix`: what asks for GPUs and its part of `WEIGHT`, the most frequent first."""

    mix: tuple[tuple[Requirements, int], ...]
    remnants: tuple[int, ...]  # the worth of 0 … 1000 free thousandths, in thousandths
    gpu_milli: int  # asked for in all; beside it …
    cpu_milli: int  # … so much CPU
    memory_bytes: int  # … and so much memory (0: none was named)
    weights: Weights = Weights()


def price(arrivals: Iterable[tuple[Requirements, int]], weights: Weights = Weights()) -> Pricing:  # noqa: B008 - frozen
    """From what arrived (requirements, how many). The order of arrival does not matter."""
    counts: Counter[Requirements] = Counter()
    for needs, count in arrivals:
        counts[needs] += count
    demand: Counter[int] = Counter()
    gpu = cpu = memory = 0
    kinds: Counter[Requirements] = Counter()
    for needs, count in counts.items():
        kinds[_kind(needs)] += count
        if not needs.gpu:
            continue
        request = needs.gpu[0]
        size = size_of(request)
        demand[size] += request.count * count
        gpu += request.count * size * count
        cpu += needs.cpu_milli * count
        memory += (needs.memory_bytes or 0) * count
    ranked = sorted(kinds.items(), key=lambda pair: (-pair[1], repr(pair[0])))
    total, covered, chosen = sum(kinds.values()), 0, []
    for needs, count in ranked[:MAX_KINDS]:
        chosen.append((needs, count))
        covered += count
        if covered >= COVERED * total:
            break
    mix = [(needs, max(1, count * WEIGHT // covered)) for needs, count in chosen]
    values = remnant_values(demand)
    return Pricing(
        mix=tuple(pair for pair in mix if pair[0].gpu),
        remnants=tuple(round(GPU * value) for value in values),
        gpu_milli=gpu,
        cpu_milli=cpu,
        memory_bytes=memory,
        weights=weights,
    )


def size_of(request: GpuRequest, card_bytes: int = _USUAL_VRAM) -> int:
    """Thousandths of each GPU that a request takes, on a card of that much memory."""
    if request.vram_bytes is not None and request.share_milli == GPU:
        return max(1, min(GPU, GPU * request.vram_bytes // max(1, card_bytes)))
    return request.share_milli


def _kind(needs: Requirements) -> Requirements:
    """Requirements that strand alike are one: of a mix, memory and disk do not matter."""
    return Requirements(
        gpu=needs.gpu,
        cpu_milli=needs.cpu_milli if needs.gpu else 0,
        tier=needs.tier,
        python=needs.python,
        network=needs.network,
    )


USUAL = price([(Requirements(gpu=(GpuRequest(),)), 1)])
"""For a pool without a past: tasks of one whole GPU and one CPU, so that slices fill up GPUs already shared."""
