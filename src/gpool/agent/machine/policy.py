"""The owner's policy: facts about the machine in, the part that is lent now out. Pure.

A rule about an unknown fact (no battery, no keyboard) does not apply. Format: docs/policy.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, time, timedelta, tzinfo
from enum import StrEnum
from ipaddress import IPv4Address

from gpool.core.model import Gpu, Network, Offer, Tier
from gpool.core.money.prices import AskedPrices

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
EVERY_DAY = frozenset(range(7))
_SITE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
COOLER_C, CALMER = 5.0, 0.9
"""A GPU closed for heat or power opens again well below its limit ..."""
CLOSED_AT_LEAST = timedelta(seconds=60)
"""... and not at once, or the next task would heat it again."""


class AtClose(StrEnum):
    FINISH = "finish"
    RECLAIM = "reclaim"


@dataclass(frozen=True, slots=True)
class Hours:
    """Local time from `opens` to `closes` on `days` (of opening; 0 is Monday)."""

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
class KeptResources:
    cpu_milli: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    gpus: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class EgressRules:
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    rate: str = ""
    offered: bool = True


GANG_PORT = 47_100
"""UDP port; the gang member with allocation number n listens at this + n."""
MOST_GANG_PORT = 60_000


@dataclass(frozen=True, slots=True)
class GangRules:
    offered: bool = True
    site: str = ""  # empty: no gangs
    address: str = ""  # for the other nodes of the site
    port: int = 0


def site_name(text: str) -> str:
    if text and not _SITE.fullmatch(text):
        raise ValueError("a site is a word of up to 63 letters, digits and . _ -")
    return text


def site_address(text: str) -> str:
    if text:
        found = IPv4Address(text)
        if found.is_multicast or found.is_unspecified or found.is_reserved:
            raise ValueError(f"{text} is not the address of one machine")
    return text


@dataclass(frozen=True, slots=True)
class GpuRule:
    """An unset condition never closes a GPU."""

    gpus: frozenset[int] = frozenset()  # empty: all
    hours: tuple[Hours, ...] = ()  # in which they are lent; empty: always
    idle_for: timedelta = timedelta(0)
    programs: frozenset[str] = frozenset()  # closed while one of these runs
    yields: bool = False  # closed while a foreign program uses the GPU
    most_watts: float | None = None
    most_celsius: float | None = None
    at_close: AtClose = AtClose.RECLAIM
    grace: timedelta = timedelta(0)  # between closing and reclaiming

    def covers(self, gpu: int) -> bool:
        return not self.gpus or gpu in self.gpus


@dataclass(frozen=True, slots=True)
class AskedTerms:
    """Prices and conditions of lending. None: not set."""

    prices: AskedPrices | None = None
    min_charge_microcredits: int | None = None
    free_for: tuple[str, ...] | None = None  # "user:NAME", "team:NAME"
    notice: timedelta | None = None  # promised before a rule reclaims running tasks

    def over(self, other: AskedTerms) -> AskedTerms:
        """These terms, completed by those of `other` where they are not set: 0 is set."""
        return AskedTerms(
            other.prices if self.prices is None else self.prices,
            other.min_charge_microcredits
            if self.min_charge_microcredits is None
            else self.min_charge_microcredits,
            other.free_for if self.free_for is None else self.free_for,
            other.notice if self.notice is None else self.notice,
        )


@dataclass(frozen=True, slots=True)
class OwnerPolicy:
    audience: tuple[str, ...] = ()  # allowed users; empty: anyone
    tiers: frozenset[Tier] = frozenset(Tier)
    hours: tuple[Hours, ...] = ()  # empty: always
    zone: tzinfo | None = None  # None: the machine's own
    kept: KeptResources = KeptResources()
    least_battery_percent: float = 0.0
    on_mains_only: bool = False
    idle_for: timedelta = timedelta(0)  # since the last input at keyboard, mouse or terminal
    most_load: float | None = None  # processors that other programs keep busy
    longest_run: timedelta | None = None
    at_close: AtClose = AtClose.FINISH
    grace: timedelta = timedelta(0)  # between closing and reclaiming
    egress: EgressRules = EgressRules()
    gangs: GangRules = GangRules()
    registries: tuple[str, ...] = ()  # of images, on private addresses
    labels: frozenset[str] = frozenset()  # that tasks can ask for
    terms: AskedTerms = AskedTerms()
    gpus: tuple[GpuRule, ...] = ()

    def grace_of(self, grace: timedelta) -> timedelta:
        """Time between closing and reclaiming: never less than the promised notice."""
        return max(grace, self.terms.notice or timedelta(0))


@dataclass(frozen=True, slots=True)
class GpuFacts:
    strangers: tuple[str, ...] = ()  # foreign programs that use it
    power_mw: int | None = None
    temperature_c: int | None = None


NOTHING = GpuFacts()


@dataclass(frozen=True, slots=True)
class MachineFacts:
    now: datetime  # with its time zone
    battery_percent: float | None = None
    on_mains: bool | None = None
    idle_s: float | None = None
    load_of_others: float | None = None
    programs: frozenset[str] = frozenset()  # running foreign programs
    gpus: Mapping[int, GpuFacts] = field(default_factory=dict)
    paused: bool = False  # by `gpool node pause` on this machine, without an account


@dataclass(frozen=True, slots=True)
class ClosureState:
    closed_at: datetime | None = None
    reclaimed: bool = False
    capped: str = ""  # text of the closure if it is for heat or power


@dataclass(frozen=True, slots=True)
class LendingDecision:
    closed: str = ""  # why nothing new is accepted; empty: open
    reclaims: bool = False  # running tasks are to be preempted now


def reason_to_close(policy: OwnerPolicy, facts: MachineFacts) -> str:
    if facts.paused:
        return "paused on the machine itself; gpool node resume there ends it"
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


def decide(
    policy: OwnerPolicy, facts: MachineFacts, before: ClosureState
) -> tuple[LendingDecision, ClosureState]:
    """Reclaims once per closure, after the grace."""
    closed = reason_to_close(policy, facts)
    grace = policy.grace_of(policy.grace)
    return _close(closed, policy.at_close, grace, facts.now, before)


def _close(
    closed: str, at_close: AtClose, grace: timedelta, now: datetime, before: ClosureState
) -> tuple[LendingDecision, ClosureState]:
    if not closed:
        return LendingDecision(), ClosureState()
    since = before.closed_at or now
    due = at_close is AtClose.RECLAIM and now >= since + grace
    reclaims = due and not before.reclaimed
    return LendingDecision(closed, reclaims), ClosureState(since, before.reclaimed or reclaims)


def decide_gpu(
    policy: OwnerPolicy, gpu: int, facts: MachineFacts, before: ClosureState
) -> tuple[LendingDecision, ClosureState]:
    for rule in policy.gpus:
        if not rule.covers(gpu):
            continue
        wanted = _why_wanted(policy, rule, gpu, facts)
        capped = "" if wanted else _over_a_cap(rule, gpu, facts, before)
        if wanted or capped:
            grace = rule.grace if capped else policy.grace_of(rule.grace)  # heat does not wait
            decision, closure = _close(wanted or capped, rule.at_close, grace, facts.now, before)
            return decision, replace(closure, capped=capped)
    return LendingDecision(), ClosureState()


def _why_wanted(policy: OwnerPolicy, rule: GpuRule, gpu: int, facts: MachineFacts) -> str:
    now = facts.now.astimezone(policy.zone)
    if rule.hours and not any(one.cover(now) for one in rule.hours):
        return f"outside its owner's hours: {'; '.join(map(str, rule.hours))}"
    if facts.idle_s is not None and facts.idle_s < rule.idle_for.total_seconds():
        return "its owner is using the machine"
    if rule.programs & facts.programs:
        return "its owner runs a program that needs it"
    if rule.yields and facts.gpus.get(gpu, NOTHING).strangers:
        return "a program of its owner's uses it"
    return ""


def _over_a_cap(rule: GpuRule, gpu: int, facts: MachineFacts, before: ClosureState) -> str:
    seen = facts.gpus.get(gpu, NOTHING)
    leeway_c, part = (COOLER_C, CALMER) if before.capped else (0.0, 1.0)
    heat, celsius = seen.temperature_c, rule.most_celsius
    if heat is not None and celsius is not None and heat > celsius - leeway_c:
        return f"hotter than the {celsius:g} °C its owner allows"
    power, watts = seen.power_mw, rule.most_watts
    if power is not None and watts is not None and power > 1000 * watts * part:
        return f"it draws more than the {watts:g} W its owner allows"
    since = before.closed_at
    waits = since is not None and facts.now < since + CLOSED_AT_LEAST
    return before.capped if waits else ""


def apply_policy(
    policy: OwnerPolicy,
    offer: Offer,
    decision: LendingDecision = LendingDecision(),  # noqa: B008 - frozen
    gpus: Mapping[int, LendingDecision] | None = None,
) -> Offer:
    decisions, terms = gpus or {}, policy.terms
    prices = terms.prices or AskedPrices()
    kept, tiers = policy.kept, offer.tiers & policy.tiers
    site = offer.site or policy.gangs.site
    joins = policy.gangs.offered and bool(site and offer.gang_port)
    return replace(
        offer,
        cpu_milli=max(0, offer.cpu_milli - kept.cpu_milli),
        memory_bytes=max(0, offer.memory_bytes - kept.memory_bytes),
        disk_bytes=max(0, offer.disk_bytes - kept.disk_bytes),
        gpus=tuple(
            _priced(_closed(g, decisions.get(g.index), tiers), prices)
            for g in offer.gpus
            if g.index not in kept.gpus
        ),
        tiers=tiers,
        runtimes=tuple(one for one in offer.runtimes if one.tier in policy.tiers),
        networks=offer.networks if policy.egress.offered else offer.networks & {Network.NONE},
        site=site if joins else "",
        address=offer.address if joins else "",
        gang_port=offer.gang_port if joins else 0,
        gang_links=offer.gang_links if joins else frozenset(),
        audience=policy.audience,
        closed=decision.closed,
        labels=offer.labels | policy.labels,
        price_microcredits=prices.usual,
        min_charge_microcredits=terms.min_charge_microcredits or 0,
        free_for=terms.free_for or (),
        notice_s=int((terms.notice or timedelta(0)).total_seconds()),
    )


def _priced(gpu: Gpu, prices: AskedPrices) -> Gpu:
    price = prices.of_gpu(gpu)
    return gpu if price is None else replace(gpu, price_microcredits=price)


def _closed(gpu: Gpu, decision: LendingDecision | None, tiers: frozenset[Tier]) -> Gpu:
    """`tiers`: those lent; a GPU serves guests (tier vm) or all other sandboxes."""
    why = decision.closed if decision is not None else ""
    if not why and not any(gpu.guest == (tier is Tier.VM) for tier in tiers):
        why = (
            "it serves the tier 'vm', which the policy does not lend"
            if gpu.guest
            else "the policy lends the tier 'vm' only, and this GPU is not dedicated to guests"
        )
    return replace(gpu, closed=why) if why and not gpu.closed else gpu
