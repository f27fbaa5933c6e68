"""The machine's monitor: reads the facts for the owner's policy (battery, last input, load), applies it and reports
changes as events.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

import structlog

from gpool.agent.machine.gpu_monitor import HEALTHY, GpuMonitor, GpuSample, with_health
from gpool.agent.machine.host import ForeignPrograms
from gpool.agent.machine.policy import (
    AskedTerms,
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

SUPPLIES = Path("/sys/class/power_supply")
DEV = Path("/dev")
PROC = Path("/proc")
ASK_S = 2.0
PAUSE_FILE = "paused"
"""File in the agent's data directory: while it exists, the node takes no new tasks."""

SHORTEST_S = 1.0  # processor time is counted in hundredths of a second: shorter is inexact


def power(supplies: Path = SUPPLIES) -> tuple[float | None, bool | None]:
    """Return (battery in percent, on mains); None for a missing or unreported value."""
    battery: float | None = None
    mains: bool | None = None
    discharging = False
    for supply in sorted(supplies.iterdir()) if supplies.is_dir() else ():
        kind = _word(supply / "type")
        if kind == "Mains" or kind.startswith("USB"):
            if (online := _word(supply / "online")) and (kind == "Mains" or online == "1"):
                mains = bool(mains) or online == "1"
        elif kind == "Battery" and _word(supply / "scope") != "Device":  # not a mouse's
            with contextlib.suppress(ValueError):
                level = float(_word(supply / "capacity"))
                battery = level if battery is None else min(battery, level)
            discharging = discharging or _word(supply / "status") == "Discharging"
    if mains is None and battery is not None:
        mains = not discharging
    return battery, mains


def idle_s(now_s: float, dev: Path = DEV, sessions: str | None = None) -> float | None:
    """Seconds since the last input at a terminal or graphical login; None if there is neither.

    `sessions`: logind's KEY=value blocks (`ask_logind`).
    """
    found: list[float] = []
    for terminal in (*dev.glob("pts/[0-9]*"), *dev.glob("tty[0-9]*")):
        with contextlib.suppress(OSError):
            facts = terminal.stat()
            if facts.st_uid != 0 or terminal.parent.name == "pts":  # an unused console is root's
                found.append(max(0.0, now_s - facts.st_atime))
    for block in (sessions or "").split("\n\n"):
        properties = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if properties.get("Class") != "user" or properties.get("Type") not in (
            "x11",
            "wayland",
            "mir",
        ):
            continue
        if properties.get("IdleHint") == "no":
            found.append(0.0)
        elif properties.get("IdleSinceHint", "").isdecimal():
            found.append(max(0.0, now_s - int(properties["IdleSinceHint"]) / 1_000_000))
    return min(found, default=None)


def ask_logind() -> str | None:
    asked = shutil.which("loginctl")
    if asked is None or not Path("/run/systemd/seats").is_dir():
        return None
    try:
        listed = _answer([asked, "list-sessions", "--no-legend", "--no-pager"])
        ids = [line.split()[0] for line in listed.splitlines() if line.split()]
        wanted = ["-p", "Class", "-p", "Type", "-p", "IdleHint", "-p", "IdleSinceHint"]
        return _answer([asked, "show-session", *ids, *wanted]) if ids else None
    except (OSError, subprocess.SubprocessError):
        return None


def _answer(argv: list[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=ASK_S)
    return done.stdout


class LoadMeter:
    def __init__(self, own: int, proc: Path = PROC) -> None:
        self._own = own
        self._proc = proc
        self._before: tuple[float, Mapping[int, int]] | None = None

    def measure(self, now_s: float) -> float | None:
        """Return busy processors since the last call; None for the first call and within `SHORTEST_S`."""
        parents: dict[int, int] = {}
        spent: dict[int, int] = {}
        for name in os.listdir(self._proc):
            if name.isdecimal():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    words = (self._proc / name / "stat").read_text().rpartition(")")[2].split()
                    parents[int(name)] = int(words[1])
                    spent[int(name)] = int(words[11]) + int(words[12])
        ours = _below(self._own, parents)
        others = {pid: ticks for pid, ticks in spent.items() if pid not in ours}
        before = self._before
        if before is None:
            self._before = (now_s, others)
            return None
        if now_s < before[0] + SHORTEST_S:
            return None
        self._before = (now_s, others)
        ticks = sum(max(0, now - before[1][pid]) for pid, now in others.items() if pid in before[1])
        return ticks / os.sysconf("SC_CLK_TCK") / (now_s - before[0])


def _below(top: int, parents: Mapping[int, int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found, wave = {top}, [top]
    while wave:
        wave = [child for pid in wave for child in children.get(pid, ()) if child not in found]
        found.update(wave)
    return found


def facts_now(
    now: datetime,
    meter: LoadMeter,
    logind: Callable[[], str | None] = ask_logind,
    *,
    data: Path | None = None,
) -> MachineFacts:
    """`data`: the agent's data directory, which may hold the pause file."""
    battery, mains = power()
    idle = idle_s(now.timestamp(), sessions=logind())
    paused = data is not None and (data / PAUSE_FILE).exists()
    return MachineFacts(now, battery, mains, idle, meter.measure(now.timestamp()), paused=paused)


def _word(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip()
    return ""


log = structlog.get_logger(__name__)


class PolicyFile:
    """The owner's file, read again when it changes; after a mistake the last valid policy stays.

    Sandbox networks use the egress lists of the start: changed lists withdraw egress until a restart.
    """

    def __init__(self, path: Path | None, terms: AskedTerms = AskedTerms()) -> None:  # noqa: B008 - frozen
        """`terms`: those of the command line, which come before the file's."""
        self._path = path
        self._terms = terms
        self._seen = self._stamp()
        self.policy = self._with_terms(OwnerPolicy() if path is None else parse(_text(path)))
        self._lists = replace(self.policy.egress, offered=True)

    def refresh(self) -> bool:
        stamp = self._stamp()
        if self._path is None or stamp == self._seen:
            return False
        self._seen = stamp
        try:
            policy = self._with_terms(parse(_text(self._path)))
        except Invalid as error:
            log.warning("policy_not_changed", file=str(self._path), error=error.detail)
            return False
        if replace(policy.egress, offered=True) != self._lists:
            log.warning("egress_withdrawn", why="its lists changed: restart the agent")
            policy = replace(policy, egress=replace(policy.egress, offered=False))
        changed, self.policy = policy != self.policy, policy
        return changed

    def _with_terms(self, policy: OwnerPolicy) -> OwnerPolicy:
        return replace(policy, terms=self._terms.over(policy.terms))

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
