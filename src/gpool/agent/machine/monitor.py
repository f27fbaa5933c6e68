"""Looks at the machine and at the owner's rules, and says what that means as events for the session."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

import structlog

from gpool.agent.machine.detection.processes import Programs
from gpool.agent.machine.gpu_monitor import WELL, Sighting, Watch, marked
from gpool.agent.machine.policy import (
    AtClose,
    Decision,
    Facts,
    GpuFacts,
    Policy,
    Standing,
    decide,
    decide_gpu,
    shaped,
)
from gpool.agent.machine.policy_file import parse
from gpool.agent.running.sandboxes import Allowed
from gpool.agent.state_machine.instructions import (
    Event,
    OfferDetected,
    ReadingsTaken,
    ReclaimAsked,
    RunsLimited,
)
from gpool.core.errors import Invalid
from gpool.core.model import Gpu, Health, Offer
from gpool.wire.frames import GpuReading

log = structlog.get_logger(__name__)


class Rulebook:
    """The owner's file. Read again when it changed; a mistake in it leaves the rules as they were.

    Lanes are opened by the lists that were there at the start: others withdraw egress until the agent is started again.
    """

    def __init__(self, path: Path | None) -> None:
        """`Invalid` for a file that cannot be read or understood: an owner who wrote rules means them."""
        self._path = path
        self._seen = self._stamp()
        self.policy = Policy() if path is None else parse(_text(path))
        self._lists = replace(self.policy.egress, offered=True)

    def refresh(self) -> bool:
        """Whether there are new rules."""
        stamp = self._stamp()
        if self._path is None or stamp == self._seen:
            return False
        self._seen = stamp
        try:
            policy = parse(_text(self._path))
        except Invalid as error:
            log.warning("policy_not_changed", file=str(self._path), error=error.detail)
            return False
        if replace(policy.egress, offered=True) != self._lists:
            log.warning("egress_withdrawn", why="its lists changed: start the agent again")
            policy = replace(policy, egress=replace(policy.egress, offered=False))
        changed, self.policy = policy != self.policy, policy
        return changed

    def allowed(self) -> Allowed:
        """What may be given just now; for leases that were granted by older rules."""
        return Allowed(self.policy.tiers, self.policy.egress.offered, self.policy.gangs.offered)

    def has_changed(self) -> bool:
        """Whether `refresh` has something to read."""
        return self._path is not None and self._stamp() != self._seen

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            facts = self._path.stat() if self._path is not None else None
        except OSError:
            return None
        return None if facts is None else (facts.st_mtime_ns, facts.st_size, facts.st_ino)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(f"the policy in {path} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class Glimpse:
    """What changes from second to second."""

    now: datetime
    programs: frozenset[str] = frozenset()
    sightings: tuple[Sighting, ...] = ()
    changed: bool = False  # a card came, went or was reconfigured


@dataclass(slots=True)
class Lookout:
    """`offer` is what the machine has, `facts` how it is; both may take their time. `glimpse` is cheap."""

    rules: Rulebook
    offer: Callable[[], Offer]
    facts: Callable[[], Facts]
    glimpse: Callable[[Sequence[Gpu]], Glimpse] | None = None
    standing: Standing = field(default_factory=Standing)
    kept: frozenset[int] | None = None  # GPUs, at the look before
    longest_us: int | None = None
    _has: Offer | None = None  # what the machine had at the last look
    _was: Facts | None = None
    _seen: Glimpse | None = None
    _gpus: dict[int, Standing] = field(default_factory=dict)
    _ailing: frozenset[int] = frozenset()  # in quarantine, at the look before

    def first_offer(self) -> Offer:
        """What is offered before the first look has been told."""
        policy, has, facts = self.rules.policy, self.offer(), self.facts()
        if self.glimpse is not None:
            has, facts = _joined(has, facts, self.glimpse(has.gpus))
        decision, _ = decide(policy, facts, self.standing)
        gpus = {g.index: decide_gpu(policy, g.index, facts, Standing())[0] for g in has.gpus}
        return shaped(policy, has, decision, gpus)

    def look(self) -> tuple[Event, ...]:
        """Everything, anew."""
        self.rules.refresh()
        self._has, self._was = self.offer(), self.facts()
        if self.glimpse is not None:
            self._seen = self.glimpse(self._has.gpus)
        return self._judge()

    def glance(self) -> tuple[Event, ...]:
        """Every second: what is cheap to see, and everything when that shows a change."""
        if self.glimpse is None or self._has is None or self._was is None:
            return self.look() if self.rules.has_changed() else ()
        if self.rules.has_changed():
            return self.look()
        self._seen = self.glimpse(self._has.gpus)
        if self._seen.changed:
            return self.look()
        return self._judge()

    def _judge(self) -> tuple[Event, ...]:
        assert self._has is not None
        assert self._was is not None
        policy, has, facts, seen = self.rules.policy, self._has, self._was, self._seen
        if seen is not None:
            has, facts = _joined(has, facts, seen)
        decision, self.standing = decide(policy, facts, self.standing)
        gpus = self._judge_gpus(policy, has, facts)
        events: list[Event] = []
        longest = policy.longest_run
        longest_us = None if longest is None else int(longest.total_seconds() * 1_000_000)
        if longest_us != self.longest_us:
            self.longest_us = longest_us
            events.append(RunsLimited(longest_us))
        events.append(OfferDetected(shaped(policy, has, decision, gpus)))
        if seen is not None and (readings := _readings(seen)):
            events.append(ReadingsTaken(readings))
        return (*events, *self._reclaims(policy, has, decision, gpus))

    def _judge_gpus(self, policy: Policy, has: Offer, facts: Facts) -> dict[int, Decision]:
        found: dict[int, Decision] = {}
        standings: dict[int, Standing] = {}
        for gpu in has.gpus if policy.gpus else ():
            before = self._gpus.get(gpu.index, Standing())
            found[gpu.index], standings[gpu.index] = decide_gpu(policy, gpu.index, facts, before)
        self._gpus = standings
        return found

    def _reclaims(
        self, policy: Policy, has: Offer, decision: Decision, gpus: Mapping[int, Decision]
    ) -> Iterator[Event]:
        wanted = frozenset() if self.kept is None else policy.kept.gpus - self.kept
        self.kept = policy.kept.gpus
        ill = {gpu.index: gpu.ails for gpu in has.gpus if gpu.health is Health.QUARANTINED}
        fallen, self._ailing = ill.keys() - self._ailing, frozenset(ill)
        if decision.reclaims:
            yield ReclaimAsked(None, f"its owner took the machine back: {decision.closed}")
            return
        if wanted and policy.at_close is AtClose.RECLAIM:
            yield ReclaimAsked(wanted, "its owner took the GPU back")
        for index, told in gpus.items():
            if told.reclaims:
                why = f"its owner took the GPU back: {told.closed}"
                yield ReclaimAsked(frozenset({index}), why)
        for index in sorted(fallen):
            yield ReclaimAsked(frozenset({index}), f"its GPU is in quarantine: {ill[index]}")


def _joined(has: Offer, facts: Facts, seen: Glimpse) -> tuple[Offer, Facts]:
    """Offer and facts with what a glimpse adds to them."""
    conditions = {one.gpu.uuid: one.condition for one in seen.sightings}
    gpus = tuple(marked(gpu, conditions.get(gpu.uuid, WELL)) for gpu in has.gpus)
    facts = replace(facts, now=seen.now, programs=seen.programs, gpus=_facts_of(seen))
    return replace(has, gpus=gpus), facts


def _facts_of(seen: Glimpse) -> dict[int, GpuFacts]:
    return {
        one.gpu.index: GpuFacts(one.strangers, one.vitals.power_mw, one.vitals.temperature_c)
        for one in seen.sightings
    }


def _readings(seen: Glimpse) -> tuple[GpuReading, ...]:
    return tuple(reading for one in seen.sightings if (reading := one.reading) is not None)


def glimpser(
    rules: Rulebook,
    watch: Watch,
    programs: Programs,
    wall: Callable[[], datetime],
    boot: Callable[[], int],
) -> Callable[[Sequence[Gpu]], Glimpse]:
    """Looks at the GPUs, and for programs only while a rule names one."""

    def glimpse(gpus: Sequence[Gpu]) -> Glimpse:
        now = wall()
        wanted = any(rule.programs for rule in rules.policy.gpus)
        named = programs.look(now.timestamp()) if wanted else frozenset[str]()
        sightings = watch.look(gpus, boot())
        return Glimpse(now, named, sightings, watch.changed)

    return glimpse
