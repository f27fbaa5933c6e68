"""The owner's rules, pure: facts about the machine in, what it lends now out. It looks at nothing itself.

A rule that needs a fact nobody knows (no battery, no keyboard) does not apply. See docs/guides for the file's form.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, time, timedelta, tzinfo
from enum import StrEnum
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from gpool.agent.network.policy import parse_rate, parse_target, worth_allowing
from gpool.core import gpuspec
from gpool.core.errors import Invalid
from gpool.core.model import Network, Offer, Tier

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
EVERY_DAY = frozenset(range(7))
MAX_AUDIENCE = 500
_WHOSE = re.compile(r"me|(?:user|team):[^\s:,]{1,64}")
_SPAN = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class AtClose(StrEnum):
    """What becomes of what runs when a rule closes the machine."""

    FINISH = "finish"
    RECLAIM = "reclaim"


@dataclass(frozen=True, slots=True)
class Hours:
    """From `opens` until `closes` by the wall's clock, on `days` (by the day on which it opens; 0 is Monday)."""

    opens: time
    closes: time
    days: frozenset[int] = EVERY_DAY

    def cover(self, now: datetime) -> bool:
        at = now.time()
        if self.opens < self.closes:
            return now.weekday() in self.days and self.opens <= at < self.closes
        yesterday = (now.weekday() - 1) % 7  # across midnight; equal times are a whole day
        return (now.weekday() in self.days and at >= self.opens) or (
            yesterday in self.days and at < self.closes
        )

    def __str__(self) -> str:
        named = (
            "" if self.days == EVERY_DAY else " " + ",".join(DAYS[day] for day in sorted(self.days))
        )
        return f"{self.opens:%H:%M}-{self.closes:%H:%M}{named}"


@dataclass(frozen=True, slots=True)
class Kept:
    """What the owner keeps back."""

    cpu_milli: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    gpus: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Egress:
    """For tasks that ask for a network; the words are those of whoever opens lanes."""

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    rate: str = ""
    offered: bool = True


@dataclass(frozen=True, slots=True)
class Policy:
    """Without a word of the owner: everything, always, for anyone."""

    audience: tuple[str, ...] = ()
    tiers: frozenset[Tier] = frozenset(Tier)
    hours: tuple[Hours, ...] = ()  # none: always
    zone: tzinfo | None = None  # None: the machine's own
    kept: Kept = Kept()
    least_battery_percent: float = 0.0
    on_mains_only: bool = False
    idle_for: timedelta = timedelta(0)  # since somebody touched keyboard, mouse or terminal
    most_load: float | None = None  # processors that others keep busy
    longest_run: timedelta | None = None
    at_close: AtClose = AtClose.FINISH
    grace: timedelta = timedelta(0)  # between closing and reclaiming
    egress: Egress = Egress()
    registries: tuple[str, ...] = ()  # of images, on private addresses


@dataclass(frozen=True, slots=True)
class Facts:
    """The machine as it is. None: nobody knows."""

    now: datetime  # with its time zone
    battery_percent: float | None = None
    on_mains: bool | None = None
    idle_s: float | None = None
    load_of_others: float | None = None


@dataclass(frozen=True, slots=True)
class Standing:
    """What has to be remembered between two looks."""

    closed_at: datetime | None = None
    reclaimed: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    closed: str = ""  # why nothing new is taken
    reclaims: bool = False  # what runs is to go now


def reason_to_close(policy: Policy, facts: Facts) -> str:
    """The first rule that speaks against lending just now, in the consumer's words; or nothing."""
    now = facts.now.astimezone(policy.zone)
    if policy.hours and not any(one.cover(now) for one in policy.hours):
        return f"outside its owner's hours: {'; '.join(map(str, policy.hours))}"
    if policy.on_mains_only and facts.on_mains is False:
        return "it runs on battery"
    battery = facts.battery_percent
    if (
        battery is not None
        and facts.on_mains is not True
        and battery < policy.least_battery_percent
    ):
        return f"its battery is at {battery:g} %, below {policy.least_battery_percent:g} %"
    if facts.idle_s is not None and facts.idle_s < policy.idle_for.total_seconds():
        return "its owner is using it"
    load, most = facts.load_of_others, policy.most_load
    if load is not None and most is not None and load > most:
        return "its owner's programs keep it busy"
    return ""


def decide(policy: Policy, facts: Facts, before: Standing) -> tuple[Decision, Standing]:
    """What is so now, and what to remember. Reclaims once, the grace after closing; open again, all is forgotten."""
    closed = reason_to_close(policy, facts)
    if not closed:
        return Decision(), Standing()
    since = before.closed_at or facts.now
    due = policy.at_close is AtClose.RECLAIM and facts.now >= since + policy.grace
    reclaims = due and not before.reclaimed
    return Decision(closed, reclaims), Standing(since, before.reclaimed or reclaims)


def shaped(policy: Policy, offer: Offer, decision: Decision = Decision()) -> Offer:  # noqa: B008 - frozen
    """The offer with the owner's share taken out and the rules put in."""
    kept = policy.kept
    return replace(
        offer,
        cpu_milli=max(0, offer.cpu_milli - kept.cpu_milli),
        memory_bytes=max(0, offer.memory_bytes - kept.memory_bytes),
        disk_bytes=max(0, offer.disk_bytes - kept.disk_bytes),
        gpus=tuple(gpu for gpu in offer.gpus if gpu.index not in kept.gpus),
        tiers=offer.tiers & policy.tiers,
        runtimes=tuple(one for one in offer.runtimes if one.tier in policy.tiers),
        networks=offer.networks if policy.egress.offered else offer.networks & {Network.NONE},
        audience=policy.audience,
        closed=decision.closed,
    )


# ---- the file


