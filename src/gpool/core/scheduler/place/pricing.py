"""Pricing of placements: the GPU that a placement makes unusable for the usual tasks. A value learnt from arrivals.

Three costs are added, in thousandths of a GPU, and rounded to steps:

- **fragmentation**: free GPU that a task drawn from the mix could not use, on average (`fragmentation`);
- **remnants**: worth of the rest of a shared GPU, lost beyond the task's own part (`remnants`);
- **stranding**: free GPU for which free CPU or memory is short, at the mix's needs per GPU.
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
"""Sum of the weights of a mix: integers keep sums exact."""

_USUAL_VRAM = 24 * GIB  # to give a slice of memory a size where no card is at hand


@dataclass(frozen=True, slots=True)
class Weights:
    """All zero is best fit."""

    fragmentation: int = 1
    remnants: int = 10_000
    stranding: int = 1
    step: int = 80


@dataclass(frozen=True, slots=True)
class Pricing:
    """`mix`: requirements with GPUs and their parts of `WEIGHT`, most frequent first."""

    mix: tuple[tuple[Requirements, int], ...]
    remnants: tuple[int, ...]  # the worth of 0 … 1000 free thousandths, in thousandths
    gpu_milli: int  # requested in all, beside ...
    cpu_milli: int  # ... this CPU
    memory_bytes: int  # ... and memory (0: none was requested)
    weights: Weights = Weights()


def price(arrivals: Iterable[tuple[Requirements, int]], weights: Weights = Weights()) -> Pricing:  # noqa: B008 - frozen
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
    """Thousandths of each GPU."""
    if request.vram_bytes is not None and request.share_milli == GPU:
        return max(1, min(GPU, GPU * request.vram_bytes // max(1, card_bytes)))
    return request.share_milli


def _kind(needs: Requirements) -> Requirements:
    return Requirements(
        gpu=needs.gpu,
        cpu_milli=needs.cpu_milli if needs.gpu else 0,
        tier=needs.tier,
        python=needs.python,
        network=needs.network,
    )


USUAL = price([(Requirements(gpu=(GpuRequest(),)), 1)])
"""Without arrivals to learn from: tasks of one GPU and one CPU, so that slices fill shared GPUs."""
