"""The machine's monitor: applies the owner's policy and reports changes as events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

import structlog

from gpool.agent.machine.detection.processes import ForeignPrograms
from gpool.agent.machine.gpu_monitor import HEALTHY, GpuMonitor, GpuSample, with_health
from gpool.agent.machine.policy import (
    AtClose,
    ClosureState,
    GpuFacts,
    LendingDecision,
    MachineFacts,
    OwnerPolicy,
    apply_policy,
    decide,
    decide_gpu,
)
from gpool.agent.machine.policy_file import parse
from gpool.agent.running.sandboxes import PolicyLimits
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


class PolicyFile:
    """The owner's file, read again when it changes; after a mistake the last valid policy stays.

    Sandbox networks use the egress lists of the start: changed lists withdraw egress until a restart.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._seen = self._stamp()
        self.policy = OwnerPolicy() if path is None else parse(_text(path))
        self._lists = replace(self.policy.egress, offered=True)

    def refresh(self) -> bool:
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
            log.warning("egress_withdrawn", why="its lists changed: restart the agent")
            policy = replace(policy, egress=replace(policy.egress, offered=False))
        changed, self.policy = policy != self.policy, policy
        return changed

    def limits(self) -> PolicyLimits:
        """Current limits; they also bind leases granted under an earlier policy."""
        return PolicyLimits(
            self.policy.tiers, self.policy.egress.offered, self.policy.gangs.offered
        )

    def has_changed(self) -> bool:
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
class MachineSample:
    now: datetime
    programs: frozenset[str] = frozenset()
    gpus: tuple[GpuSample, ...] = ()
    changed: bool = False  # a card was added, removed or reconfigured


@dataclass(slots=True)
class NodeMonitor:
    rules: PolicyFile
    offer: Callable[[], Offer]
    facts: Callable[[], MachineFacts]
    sample: Callable[[Sequence[Gpu]], MachineSample] | None = None
    closure: ClosureState = field(default_factory=ClosureState)
    kept: frozenset[int] | None = None  # GPUs the owner kept at the last check
    longest_us: int | None = None
    _offer: Offer | None = None  # at the last survey
    _facts: MachineFacts | None = None
    _sample: MachineSample | None = None
    _gpu_closures: dict[int, ClosureState] = field(default_factory=dict)
    _quarantined: frozenset[int] = frozenset()  # at the last check

    def first_offer(self) -> Offer:
        policy, offer, facts = self.rules.policy, self.offer(), self.facts()
        if self.sample is not None:
            offer, facts = _with_sample(offer, facts, self.sample(offer.gpus))
        decision, _ = decide(policy, facts, self.closure)
        gpus = {g.index: decide_gpu(policy, g.index, facts, ClosureState())[0] for g in offer.gpus}
        return apply_policy(policy, offer, decision, gpus)

    def survey(self) -> tuple[Event, ...]:
        self.rules.refresh()
        self._offer, self._facts = self.offer(), self.facts()
        if self.sample is not None:
            self._sample = self.sample(self._offer.gpus)
        return self._judge(self._offer, self._facts)

    def poll(self) -> tuple[Event, ...]:
        if self.rules.has_changed():
            return self.survey()
        if self.sample is None or self._offer is None or self._facts is None:
            return ()
        self._sample = self.sample(self._offer.gpus)
        if self._sample.changed:
            return self.survey()
        return self._judge(self._offer, self._facts)

    def _judge(self, offer: Offer, facts: MachineFacts) -> tuple[Event, ...]:
        policy, sample = self.rules.policy, self._sample
        if sample is not None:
            offer, facts = _with_sample(offer, facts, sample)
        decision, self.closure = decide(policy, facts, self.closure)
        gpus = self._judge_gpus(policy, offer, facts)
        events: list[Event] = []
        longest = policy.longest_run
        longest_us = None if longest is None else int(longest.total_seconds() * 1_000_000)
        if longest_us != self.longest_us:
            self.longest_us = longest_us
            events.append(RunsLimited(longest_us))
        events.append(OfferDetected(apply_policy(policy, offer, decision, gpus)))
        if sample is not None and (readings := _readings(sample)):
            events.append(ReadingsTaken(readings))
        return (*events, *self._reclaims(policy, offer, decision, gpus))

    def _judge_gpus(
        self, policy: OwnerPolicy, offer: Offer, facts: MachineFacts
    ) -> dict[int, LendingDecision]:
        found: dict[int, LendingDecision] = {}
        closures: dict[int, ClosureState] = {}
        for gpu in offer.gpus if policy.gpus else ():
            before = self._gpu_closures.get(gpu.index, ClosureState())
            found[gpu.index], closures[gpu.index] = decide_gpu(policy, gpu.index, facts, before)
        self._gpu_closures = closures
        return found

    def _reclaims(
        self,
        policy: OwnerPolicy,
        offer: Offer,
        decision: LendingDecision,
        gpus: Mapping[int, LendingDecision],
    ) -> Iterator[Event]:
        wanted = frozenset() if self.kept is None else policy.kept.gpus - self.kept
        self.kept = policy.kept.gpus
        ill = {gpu.index: gpu.ails for gpu in offer.gpus if gpu.health is Health.QUARANTINED}
        newly_ill, self._quarantined = ill.keys() - self._quarantined, frozenset(ill)
        if decision.reclaims:
            yield ReclaimAsked(None, f"its owner took the machine back: {decision.closed}")
            return
        if wanted and policy.at_close is AtClose.RECLAIM:
            yield ReclaimAsked(wanted, "its owner took the GPU back")
        for index, of_gpu in gpus.items():
            if of_gpu.reclaims:
                why = f"its owner took the GPU back: {of_gpu.closed}"
                yield ReclaimAsked(frozenset({index}), why)
        for index in sorted(newly_ill):
            yield ReclaimAsked(frozenset({index}), f"its GPU is in quarantine: {ill[index]}")


def _with_sample(
    offer: Offer, facts: MachineFacts, sample: MachineSample
) -> tuple[Offer, MachineFacts]:
    conditions = {one.gpu.uuid: one.condition for one in sample.gpus}
    gpus = tuple(with_health(gpu, conditions.get(gpu.uuid, HEALTHY)) for gpu in offer.gpus)
    gpu_facts = {
        one.gpu.index: GpuFacts(one.strangers, one.vitals.power_mw, one.vitals.temperature_c)
        for one in sample.gpus
    }
    facts = replace(facts, now=sample.now, programs=sample.programs, gpus=gpu_facts)
    return replace(offer, gpus=gpus), facts


def _readings(sample: MachineSample) -> tuple[GpuReading, ...]:
    return tuple(reading for one in sample.gpus if (reading := one.reading) is not None)


def sampler(
    rules: PolicyFile,
    gpu_monitor: GpuMonitor,
    programs: ForeignPrograms,
    wall: Callable[[], datetime],
    boot: Callable[[], int],
) -> Callable[[Sequence[Gpu]], MachineSample]:
    def sample(gpus: Sequence[Gpu]) -> MachineSample:
        now = wall()
        wanted = any(rule.programs for rule in rules.policy.gpus)
        named = programs.names(now.timestamp()) if wanted else frozenset[str]()
        samples = gpu_monitor.sample(gpus, boot())
        return MachineSample(now, named, samples, gpu_monitor.changed)

    return sample
