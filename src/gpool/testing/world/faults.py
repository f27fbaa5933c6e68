"""The plan of what goes wrong: drawn from the seed before the run, so that a run is its plan.

Each seed allows only some kinds of fault (a swarm): rare combinations come up that no even mixture would show.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from gpool.testing.dice import Dice
from gpool.testing.world.network import Weather

MS = 1_000
S = 1_000_000


class Kind(StrEnum):
    SERVER_CRASH = "server_crash"
    AGENT_CRASH = "agent_crash"
    FREEZE = "freeze"
    BREAK = "break"
    STALL = "stall"  # one connection's words arrive after those of a newer one
    BLOCK = "block"  # both ways
    BLOCK_UP = "block_up"
    BLOCK_DOWN = "block_down"
    BLOCK_CROSSED = "block_crossed"  # down for a while; up later, and for longer than a lease
    OWNER_PAUSE = "owner_pause"
    SLOW_DISK = "slow_disk"
    SHUTDOWN = "shutdown"  # the owner stops the agent properly, and starts it again
    PREEMPT = "preempt"  # the server takes places away for others
    RECLAIM = "reclaim"  # the owner takes the machine back, and lends it again later
    SPIKES = "spikes"
    REPEATS = "repeats"
    LOSSES = "losses"


MOMENTS = (
    Kind.SERVER_CRASH,
    Kind.AGENT_CRASH,
    Kind.FREEZE,
    Kind.BREAK,
    Kind.STALL,
    Kind.BLOCK,
    Kind.BLOCK_UP,
    Kind.BLOCK_DOWN,
    Kind.BLOCK_CROSSED,
    Kind.OWNER_PAUSE,
    Kind.SLOW_DISK,
    Kind.SHUTDOWN,
    Kind.PREEMPT,
    Kind.RECLAIM,
)
"""Faults that happen at a moment; the rest is weather."""

LASTS_US: dict[Kind, tuple[int, int]] = {
    Kind.SERVER_CRASH: (50 * MS, 2 * S),
    Kind.AGENT_CRASH: (100 * MS, 5 * S),
    Kind.FREEZE: (200 * MS, 9 * S),
    Kind.BREAK: (0, 0),
    Kind.STALL: (50 * MS, 3 * S),
    Kind.BLOCK: (300 * MS, 8 * S),
    Kind.BLOCK_UP: (300 * MS, 8 * S),
    Kind.BLOCK_DOWN: (300 * MS, 6 * S),
    Kind.BLOCK_CROSSED: (1500 * MS, 2800 * MS),
    Kind.OWNER_PAUSE: (500 * MS, 4 * S),
    Kind.SLOW_DISK: (300 * MS, 2 * S),
    Kind.SHUTDOWN: (300 * MS, 3 * S),
    Kind.PREEMPT: (0, 0),
    Kind.RECLAIM: (300 * MS, 4 * S),
}


@dataclass(frozen=True, slots=True)
class Fault:
    at_us: int
    kind: Kind
    node: int  # which node it strikes, where it strikes one
    lasts_us: int


@dataclass(frozen=True, slots=True)
class FaultPlan:
    allowed: tuple[Kind, ...]
    faults: tuple[Fault, ...]
    weather: Weather
    ends_us: int


@dataclass(slots=True)
class Mischief:
    """How much of it, for tests that want a certain kind."""

    until_us: int = 24 * S
    most: int = 14
    always: tuple[Kind, ...] = field(default=())


def draw(dice: Dice, nodes: int, mischief: Mischief) -> FaultPlan:
    allowed = tuple(k for k in Kind if k in mischief.always or dice.chance(0.5))
    moments = [k for k in allowed if k in MOMENTS]
    faults: list[Fault] = []
    if moments:
        for _ in range(dice.between(1, mischief.most)):
            kind = dice.pick(moments)
            at_us = dice.between(500 * MS, mischief.until_us)
            faults.append(
                Fault(at_us, kind, dice.between(0, nodes - 1), dice.between(*LASTS_US[kind]))
            )
    faults.sort(key=lambda fault: (fault.at_us, fault.kind.value, fault.node))
    weather = Weather(
        delay_us=(1 * MS, dice.pick((3, 30, 150)) * MS),
        spike=dice.pick((0.01, 0.05)) if Kind.SPIKES in allowed else 0.0,
        repeat=dice.pick((0.02, 0.2)) if Kind.REPEATS in allowed else 0.0,
        request_lost=0.1 if Kind.LOSSES in allowed else 0.0,
        answer_lost=dice.pick((0.1, 0.3)) if Kind.LOSSES in allowed else 0.0,
        request_repeated=dice.pick((0.05, 0.3)) if Kind.REPEATS in allowed else 0.0,
    )
    ends_us = max((f.at_us + f.lasts_us for f in faults), default=0)
    return FaultPlan(allowed, tuple(faults), weather, max(ends_us, mischief.until_us))
