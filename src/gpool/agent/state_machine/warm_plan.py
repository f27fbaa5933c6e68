"""The plan of warm sandboxes: demand and idle memory in, instructions to prepare or discard sandboxes out. Pure.

A warm sandbox has imported the modules of one key, belongs to no user and is handed out once. The number kept for a key
follows its demand, a count of requests that halves every two minutes, and the memory that is not leased. Each possible
sandbox is a *candidate* with a weight (demand / position); the heaviest that fit into memory are kept, the others
discarded.

Example: 40 requests for a key within seconds are a demand of 40, or 0.23 requests a second. During the 5 s in which one
sandbox is prepared 1.2 requests are expected, so 2 are wanted, with weights 40 and 20. Two minutes later the demand is
20 and one is wanted. A single request keeps one sandbox for six minutes, until the demand is below 0.12.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from gpool.agent.runtime.protocol import SandboxLimits
from gpool.core.model import GIB, Recipe, Slice

HALF_LIFE_US = 120 * 1_000_000
REFILL_S = 5.0  # rough time to prepare a sandbox
LEAST_DEMAND = 0.12  # below it none is kept: six minutes after a single request
MOST_ENTRIES = 8
MOST_A_KEY = 4
MOST_KEYS = 256
AT_ONCE = 1  # prepared at the same time, because the processors are for tasks
FIRST_GUESS_BYTES = GIB
KEPT_WEIGHT = 2.0  # factor for existing ones: none is discarded for an equal one
FIRST_PAUSE_US = 30 * 1_000_000
LONGEST_PAUSE_US = 600 * 1_000_000


@dataclass(frozen=True, slots=True)
class WarmKey:
    runtime: str
    environment: tuple[str, Recipe | None] | None  # None: the agent's own Python
    python: str
    preload: tuple[str, ...]
    slices: tuple[Slice, ...]  # its device nodes; it has no context on them
    limits: SandboxLimits


@dataclass(frozen=True, slots=True)
class Prepare:
    number: int  # a number that is never used again
    key: WarmKey
    most_bytes: int  # memory limit until it is assigned


@dataclass(frozen=True, slots=True)
class Discard:
    number: int


class Stage(Enum):
    PREPARING = "preparing"
    READY = "ready"
    LEAVING = "leaving"


@dataclass(slots=True)
class WarmEntry:
    key: WarmKey
    bytes_held: int  # its limit; once it is ready, the measured use
    stage: Stage = Stage.PREPARING


@dataclass(slots=True)
class Demand:
    count: float = 0.0
    at: int = 0
    used_bytes: int = 0  # by the last sandbox that became ready
    failures: int = 0
    not_before: int = 0

    def now(self, now: int) -> float:
        return float(self.count * 0.5 ** ((now - self.at) / HALF_LIFE_US))

    def ask(self, now: int) -> None:
        self.count, self.at = self.now(now) + 1, now

    def wanted(self, now: int) -> int:
        """Number to keep: the requests expected while one is prepared, at least one."""
        count = self.now(now)
        if count < LEAST_DEMAND:
            return 0
        a_second = count * math.log(2) / (HALF_LIFE_US / 1_000_000)
        return min(MOST_A_KEY, max(1, math.ceil(a_second * REFILL_S)))


@dataclass(frozen=True, slots=True)
class _WarmCandidate:
    weight: float
    key: WarmKey
    number: int | None  # of an existing entry
    bytes_held: int


@dataclass(slots=True)
class WarmPool:
    entries: dict[int, WarmEntry] = field(default_factory=dict)
    demands: dict[WarmKey, Demand] = field(default_factory=dict)
    last_number: int = 0

    # ---- events

    def ask(self, now: int, key: WarmKey) -> int | None:
        self.demands.setdefault(key, Demand(at=now)).ask(now)
        for number, entry in self.entries.items():
            if entry.key == key and entry.stage is Stage.READY:
                del self.entries[number]
                return number
        return None

    def prepared(self, number: int, used_bytes: int) -> None:
        """Mark it ready with its measured memory (0: unknown); no effect on a discarded one."""
        entry = self.entries.get(number)
        if entry is None or entry.stage is not Stage.PREPARING:
            return
        entry.stage = Stage.READY
        if used_bytes:
            entry.bytes_held = used_bytes
        if (demand := self.demands.get(entry.key)) is not None:
            demand.used_bytes, demand.failures = used_bytes, 0

    def failed(self, now: int, number: int) -> None:
        """Back off: 30 s after the first failure, doubled up to 10 minutes."""
        entry = self.entries.pop(number, None)
        demand = self.demands.get(entry.key) if entry is not None else None
        if demand is not None:
            pause = min(LONGEST_PAUSE_US, FIRST_PAUSE_US << min(demand.failures, 10))
            demand.failures += 1
            demand.not_before = now + pause
            demand.used_bytes = 0

    def gone(self, number: int) -> None:
        self.entries.pop(number, None)

    # ---- decisions

    @property
    def bytes_held(self) -> int:
        return sum(entry.bytes_held for entry in self.entries.values())

    def settle(self, now: int, room_bytes: int) -> list[Prepare | Discard]:
        self._forget(now)
        kept, missing = self._choose(now, room_bytes)
        orders: list[Prepare | Discard] = []
        for number, entry in self.entries.items():
            if entry.stage is not Stage.LEAVING and number not in kept:
                entry.stage = Stage.LEAVING
                orders.append(Discard(number))
        preparing = sum(entry.stage is Stage.PREPARING for entry in self.entries.values())
        while missing and preparing < AT_ONCE:
            next_one = missing.popleft()
            # Discarded sandboxes hold their memory until they are gone.
            room_left = room_bytes - self.bytes_held
            if next_one.bytes_held > room_left or len(self.entries) >= MOST_ENTRIES:
                break
            self.last_number += 1
            self.entries[self.last_number] = WarmEntry(next_one.key, next_one.bytes_held)
            orders.append(Prepare(self.last_number, next_one.key, next_one.bytes_held))
            preparing += 1
        return orders

    def _choose(self, now: int, room_bytes: int) -> tuple[set[int], deque[_WarmCandidate]]:
        kept: set[int] = set()
        missing: deque[_WarmCandidate] = deque()
        left = room_bytes
        for one in sorted(self._candidates(now), key=lambda one: -one.weight):
            if one.bytes_held > left or len(kept) + len(missing) >= MOST_ENTRIES:
                continue
            left -= one.bytes_held
            if one.number is not None:
                kept.add(one.number)
            else:
                missing.append(one)
        return kept, missing

    def _candidates(self, now: int) -> list[_WarmCandidate]:
        there: dict[WarmKey, list[int]] = {}
        for number, entry in self.entries.items():
            if entry.stage is not Stage.LEAVING:
                there.setdefault(entry.key, []).append(number)
        found = []
        for key, demand in self.demands.items():
            count = demand.now(now)
            numbers = there.get(key, [])
            numbers.sort(key=lambda number: self.entries[number].stage is not Stage.READY)
            for at in range(demand.wanted(now)):
                weight = count / (at + 1)
                if at < len(numbers):
                    number = numbers[at]
                    held = self.entries[number].bytes_held
                    found.append(_WarmCandidate(weight * KEPT_WEIGHT, key, number, held))
                elif now >= demand.not_before:
                    found.append(_WarmCandidate(weight, key, None, _guess(key, demand)))
        return found

    def _forget(self, now: int) -> None:
        faded = [key for key, demand in self.demands.items() if demand.now(now) < LEAST_DEMAND]
        for key in faded:
            del self.demands[key]
        spare = len(self.demands) - MOST_KEYS
        if spare > 0:
            by_count = sorted(self.demands, key=lambda key: self.demands[key].now(now))
            for key in by_count[:spare]:
                del self.demands[key]


def _guess(key: WarmKey, demand: Demand) -> int:
    known = demand.used_bytes * 5 // 4 if demand.used_bytes else FIRST_GUESS_BYTES
    return min(known, key.limits.memory_bytes)


def room_for_warm(offered_bytes: int, leased_bytes: int, available_bytes: int, held: int) -> int:
    """Half of the idle memory: lent, not leased, not used by other programs."""
    return max(0, min(offered_bytes - leased_bytes, available_bytes + held)) // 2
