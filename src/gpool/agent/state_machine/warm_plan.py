"""Which warm sandboxes a node keeps, pure: demand and room come in, orders to prepare or discard go out.

A warm sandbox has imported the modules of one key and is nobody's. It is handed out once, to one user's work, and is
then no longer the pool's. How many are kept follows the demand seen for each key, which halves every two minutes, and
the room there is: memory that nobody leased. Every sandbox that could be kept is a *unit* with a strength; the
strongest that fit are kept, the others are not, whatever made the difference: expiry, pressure, another key.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from gpool.agent.runtime.protocol import SandboxLimits
from gpool.core.model import GIB, Recipe, Slice

HALF_LIFE_US = 120 * 1_000_000
REFILL_S = 5.0  # about how long it takes to prepare one
FAINT = 0.12  # below this nobody asks for it any more: six minutes after a single question
MOST_ENTRIES = 8
MOST_A_KEY = 4
MOST_KEYS = 256
AT_ONCE = 1  # prepared at the same time: the processors are for tasks
FIRST_GUESS_BYTES = GIB
KEPT_IS_WORTH = 2.0  # against throwing one away for an equal
FIRST_PAUSE_US = 30 * 1_000_000
LONGEST_PAUSE_US = 600 * 1_000_000


@dataclass(frozen=True, slots=True)
class WarmKey:
    """What a sandbox is prepared for: work with an equal key finds everything as if started for it."""

    runtime: str
    environment: tuple[str, Recipe | None] | None  # None: the agent's own Python
    python: str
    preload: tuple[str, ...]
    slices: tuple[Slice, ...]  # the device nodes it has; a context on them it has not
    limits: SandboxLimits


@dataclass(frozen=True, slots=True)
class Prepare:
    number: int  # never used again
    key: WarmKey
    most_bytes: int  # it may use until it is assigned


@dataclass(frozen=True, slots=True)
class Discard:
    """End it; `gone` follows."""

    number: int


class Stage(Enum):
    PREPARING = "preparing"
    READY = "ready"
    LEAVING = "leaving"


@dataclass(slots=True)
class Entry:
    key: WarmKey
    bytes_held: int  # at most; once it is ready, as measured
    stage: Stage = Stage.PREPARING


@dataclass(slots=True)
class Demand:
    """How much one key is asked for: a count that fades."""

    count: float = 0.0
    at: int = 0
    used_bytes: int = 0  # by the last one that got ready
    failures: int = 0
    not_before: int = 0

    def now(self, now: int) -> float:
        return float(self.count * 0.5 ** ((now - self.at) / HALF_LIFE_US))

    def ask(self, now: int) -> None:
        self.count, self.at = self.now(now) + 1, now

    def wanted(self, now: int) -> int:
        """Enough for those who come while the next one is prepared."""
        count = self.now(now)
        if count < FAINT:
            return 0
        a_second = count * math.log(2) / (HALF_LIFE_US / 1_000_000)
        return min(MOST_A_KEY, max(1, math.ceil(a_second * REFILL_S)))


@dataclass(frozen=True, slots=True)
class _Unit:
    strength: float
    key: WarmKey
    number: int | None  # of the entry that is there already
    bytes_held: int


@dataclass(slots=True)
class WarmPool:
    entries: dict[int, Entry] = field(default_factory=dict)
    demands: dict[WarmKey, Demand] = field(default_factory=dict)
    last_number: int = 0

    # ---- what happens

    def ask(self, now: int, key: WarmKey) -> int | None:
        """Work with this key starts: the number of the sandbox it gets, which leaves the pool, or None."""
        self.demands.setdefault(key, Demand(at=now)).ask(now)
        for number, entry in self.entries.items():
            if entry.key == key and entry.stage is Stage.READY:
                del self.entries[number]
                return number
        return None

    def prepared(self, number: int, used_bytes: int) -> None:
        """It is ready and holds so much; 0: nobody counts. Nothing changes for one that is to be ended."""
        entry = self.entries.get(number)
        if entry is None or entry.stage is not Stage.PREPARING:
            return
        entry.stage = Stage.READY
        if used_bytes:
            entry.bytes_held = used_bytes
        if (demand := self.demands.get(entry.key)) is not None:
            demand.used_bytes, demand.failures = used_bytes, 0

    def failed(self, now: int, number: int) -> None:
        """It could not be prepared: not again for a while."""
        entry = self.entries.pop(number, None)
        demand = self.demands.get(entry.key) if entry is not None else None
        if demand is not None:
            pause = min(LONGEST_PAUSE_US, FIRST_PAUSE_US << min(demand.failures, 10))
            demand.failures += 1
            demand.not_before = now + pause
            demand.used_bytes = 0

    def gone(self, number: int) -> None:
        self.entries.pop(number, None)

    # ---- what to do

    @property
    def bytes_held(self) -> int:
        return sum(entry.bytes_held for entry in self.entries.values())

    def settle(self, now: int, room_bytes: int) -> list[Prepare | Discard]:
        """Bring what is kept to what is wanted and has room."""
        self._forget(now)
        kept, missing = self._choose(now, room_bytes)
        orders: list[Prepare | Discard] = []
        for number, entry in self.entries.items():
            if entry.stage is not Stage.LEAVING and number not in kept:
                entry.stage = Stage.LEAVING
                orders.append(Discard(number))
        preparing = sum(entry.stage is Stage.PREPARING for entry in self.entries.values())
        while missing and preparing < AT_ONCE:
            unit = missing.popleft()
            room_left = room_bytes - self.bytes_held  # what leaves still holds its memory
            if unit.bytes_held > room_left or len(self.entries) >= MOST_ENTRIES:
                break
            self.last_number += 1
            self.entries[self.last_number] = Entry(unit.key, unit.bytes_held)
            orders.append(Prepare(self.last_number, unit.key, unit.bytes_held))
            preparing += 1
        return orders

    def _choose(self, now: int, room_bytes: int) -> tuple[set[int], deque[_Unit]]:
        """The strongest units that fit together: those there are, by number, and those to prepare."""
        kept: set[int] = set()
        missing: deque[_Unit] = deque()
        left = room_bytes
        for unit in sorted(self._units(now), key=lambda unit: -unit.strength):
            if unit.bytes_held > left or len(kept) + len(missing) >= MOST_ENTRIES:
                continue
            left -= unit.bytes_held
            if unit.number is not None:
                kept.add(unit.number)
            else:
                missing.append(unit)
        return kept, missing

    def _units(self, now: int) -> list[_Unit]:
        there: dict[WarmKey, list[int]] = {}
        for number, entry in self.entries.items():
            if entry.stage is not Stage.LEAVING:
                there.setdefault(entry.key, []).append(number)
        units = []
        for key, demand in self.demands.items():
            count = demand.now(now)
            numbers = there.get(key, [])
            numbers.sort(key=lambda number: self.entries[number].stage is not Stage.READY)
            for at in range(demand.wanted(now)):
                strength = count / (at + 1)
                if at < len(numbers):
                    number = numbers[at]
                    held = self.entries[number].bytes_held
                    units.append(_Unit(strength * KEPT_IS_WORTH, key, number, held))
                elif now >= demand.not_before:
                    units.append(_Unit(strength, key, None, _guess(key, demand)))
        return units

    def _forget(self, now: int) -> None:
        """Keys that nobody asks for; and the faintest when there are too many."""
        faint = [key for key, demand in self.demands.items() if demand.now(now) < FAINT]
        for key in faint:
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
    """Half of what is idle: neither leased nor kept back by the owner, nor used by anything else on the machine."""
    return max(0, min(offered_bytes - leased_bytes, available_bytes + held)) // 2
