"""Rewards of a period: an operator's pool, shared by what each owner's nodes contributed. Pure.

Weight of an owner: the sum over its nodes of

    (GPU time + verified GPU time) x verified speed x availability

in GPU-milliseconds, TFLOP/s (1 if no speed was verified) and millionths. Verified GPU time counts twice: it is the part
whose earnings vested. Example, a pool of 100.00: node A, 10 h at 50 TFLOP/s, none of it verified, and node B, 10 h at
50 TFLOP/s, all of it verified, both always available, get 33.333333 and 66.666667.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpool.core.errors import Invalid

WHOLE = 1_000_000


@dataclass(frozen=True, slots=True)
class Contribution:
    """Use of one node in a period. `verified_us`: part of `gpu_us`. `availability_ppm`: millionths, at most 1,000,000."""

    gpu_us: int
    verified_us: int = 0
    speed_tflops: int = 1
    availability_ppm: int = WHOLE

    def weight(self) -> int:
        verified = min(self.verified_us, self.gpu_us)
        time_ms = (self.gpu_us + verified) // 1000
        return time_ms * max(1, self.speed_tflops) * min(self.availability_ppm, WHOLE) // WHOLE


def availability_ppm(up_us: int, losses: int, repair_us: int) -> int:
    """Share of time in which a node was there, if each loss took `repair_us`; a new node counts as available."""
    total = up_us + losses * repair_us
    return WHOLE if total <= 0 else up_us * WHOLE // total


def weights_of(contributions: Sequence[tuple[int, Contribution]]) -> dict[int, int]:
    """Sum of the weights of each owner's nodes; owners without weight are left out."""
    found: dict[int, int] = {}
    for owner, each in contributions:
        found[owner] = found.get(owner, 0) + each.weight()
    return {owner: weight for owner, weight in found.items() if weight}


def shares_of(pool: int, weights: Mapping[int, int]) -> dict[int, int]:
    """Divide `pool` micro-credits by weight; the shares sum to it. `Invalid` if nobody has a weight.

    Each owner gets its exact share rounded down; the micro-credits that are left go to the largest remainders, of equal
    ones to the lower account.
    """
    total = sum(weights.values())
    if total <= 0:
        raise Invalid("nobody contributed in this period: there is nothing to share the rewards by")
    found = {owner: pool * weight // total for owner, weight in weights.items()}
    left = pool - sum(found.values())
    order = sorted(weights, key=lambda owner: (-(pool * weights[owner] % total), owner))
    for owner in order[:left]:
        found[owner] += 1
    return found
