"""Parser of the owner's policy file (TOML). Refuses unknown keys and invalid values by name."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from datetime import UTC, time, timedelta, tzinfo
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from gpool.agent.machine.policy import (
    DAYS,
    EVERY_DAY,
    MOST_GANG_PORT,
    AskedTerms,
    AtClose,
    EgressRules,
    GangRules,
    GpuRule,
    Hours,
    KeptResources,
    OwnerPolicy,
    site_address,
    site_name,
)
from gpool.agent.network.policy import parse_rate, parse_target, worth_allowing
from gpool.core.errors import Invalid
from gpool.core.model import Tier
from gpool.core.money.prices import MAX_NOTICE_S, AskedPrices, parse_credits, parse_prices
from gpool.core.specs import fields, gpu

MAX_AUDIENCE = 500
_WHOSE = re.compile(r"me|(?:user|team):[^\s:,]{1,64}")
_SPAN = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def parse(text: str) -> OwnerPolicy:
    """Raise `Invalid` with the wrong key and the allowed values."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise Invalid(f"the policy is not valid TOML: {error}") from error
    top = _Table(content, "")
    keep, battery, idle, egress, gangs, images = (
        top.table(name) for name in ("keep", "battery", "idle", "egress", "gangs", "images")
    )
    floor = top.take("floor", _tier, Tier.NONE)
    tiers = top.take("tiers", _each(_tier), list(Tier))
    longest = top.take("longest_run", _span, None)
    policy = OwnerPolicy(
        audience=top.take("whose", _audience, ()),
        tiers=frozenset(tier for tier in tiers if tier.strength >= floor.strength),
        hours=tuple(_hours(one) for one in top.tables("hours")),
        zone=top.take("zone", _zone, None),
        gpus=tuple(_gpu_rule(one) for one in top.tables("gpu")),
        kept=KeptResources(
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
        egress=EgressRules(
            tuple(egress.take("allow", _each(_allowed), [])),
            tuple(egress.take("deny", _each(_target), [])),
            egress.take("rate", _rate, ""),
            egress.take("offered", _flag, True),
        ),
        gangs=GangRules(
            gangs.take("offered", _flag, True),
            gangs.take("site", _site, ""),
            gangs.take("address", _address, ""),
            gangs.take("port", _port, 0),
        ),
        registries=tuple(images.take("registries", _each(_word), [])),
        labels=top.take("labels", _labels, frozenset()),
        terms=AskedTerms(
            top.take("price", _prices, None),
            top.take("min_charge", _credits, None),
            top.take("free_for", _free_for, None),
            top.take("notice", _notice, None),
        ),
    )
    for table in (top, keep, battery, idle, egress, gangs, images):
        table.finish()
    if not policy.tiers:
        raise Invalid("'tiers' and 'floor' leave no tier; offer at least one")
    return policy


class _Table:
    def __init__(self, content: Mapping[str, Any], name: str) -> None:
        self._content = dict(content)
        self._known: set[str] = set()
        self._name = name

    def take(self, key: str, read: Callable[[Any], Any], default: Any) -> Any:
        self._known.add(key)
        if key not in self._content:
            return default
        value = self._content[key]
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
        for key in sorted(self._content.keys() - self._known):
            known = ", ".join(sorted(self._known))
            raise Invalid(f"policy: unknown key '{self._name}{key}'; known keys: {known}")


def _hours(table: _Table) -> Hours:
    opens, closes = table.take("from", _time, None), table.take("to", _time, None)
    if opens is None or closes is None:
        raise Invalid("policy: hours need 'from' and 'to', like from = \"22:00\"")
    days = table.take("days", _each(_day), None)
    table.finish()
    return Hours(opens, closes, EVERY_DAY if days is None else frozenset(days))


def _gpu_rule(table: _Table) -> GpuRule:
    rule = GpuRule(
        gpus=frozenset(table.take("which", _each(_index), [])),
        hours=tuple(_hours(one) for one in table.tables("hours")),
        idle_for=table.take("idle_after", _span, timedelta(0)),
        programs=frozenset(table.take("programs", _each(_word), [])),
        yields=table.take("yield_to_others", _flag, False),
        most_watts=table.take("most_watts", _number, None),
        most_celsius=table.take("most_celsius", _number, None),
        at_close=table.take("at_close", AtClose, AtClose.RECLAIM),
        grace=table.take("grace", _span, timedelta(0)),
    )
    table.finish()
    return rule


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
    return _accounts(value)


def _free_for(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MAX_AUDIENCE:
        raise ValueError('write a list like ["team:lab", "user:ana"]')
    return _accounts(value)


def _accounts(words: list[Any]) -> tuple[str, ...]:
    for one in words:
        if not isinstance(one, str) or not _WHOSE.fullmatch(one):
            raise ValueError(f'{one!r} names no user; write "me", "team:NAME" or "user:NAME"')
    return tuple(dict.fromkeys(words))


def parse_free_for(text: str) -> tuple[str, ...]:
    """Parse `team:lab,user:ana`; empty: nobody."""
    try:
        return _free_for([word.strip() for word in text.split(",") if word.strip()])
    except ValueError as error:
        raise Invalid(str(error)) from error


def parse_notice(text: str) -> timedelta:
    """Parse `10m` or `0`, the promised time before a rule reclaims running tasks."""
    try:
        return timedelta(0) if text == "0" else _notice(text)
    except ValueError as error:
        raise Invalid(f"the notice {text[:40]!r}: {error}") from error


def _labels(value: Any) -> frozenset[str]:
    try:
        return frozenset(fields.normal_labels(_each(_word)(value)))
    except Invalid as error:
        raise ValueError(error.detail) from error


def _prices(value: Any) -> AskedPrices:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError('write it like "0.31/h" or "0.31/h,H100=2.00/h,gpu0=0/h"')
    try:
        return parse_prices(value)
    except Invalid as error:
        raise ValueError(error.detail) from error


def _credits(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError('write credits, like "0.05"')
    try:
        return parse_credits(value)
    except Invalid as error:
        raise ValueError(error.detail) from error


def _notice(value: Any) -> timedelta:
    notice = _span(value)
    if notice.total_seconds() > MAX_NOTICE_S:
        raise ValueError("promise at most 7d")
    return notice


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
        return gpu.parse_bytes(_word(value))
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


def _site(value: Any) -> str:
    return site_name(_word(value))


def _address(value: Any) -> str:
    return site_address(_word(value))


def _port(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1024 <= value <= MOST_GANG_PORT:
        raise ValueError(f"write a port, 1024 to {MOST_GANG_PORT}: tasks use it and those above")
    return value


def _word(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise TypeError("write a word in quotes")
    return value
