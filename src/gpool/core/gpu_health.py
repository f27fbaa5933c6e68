"""Health of a GPU from its symptoms. Pure; `now` is an argument.

A cause ends after a quiet time without it, so that a card at a threshold does not flap. The worst cause decides:
`degraded` GPUs are still lent; `quarantined` ones take no new task, and running tasks move elsewhere. Here a quarantine
ends with its cause; the server also requires a person to lift it (`store.operations.gpus`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

SECOND_US = 1_000_000
HOT_FOR_US = 60 * SECOND_US
"""A hot card throttles itself; one that stays hot is not cooled."""
COOLER_C = 5
HUNG_AFTER_US = 10 * SECOND_US
"""A killed process ends in milliseconds unless the driver blocks it."""
QUIET_US = 30 * SECOND_US
QUIET_AFTER_XID_US = 600 * SECOND_US
OVER_LIMIT = 1.2  # ratio of power draw to limit that means the limit has failed

TASKS_OWN = frozenset({13, 31, 43, 45, 68, 69})
"""XIDs caused by a task's own program: a bad address, a channel torn down with its process."""
DEADLY = {
    46: "the GPU stopped processing",
    48: "an uncorrectable memory error",
    61: "its microcontroller halted",
    62: "its microcontroller halted",
    64: "a bad memory row could not be replaced",
    74: "an NVLink error",
    79: "it fell off the bus",
    95: "an uncontained memory error",
    109: "a context switch timed out",
    119: "its firmware does not answer",
    120: "its firmware failed",
    136: "a link could not be trained",
    140: "an unrecovered memory error",
    143: "it could not be initialised",
}


class Health(StrEnum):
    HEALTHY = "healthy"
    DEGRADED = "degraded"
    QUARANTINED = "quarantined"

    @property
    def weight(self) -> int:
        return _WEIGHT[self]


_WEIGHT = {Health.HEALTHY: 0, Health.DEGRADED: 1, Health.QUARANTINED: 2}


@dataclass(frozen=True, slots=True)
class Symptoms:
    """One reading of a GPU. None: not reported."""

    temperature_c: int | None = None
    slowdown_c: int | None = None
    shutdown_c: int | None = None
    power_mw: int | None = None
    power_limit_mw: int | None = None
    throttled: frozenset[str] = frozenset()
    ecc_uncorrected: int | None = None
    remap_pending: bool = False
    remap_failed: bool = False
    xids: tuple[int, ...] = ()  # since the previous reading
    hung_us: int = 0  # age of a killed task's remaining process
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Cause:
    name: str
    health: Health
    text: str
    since: int
    seen_at: int
    quiet_us: int = QUIET_US


@dataclass(frozen=True, slots=True)
class Condition:
    causes: tuple[Cause, ...] = ()

    @property
    def health(self) -> Health:
        return self.causes[0].health if self.causes else Health.HEALTHY

    @property
    def reason(self) -> str:
        return "; ".join(cause.text for cause in self.causes)


@dataclass(frozen=True, slots=True)
class _Seen:
    name: str
    health: Health
    text: str
    quiet_us: int = QUIET_US


def examine(symptoms: Symptoms, before: Condition, now: int) -> Condition:
    known = {cause.name: cause for cause in before.causes}
    found: dict[str, Cause] = {}
    for seen in _seen(symptoms, known, now):
        older = known.get(seen.name)
        since = older.since if older is not None else now
        found[seen.name] = Cause(seen.name, seen.health, seen.text, since, now, seen.quiet_us)
    for name, cause in known.items():
        if name not in found and now < cause.seen_at + cause.quiet_us:
            found[name] = cause
    order = sorted(
        found.values(), key=lambda cause: (-cause.health.weight, cause.since, cause.name)
    )
    return Condition(tuple(order))


def _seen(s: Symptoms, known: dict[str, Cause], now: int) -> Iterator[_Seen]:
    if s.lost:
        yield _Seen("lost", Health.QUARANTINED, "it fell off the bus: it does not answer")
    if s.remap_failed:
        yield _Seen(
            "remap", Health.QUARANTINED, "bad memory rows cannot be replaced any more: replace it"
        )
    elif s.remap_pending:
        yield _Seen("remap", Health.DEGRADED, "bad memory rows are replaced at its next reset")
    if s.ecc_uncorrected:
        text = (
            f"{s.ecc_uncorrected} uncorrectable memory errors since the driver was loaded: reset it"
        )
        yield _Seen("ecc", Health.QUARANTINED, text)
    if s.hung_us >= HUNG_AFTER_US:
        text = f"a killed task's process has not ended for {s.hung_us // SECOND_US} s: reset it"
        yield _Seen("hung", Health.QUARANTINED, text)
    yield from _xids(s.xids)
    yield from _heat(s, known, now)
    yield from _power(s)


def _xids(codes: tuple[int, ...]) -> Iterator[_Seen]:
    for code in sorted(set(codes) - TASKS_OWN):
        why = DEADLY.get(code)
        health = Health.DEGRADED if why is None else Health.QUARANTINED
        text = f"XID {code}: {why or 'an error of the driver'}"
        yield _Seen(f"xid{code}", health, text, QUIET_AFTER_XID_US)


def _heat(s: Symptoms, known: dict[str, Cause], now: int) -> Iterator[_Seen]:
    heat, slowdown = s.temperature_c, s.slowdown_c
    if heat is None:
        return
    if s.shutdown_c is not None and heat >= s.shutdown_c:
        yield _Seen("hot", Health.QUARANTINED, f"{heat} °C: about to switch itself off")
        return
    hot = known.get("hot")
    if slowdown is None or heat < (slowdown if hot is None else slowdown - COOLER_C):
        return
    lasting = hot is not None and now >= hot.since + HOT_FOR_US
    health = Health.QUARANTINED if lasting else Health.DEGRADED
    yield _Seen("hot", health, f"{heat} °C, above the {slowdown} °C at which it slows down")


def _power(s: Symptoms) -> Iterator[_Seen]:
    if "thermal" in s.throttled:
        yield _Seen("throttled", Health.DEGRADED, "it is slowed down by heat")
    if "brake" in s.throttled:
        yield _Seen("brake", Health.DEGRADED, "the machine's power supply slows it down")
    power, limit = s.power_mw, s.power_limit_mw
    if power is not None and limit and power > OVER_LIMIT * limit:
        text = f"it draws {power / 1000:.0f} W, above its limit of {limit / 1000:.0f} W"
        yield _Seen("power", Health.DEGRADED, text)
