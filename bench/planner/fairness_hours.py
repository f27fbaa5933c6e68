"""What tenants had in an hour beside their share, over hours and seeds, and what no planner could have avoided. It runs nothing.

**Hours.** Time is kept in slices of ten minutes, so that an hour may begin at any of them: the whole hours from when the last
tenant came (hour 0 is the first), and every hour that begins ten minutes later than another (`any_hour`).

**Floor.** What runs when an hour begins and may not be stopped takes its part of it whatever is planned, and keeps large pieces
off its node until it ends. `Carried.floor` is the least deviation of the worst-off tenant that is left to a planner who knows
every end and may place at will: a bound, not a promise that it can be had. It is of the whole pool, while hours are of what all
had: where GPUs idle an hour may be nearer. It does not forgive the planner's own earlier hours, in which all that runs was started.

**Pieces.** Where everything may be stopped two numbers say what sizes allow: `of_whole_pieces`, if each team kept the number of
pieces nearest to its share (only turns come nearer), and `of_turns`, if the piece at the margin is had for whole turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from gpool.core.model import SECOND

HOUR = 3600 * SECOND
SLICE = HOUR // 6
Row = dict[str, Any]
Had = dict[int, tuple[int, int, int]]  # by team: resource time


@dataclass(frozen=True, slots=True)
class Piece:
    """Something that runs when an hour begins."""

    team: int
    node: int
    gpus: int
    ends: int  # after the hour began


@dataclass(frozen=True, slots=True)
class Carried:
    """What an hour begins with. `sizes`: the GPUs of one task of each team; `nodes`: of eight GPUs each."""

    pieces: Sequence[Piece]
    sizes: Mapping[int, int]
    nodes: int

    def floor(self, fair: Mapping[int, float]) -> float:
        """As a part of a share; 0: nothing that runs stands in the way."""
        whole = 8 * self.nodes * HOUR
        due = {team: part * whole for team, part in fair.items()}
        carried = dict.fromkeys(fair, 0)
        for piece in self.pieces:
            carried[piece.team] += piece.gpus * min(piece.ends, HOUR)
        over = {team for team in fair if carried[team] > due[team]}
        found = max((carried[team] / due[team] - 1 for team in over), default=0.0)
        excess = sum(carried[team] - due[team] for team in over)
        rest = sum(due[team] for team in fair if team not in over)
        if rest:
            found = max(found, excess / rest)
        for size in sorted(set(self.sizes.values()) - {0, 1}):
            large = [team for team in fair if self.sizes[team] >= size]
            most = self.room_for(size) + sum(carried[team] for team in large)
            found = max(found, 1 - most / sum(due[team] for team in large))
        return found

    def room_for(self, size: int) -> int:
        """GPU time that pieces of this size could have besides what runs, were they alone."""
        held: dict[int, list[Piece]] = {}
        for piece in self.pieces:
            held.setdefault(piece.node, []).append(piece)
        total = (self.nodes - len(held)) * (8 // size * size) * HOUR
        for pieces in held.values():
            free, since = 8 - sum(piece.gpus for piece in pieces), 0
            for piece in sorted(pieces, key=lambda each: each.ends):
                until = min(piece.ends, HOUR)
                total += free // size * size * (until - since)
                free, since = free + piece.gpus, until
            total += free // size * size * (HOUR - since)
        return total


@dataclass(frozen=True, slots=True)
class Measured:
    """One scenario with one seed."""

    scenario: str
    seed: int
    fair: Mapping[int, float]
    slices: Sequence[Had]
    lent: tuple[int, int, int]
    floors: Sequence[float | None]  # of each whole hour
    warm: int  # hours

    def deviations(self, first: int) -> dict[int, float]:
        """Of each team's share, in the hour that begins with this slice."""
        had = self.slices[first : first + 6]
        parts = {
            team: max(sum(each[team][kind] for each in had) / self.lent[kind] for kind in range(3))
            for team in self.fair
        }
        of_all = sum(self.fair.values()) / sum(parts.values())
        return {team: parts[team] * of_all / self.fair[team] - 1 for team in self.fair}

    @property
    def hours(self) -> list[dict[int, float]]:
        return [self.deviations(first) for first in range(0, len(self.slices), 6)]

    @property
    def any_hours(self) -> list[dict[int, float]]:
        return [self.deviations(first) for first in range(len(self.slices) - 5)]

    def used(self) -> float:
        """The part of the pool that all had together, of what could be had."""
        whole = len(self.slices) * SLICE
        parts = [
            max(
                sum(each[team][kind] for each in self.slices) / self.lent[kind] for kind in range(3)
            )
            for team in self.fair
        ]
        return sum(parts) / whole / sum(self.fair.values())


