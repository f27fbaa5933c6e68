"""The agent's eye on its GPUs: what is lost, ailing, used by others or reconfigured, and what follows from it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpool.agent.machine.findings import Level, gpu_findings, health_finding
from gpool.agent.machine.gpu_monitor import GpuMonitor, with_health
from gpool.agent.machine.gpus import LOST, Detector, Survey
from gpool.agent.machine.host import AgentProcesses, ForeignPrograms
from gpool.agent.machine.monitor import MachineSample, NodeMonitor, PolicyFile, sampler
from gpool.agent.machine.nvml import GpuProcess, MigInstance, Xid
from gpool.agent.machine.policy import MachineFacts
from gpool.agent.machine.vendors import ParsedGpus
from gpool.agent.state_machine.instructions import Event, OfferDetected, ReadingsTaken, ReclaimAsked
from gpool.core.gpu_health import HUNG_AFTER_US, QUIET_US, SECOND_US, Condition, Symptoms, examine
from gpool.core.model import GIB, Gpu, Health, Offer
from gpool.testing.fake_nvml import IDLE, FakeNvml, h200

MONDAY = datetime(2026, 11, 16, 12, tzinfo=UTC)
OURS = 4242


class Machine:
    """A machine with two cards, its owner's rules and an agent's monitor; time is a number of seconds."""

    def __init__(self, folder: Path, rules: str = "") -> None:
        self.nvml = FakeNvml(h200(0), h200(1))
        self.proc = folder / "proc"
        self.proc.mkdir()
        self.run(OURS, "gpool", parent=1)
        self.rules = folder / "policy.toml"
        self.rules.write_text(rules)
        self.seconds = 0.0
        self.detector = Detector(None, self.nvml, ParsedGpus)
        self.containers: list[str] = []
        kin = AgentProcesses(OURS, self.proc, lambda: self.containers)
        self.watch = GpuMonitor(self.nvml, kin, self.proc)
        book = PolicyFile(self.rules)
        self.monitor = NodeMonitor(
            book,
            lambda: Offer(4000, GIB, GIB, self.detector.survey().gpus),
            lambda: MachineFacts(self.now),
            sampler(
                book,
                self.watch,
                ForeignPrograms(kin, self.proc),
                lambda: self.now,
                lambda: int(self.seconds * SECOND_US),
            ),
        )

    @property
    def now(self) -> datetime:
        return MONDAY + timedelta(seconds=self.seconds)

    @property
    def uuids(self) -> list[str]:
        return list(self.nvml.cards)

    def run(
        self,
        pid: int,
        name: str,
        parent: int,
        pending: str = "0",
        group: str = "user.slice",
        holds: bool = True,
    ) -> None:
        here = self.proc / str(pid)
        here.mkdir(exist_ok=True)
        (here / "comm").write_text(name + "\n")
        (here / "stat").write_text(f"{pid} ({name}) S {parent} 0 0\n")
        (here / "cgroup").write_text(f"0::/{group}\n")
        (here / "fd").mkdir(exist_ok=True)
        if holds and not (here / "fd" / "3").is_symlink():
            (here / "fd" / "3").symlink_to("/dev/nvidia0")
        (here / "status").write_text(f"Name:\t{name}\nShdPnd:\t{pending}\n")

    def end(self, pid: int) -> None:
        shutil.rmtree(self.proc / str(pid))

    def pass_(self, seconds: float = 1.0) -> tuple[Event, ...]:
        self.seconds += seconds
        return self.monitor.poll()

    def use(self, at: int, *pids: int) -> None:
        card = self.nvml.cards[self.uuids[at]]
        card.processes = tuple(GpuProcess(pid, GIB) for pid in pids)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.monitor.survey()
    return made


def with_rules(folder: Path, rules: str) -> Machine:
    made = Machine(folder, rules)
    made.monitor.survey()
    return made


def offered(events: tuple[Event, ...]) -> tuple[Gpu, ...]:
    (told,) = [event for event in events if isinstance(event, OfferDetected)]
    return told.offer.gpus


def reclaimed(events: tuple[Event, ...]) -> list[frozenset[int] | None]:
    return [event.gpus for event in events if isinstance(event, ReclaimAsked)]


# ---- detection


def test_a_card_is_described_with_all_nvml_knows(machine: Machine) -> None:
    machine.nvml.cards[machine.uuids[0]].card = replace(
        h200(0), nvlinks=(h200(1).bus,) * 18 + ("0000:ff:00.0",)
    )
    first = machine.detector.survey().gpus[0]
    assert (first.model, first.vendor, first.memory_bytes) == ("H200", "nvidia", 140 * GIB)
    details = first.details
    assert details is not None
    assert (details.source, details.driver) == ("nvml", "580.95.05")
    assert (details.capability, details.pcie) == ("9.0", "gen5 x16")
    assert details.links == ((1, 18),)
    assert details.mig is False
    assert details.mig_profiles[0] == "1g.18gb"


def test_a_machine_without_a_driver_has_no_gpus_and_no_complaint() -> None:
    assert Detector(None, FakeNvml(driver=""), ParsedGpus).survey() == Survey()


def test_other_vendors_cards_come_after_nvidias_and_are_asked_for_seldom(machine: Machine) -> None:
    asked = []

    def others() -> ParsedGpus:
        asked.append(1)
        return ParsedGpus((Gpu(0, "AMD-1", "MI300X", "amd", GIB),), ("rocm-smi: no JSON",))

    detector = Detector(None, machine.nvml, others)
    for _ in range(3):
        survey = detector.survey()
        assert [gpu.index for gpu in survey.gpus] == [0, 1, 2]
        assert survey.complaints == ("rocm-smi: no JSON",)
    assert len(asked) == 1


def test_garbage_from_a_tool_is_a_finding_with_what_to_do() -> None:
    (finding,) = gpu_findings(Survey((), ("amd-smi static: no JSON (Expecting value)",)))
    assert finding.level is Level.WARNING
    assert "amd-smi" in finding.text
    assert finding.fix


# ---- change at run time


def test_a_card_that_falls_off_the_bus_is_quarantined_at_the_next_glance(machine: Machine) -> None:
    machine.nvml.cards[machine.uuids[0]].lost = True
    events = machine.pass_()
    first, second = offered(events)
    assert first.health is Health.QUARANTINED
    assert LOST in first.closed
    assert not second.closed
    assert reclaimed(events) == [frozenset({0})]
    assert reclaimed(machine.pass_()) == []
    later = offered(machine.pass_(6))
    assert [gpu.closed != "" for gpu in later] == [True, False]


def test_a_card_that_comes_back_is_lent_again_once_it_has_been_quiet(machine: Machine) -> None:
    machine.nvml.cards[machine.uuids[0]].lost = True
    machine.pass_()
    machine.nvml.cards[machine.uuids[0]].lost = False
    machine.pass_(6)
    assert offered(machine.pass_(QUIET_US / SECOND_US + 1))[0].closed == ""


def test_reconfigured_mig_is_told_within_a_beat(machine: Machine) -> None:
    card = machine.nvml.cards[machine.uuids[1]]
    machine.pass_(6)
    card.card = replace(card.card, mig=True)
    card.instances[1] = MigInstance(1, "MIG-1", 19, GIB)
    told = offered(machine.pass_(6))[1].details
    assert told is not None
    assert told.mig is True
    assert told.mig_instances == ("1g.18gb",)


def test_a_driver_that_goes_away_takes_its_cards_with_it_until_it_is_back(machine: Machine) -> None:
    driver, machine.nvml._driver = machine.nvml._driver, ""
    machine.nvml.close()
    events = machine.pass_()
    assert all(gpu.health is Health.QUARANTINED for gpu in offered(events))
    assert sorted(map(sorted, filter(None, reclaimed(events)))) == [[0], [1]]
    machine.nvml._driver = driver
    machine.pass_(6)
    assert [gpu.closed for gpu in offered(machine.pass_(QUIET_US / SECOND_US + 1))] == ["", ""]


# ---- health


def test_a_deadly_error_moves_tasks_away_once_and_names_itself(machine: Machine) -> None:
    machine.nvml.told.append(Xid(machine.uuids[1], 79))
    events = machine.pass_()
    assert reclaimed(events) == [frozenset({1})]
    sick = offered(events)[1]
    assert sick.health is Health.QUARANTINED
    assert "XID 79" in sick.ails
    assert "quarantine" in sick.closed
    assert reclaimed(machine.pass_()) == []


def test_a_hot_card_is_degraded_and_still_lent(machine: Machine) -> None:
    machine.nvml.cards[machine.uuids[0]].vitals = replace(IDLE, temperature_c=88)
    events = machine.pass_(2)
    assert offered(events)[0].health is Health.DEGRADED
    assert offered(events)[0].closed == ""
    assert reclaimed(events) == []


def test_a_killed_process_that_stays_hangs_its_card(machine: Machine) -> None:
    machine.run(77, "python", parent=OURS, pending="100")
    machine.use(0, 77)
    assert offered(machine.pass_())[0].closed == ""
    events = machine.pass_(HUNG_AFTER_US / SECOND_US)
    assert offered(events)[0].health is Health.QUARANTINED
    assert "has not ended" in offered(events)[0].ails


def test_a_process_that_lives_is_not_taken_for_a_hung_one(machine: Machine) -> None:
    machine.run(77, "python", parent=OURS)
    machine.use(0, 77)
    machine.pass_()
    assert offered(machine.pass_(60))[0].closed == ""


def test_the_doctor_tells_a_sick_card_and_how_to_cure_it() -> None:
    gpu = Gpu(0, "g", "H200", "nvidia", GIB)
    told = health_finding(gpu, examine(Symptoms(ecc_uncorrected=2), Condition(), 0))
    assert told.level is Level.PROBLEM
    assert "2 uncorrectable" in told.text
    assert "gpool node resume gpu0" in told.fix
    assert health_finding(gpu, Condition()).level is Level.OK
    assert with_health(gpu, Condition()) == gpu


# ---- telemetry


def test_readings_are_taken_of_each_real_card(machine: Machine) -> None:
    machine.nvml.cards[machine.uuids[0]].vitals = replace(IDLE, utilisation_percent=97)
    (taken,) = [event for event in machine.pass_(2) if isinstance(event, ReadingsTaken)]
    first, second = taken.readings
    assert (first.gpu, first.utilisation_percent, first.power_mw) == (0, 97, 76_000)
    assert (second.gpu, second.temperature_c) == (1, 31)


def test_the_monitor_reads_no_simulated_card(tmp_path: Path) -> None:
    gpus = Detector("H100:2").survey().gpus
    watch = GpuMonitor(FakeNvml(driver=""))
    assert [one.reading for one in watch.sample(gpus, 0)] == [None, None]
    assert not watch.changed


# ---- the owner first


def test_a_strangers_program_closes_the_one_card_it_uses(tmp_path: Path) -> None:
    machine = with_rules(tmp_path, "[[gpu]]\nyield_to_others = true")
    machine.run(90, "blender", parent=1)
    machine.use(1, 90)
    events = machine.pass_()
    assert [gpu.closed != "" for gpu in offered(events)] == [False, True]
    assert reclaimed(events) == [frozenset({1})]
    machine.use(1)
    assert [gpu.closed for gpu in offered(machine.pass_())] == ["", ""]


def test_our_own_tasks_are_no_strangers(tmp_path: Path) -> None:
    machine = with_rules(tmp_path, "[[gpu]]\nyield_to_others = true")
    machine.run(50, "launcher", parent=OURS)
    machine.run(51, "bwrap", parent=50)
    machine.run(52, "python", parent=51)
    machine.use(0, 52)
    assert reclaimed(machine.pass_()) == []


def test_a_container_of_ours_is_no_stranger_and_the_owners_is(tmp_path: Path) -> None:
    machine = with_rules(tmp_path, "[[gpu]]\nyield_to_others = true")
    machine.containers.append("c0ffee")
    machine.run(60, "python", parent=1, group="system.slice/docker-c0ffee.scope")
    machine.use(0, 60)
    assert reclaimed(machine.pass_()) == []
    machine.run(61, "python", parent=1, group="system.slice/docker-feed.scope")
    machine.use(0, 60, 61)
    assert reclaimed(machine.pass_()) == [frozenset({0})]


def test_a_number_from_another_process_namespace_is_nobody(tmp_path: Path) -> None:
    machine = with_rules(tmp_path, "[[gpu]]\nyield_to_others = true")
    machine.run(62, "sshd", parent=1, holds=False)
    machine.use(0, 62, 99_999)
    assert reclaimed(machine.pass_()) == []


def test_a_program_by_name_takes_the_named_cards(tmp_path: Path) -> None:
    machine = with_rules(tmp_path, '[[gpu]]\nwhich = [0]\nprograms = ["mygame"]')
    assert reclaimed(machine.pass_()) == []
    machine.run(91, "mygame", parent=1)
    events = machine.pass_()
    assert reclaimed(events) == [frozenset({0})]
    assert [gpu.closed != "" for gpu in offered(events)] == [True, False]
    machine.end(91)
    assert [gpu.closed for gpu in offered(machine.pass_())] == ["", ""]


def test_a_task_that_calls_itself_a_game_takes_nothing(tmp_path: Path) -> None:
    machine = with_rules(tmp_path, '[[gpu]]\nprograms = ["mygame"]')
    machine.run(92, "mygame", parent=OURS)
    assert reclaimed(machine.pass_()) == []


@pytest.mark.parametrize(
    ("rule", "change"),
    [("most_celsius = 80", {"temperature_c": 81}), ("most_watts = 300", {"power_mw": 301_000})],
)
def test_above_the_owners_cap_a_card_is_taken_back_and_does_not_flicker(
    tmp_path: Path, rule: str, change: dict[str, int]
) -> None:
    machine = with_rules(tmp_path, f"[[gpu]]\n{rule}")
    card = machine.nvml.cards[machine.uuids[0]]
    card.vitals = replace(IDLE, **change)
    assert reclaimed(machine.pass_(2)) == [frozenset({0})]
    card.vitals = IDLE
    assert offered(machine.pass_(2))[0].closed
    assert reclaimed(machine.pass_(2)) == []
    assert offered(machine.pass_(61))[0].closed == ""


def test_a_rule_may_let_what_runs_finish(tmp_path: Path) -> None:
    machine = with_rules(tmp_path, '[[gpu]]\nyield_to_others = true\nat_close = "finish"')
    machine.run(90, "blender", parent=1)
    machine.use(1, 90)
    events = machine.pass_()
    assert offered(events)[1].closed
    assert reclaimed(events) == []


def test_what_is_closed_from_the_start_is_never_offered_open(tmp_path: Path) -> None:
    machine = Machine(tmp_path, '[[gpu]]\nwhich = [0]\nprograms = ["mygame"]')
    machine.run(91, "mygame", parent=1)
    assert [gpu.closed != "" for gpu in machine.monitor.first_offer().gpus] == [True, False]


def test_hours_hold_for_the_named_cards_only(tmp_path: Path) -> None:
    rules = '[[gpu]]\nwhich = [1]\nhours = [{from = "22:00", to = "06:00"}]'
    machine = with_rules(tmp_path, f'zone = "UTC"\n{rules}')
    assert [gpu.closed != "" for gpu in offered(machine.pass_())] == [False, True]


def test_a_sample_needs_no_survey(machine: Machine) -> None:
    machine.pass_(6)
    surveyed = machine.monitor.offer
    asked: list[int] = []

    def counted() -> Offer:
        asked.append(1)
        return surveyed()

    machine.monitor.offer = counted
    for _ in range(5):
        machine.pass_()
    assert not asked
    assert isinstance(machine.monitor._sample, MachineSample)
