"""GPU limits and guarantees of users and teams, in thousandths of a GPU. Counts; decides nothing.

An allocation's queue counts once: at most one of its leases runs. Running tasks survive a lowered limit.

**Borrowing.** Idle guaranteed GPUs may be borrowed by anybody up to the limits. A start covered by a guarantee goes
before all others (`band`) and may preempt borrowers that allow it; from others it gets the next free GPU. No task within
its own guarantee is stopped for another tenant. CPU and memory are not guaranteed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from gpool.core.ids import UserId
from gpool.core.model import Allocation, Shape, Slice

Holder = tuple[Literal["user", "team"], int]


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """`given`: limits of single users and teams; others have the default of their kind. None: no limit."""

    user_milli: int | None = None
    team_milli: int | None = None
    given: Mapping[Holder, int] = field(default_factory=dict)
    guaranteed: Mapping[Holder, int] = field(default_factory=dict)

    def of(self, holder: Holder) -> int | None:
        default = self.user_milli if holder[0] == "user" else self.team_milli
        return self.given.get(holder, default)

    @property
    def is_any(self) -> bool:
        return self.user_milli is not None or self.team_milli is not None or bool(self.given)


NO_LIMITS = GpuLimits()

WITHIN, BORROWED = 0, 1


def band(limits: GpuLimits, shape: Shape, held: Callable[[Holder], int], more: int) -> int:
    """`WITHIN` if nothing is guaranteed."""
    if not limits.guaranteed:
        return WITHIN
    if more:
        for holder in holders_of(shape):
            sure = limits.guaranteed.get(holder)
            if sure is not None and held(holder) + more <= sure:
                return WITHIN
    return BORROWED


def holders(user: UserId, team: int | None) -> tuple[Holder, ...]:
    return (("user", user),) if team is None else (("user", user), ("team", team))


def holders_of(shape: Shape) -> tuple[Holder, ...]:
    return holders(shape.user, shape.team)


def gpus_in(slices: tuple[Slice, ...]) -> int:
    if len(slices) == 1:
        return slices[0].share_milli
    return sum([part.share_milli for part in slices])


def gpus_of(allocation: Allocation) -> int:
    return gpus_in(allocation.slices)


def least_gpus(shape: Shape) -> int:
    """Of the alternatives, the one that asks for least."""
    return min(
        [
            1 if request.vram_bytes is not None else request.count * request.share_milli
            for request in shape.requirements.gpu
        ],
        default=0,
    )