def parse(text: str) -> Policy:
    """The owner's file, TOML; `Invalid` names the key that is wrong and what it may be."""
    try:
        told = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise Invalid(f"the policy is no TOML: {error}") from error
    top = _Table(told, "")
    keep, battery, idle, egress, images = (
        top.table(name) for name in ("keep", "battery", "idle", "egress", "images")
    )
    floor = top.take("floor", _tier, Tier.NONE)
    tiers = top.take("tiers", _each(_tier), list(Tier))
    longest = top.take("longest_run", _span, None)
    policy = Policy(
        audience=top.take("whose", _audience, ()),
        tiers=frozenset(tier for tier in tiers if tier.strength >= floor.strength),
        hours=tuple(_hours(one) for one in top.tables("hours")),
        zone=top.take("zone", _zone, None),
        kept=Kept(
            int(keep.take("cpus", _number, 0.0) * 1000),
            keep.take("memory", _size, 0),
            keep.take("disk", _size, 0),
            frozenset(keep.take("gpus", _each(_index), [])),
        ),
        least_battery_percent=battery.take("least_percent", _percent, 0.0),
        on_mains_only=battery.take("mains_only", _flag, False),
        idle_for=idle.take("after", _span, timedelta(0)),
        most_load=idle.take("most_load", _number, None),
        longest_run=longest,
        at_close=top.take("at_close", AtClose, AtClose.FINISH),
        grace=top.take("grace", _span, timedelta(0)),
        egress=Egress(
            tuple(egress.take("allow", _each(_allowed), [])),
            tuple(egress.take("deny", _each(_target), [])),
            egress.take("rate", _rate, ""),
            egress.take("offered", _flag, True),
        ),
        registries=tuple(images.take("registries", _each(_word), [])),
    )
    for table in (top, keep, battery, idle, egress, images):
        table.finish()
    if not policy.tiers:
        raise Invalid("'tiers' and 'floor' leave no tier; offer at least one")
    return policy


class _Table:
    """One table of the file; what was not asked for is a mistake of the owner's, and is named."""

    def __init__(self, told: Mapping[str, Any], name: str) -> None:
        self._told = dict(told)
        self._known: set[str] = set()
        self._name = name

    def take(self, key: str, read: Callable[[Any], Any], default: Any) -> Any:
        self._known.add(key)
        if key not in self._told:
            return default
        value = self._told[key]
        try:
            return read(value)
        except (ValueError, TypeError, KeyError) as error:
            raise Invalid(f"policy: '{self._name}{key}' cannot be {value!r}: {error}") from error

    def table(self, key: str) -> _Table:
        return _Table(self.take(key, _mapping, {}), f"{self._name}{key}.")

    def tables(self, key: str) -> list[_Table]:
        found = self.take(key, _each(_mapping), [])
        return [_Table(one, f"{key}[{at}].") for at, one in enumerate(found)]

    def finish(self) -> None:
        for key in sorted(self._told.keys() - self._known):
            known = ", ".join(sorted(self._known))
            raise Invalid(f"policy: there is no '{self._name}{key}'; there are {known}")


def _hours(table: _Table) -> Hours:
    opens, closes = table.take("from", _time, None), table.take("to", _time, None)
    if opens is None or closes is None:
        raise Invalid("policy: hours need 'from' and 'to', like from = \"22:00\"")
    days = table.take("days", _each(_day), None)
    table.finish()
    return Hours(opens, closes, EVERY_DAY if days is None else frozenset(days))


def _each(read: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    def read_all(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise TypeError("write a list")
        return [read(one) for one in value]

    return read_all


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("write a table")
    return value


def _audience(value: Any) -> tuple[str, ...]:
    if value == "anyone":
        return ()
    if not isinstance(value, list) or not value or len(value) > MAX_AUDIENCE:
        raise ValueError('write "anyone", or a list like ["me", "team:lab", "user:ana"]')
    for one in value:
        if not isinstance(one, str) or not _WHOSE.fullmatch(one):
            raise ValueError(f'{one!r} is nobody; write "me", "team:NAME" or "user:NAME"')
    return tuple(dict.fromkeys(value))


def _tier(value: Any) -> Tier:
    return Tier(value)


def _time(value: Any) -> time:
    if isinstance(value, time):
        return value
    if value == "24:00":
        return time(0)
    return time.fromisoformat(value)


def _day(value: Any) -> int:
    if value not in DAYS:
        raise ValueError(f"days are {', '.join(DAYS)}")
    return DAYS.index(value)


def _zone(value: Any) -> tzinfo:
    if value == "UTC":
        return UTC
    try:
        return ZoneInfo(value)
    except (ZoneInfoNotFoundError, OSError) as error:
        raise ValueError("no such time zone; write it like Europe/Berlin") from error


def _span(value: Any) -> timedelta:
    found = _SPAN.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError("write it like 30s, 10m, 2h or 1d")
    return timedelta(seconds=float(found[1]) * _SECONDS[found[2]])


def _size(value: Any) -> int:
    try:
        return gpuspec.parse_bytes(_word(value))
    except Invalid as error:
        raise ValueError(error.detail) from error


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise TypeError("write a number that is not negative")
    return float(value)


def _percent(value: Any) -> float:
    number = _number(value)
    if number > 100:
        raise ValueError("write 0 to 100")
    return number


def _index(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError("GPUs are named by their index, 0, 1, …")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("write true or false")
    return value


def _target(value: Any) -> str:
    parse_target(_word(value))
    return str(value)


def _allowed(value: Any) -> str:
    worth_allowing(parse_target(_word(value)))
    return str(value)


def _rate(value: Any) -> str:
    parse_rate(_word(value))
    return str(value)


def _word(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise TypeError("write a word in quotes")
    return value
