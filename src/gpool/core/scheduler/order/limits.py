"""How many GPUs a user and a team may run at once, and how many they are sure of. Thousandths, as slices; decides nothing.

A line on one allocation counts once, however long it is: at most one of its leases runs. What runs when a limit is
lowered goes on.

**Borrowing.** A guarantee is a number of GPUs, a limit the most. What those who are guaranteed leave idle may be borrowed
by anybody up to their limits: a start that its user's or its team's guarantee covers goes before all that none covers
(`band`), and may have room made for it among borrowers that allow to be stopped; from others it gets the next that ends.
Nobody is ever stopped within their own guarantee for somebody else's. CPU and memory are not guaranteed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from gpool.core.ids import UserId
from gpool.core.model import Allocation, Shape, Slice

Holder = tuple[Literal["user", "team"], int]


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """`given` are those set for one user or team; the others have the default of their kind. None: no limit."""

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
    """Where a start that takes `more` besides what its people have stands; `WITHIN` for all where nothing is guaranteed."""
    if not limits.guaranteed:
        return WITHIN
    if more:
        for holder in holders_of(shape):
            sure = limits.guaranteed.get(holder)
            if sure is not None and held(holder) + more <= sure:
                return WITHIN
    return BORROWED


def holders(user: UserId, team: int | None) -> Iterator[Holder]:
    """Whose limits a task counts against: its user's, and its team's when it has one."""
    yield "user", user
    if team is not None:
        yield "team", team


def holders_of(shape: Shape) -> Iterator[Holder]:
    return holders(shape.user, shape.team)


def gpus_in(slices: tuple[Slice, ...]) -> int:
    if len(slices) == 1:
        return slices[0].share_milli
    return sum([part.share_milli for part in slices])


def gpus_of(allocation: Allocation) -> int:
    return gpus_in(allocation.slices)


def least_gpus(shape: Shape) -> int:
    """The least that one start of this shape takes, as far as can be said without knowing the GPU."""
    return min(
        (
            1 if request.vram_bytes is not None else request.count * request.share_milli
            for request in shape.requirements.gpu
        ),
        default=0,
    )