def of_whole_pieces(fair: Mapping[int, float], sizes: Mapping[int, int], lent: int) -> float:
    """How far the team is at least whose pieces suit its share worst, if it always holds the same number of them."""
    return max(
        (_rounding(part * lent / 1000 / sizes[team]) for team, part in fair.items()), default=0.0
    )


def of_turns(fair: Mapping[int, float], sizes: Mapping[int, int], lent: int, turn: int) -> float:
    """The same, if it holds one more of them for whole turns of an hour."""
    turns = HOUR // turn
    return max(
        (_rounding(part * lent / 1000 / sizes[team] * turns) for team, part in fair.items()),
        default=0.0,
    )


def _rounding(count: float) -> float:
    """The part of it that whole ones miss."""
    return abs(round(count) - count) / count


def worst(deviations: Iterable[Mapping[int, float]]) -> float:
    return max((each for hour in deviations for each in hour.values()), key=abs, default=0.0)


def by_hour(found: Sequence[Measured]) -> list[Row]:
    """Of one scenario: each whole hour, over all seeds and teams. Hour 0 begins when the last has come."""
    rows = []
    for hour in range(max(len(each.hours) for each in found)):
        all_ = [each.hours[hour] for each in found if hour < len(each.hours)]
        floors = [
            floor
            for each in found
            if hour < len(each.floors) and (floor := each.floors[hour]) is not None
        ]
        beyond = sum(abs(one) > 0.05 for each in all_ for one in each.values())
        rows.append(
            {
                "scenario": found[0].scenario,
                "hour": hour,
                "is_warm_up": hour < found[0].warm,
                "seeds": len(all_),
                "worst_pct": round(100 * worst(all_), 2),
                "mean_of_worst_pct": round(100 * fmean(abs(worst([each])) for each in all_), 2),
                "team_hours_beyond_5_pct": f"{beyond} of {sum(len(each) for each in all_)}",
                "worst_floor_pct": round(100 * max(floors), 2) if floors else "",
                "mean_floor_pct": round(100 * fmean(floors), 2) if floors else "",
            }
        )
    return rows


def summary(found: Sequence[Measured]) -> Row:
    """Of one scenario, over all seeds."""
    after = [hour for each in found for hour in each.hours[each.warm :]]
    sliding = [hour for each in found for hour in each.any_hours[6 * each.warm :]]
    hardest = max(found, key=lambda each: abs(worst(each.hours[each.warm :])))
    return {
        "scenario": found[0].scenario,
        "seeds": f"{found[0].seed}..{found[-1].seed}",
        "warm_up_h": found[0].warm,
        "worst_pct": round(100 * worst(after), 2),
        "of_seed": hardest.seed,
        "worst_with_warm_up_pct": round(100 * worst(h for each in found for h in each.hours), 2),
        "any_hour_worst_pct": round(100 * worst(sliding), 2),
        "team_hours_beyond_5_pct": sum(abs(one) > 0.05 for hour in after for one in hour.values()),
        "team_hours": sum(len(hour) for hour in after),
    }
