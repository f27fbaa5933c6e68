"""AMD and Intel cards in recorded sysfs trees: nodes, readings, memory of processes, health, and what the owner is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpool.agent.machine.drm import bus_of, memory_of, node_groups
from gpool.agent.machine.findings import Level, untested_finding
from gpool.agent.machine.gpu_monitor import GpuMonitor
from gpool.agent.machine.host import AgentProcesses
from gpool.agent.machine.nvml import GpuLost, GpuProcess
from gpool.core.gpu_health import SECOND_US, Health
from gpool.core.model import GIB, MIB
from gpool.testing.fake_nvml import FakeNvml
from tests.agent.detect.drm_tree import RECORDED, DrmMachine

AGENT = 4242
NAMES = [path.stem for path in RECORDED]


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_card_is_found_open_with_its_own_nodes(tmp_path: Path, name: str) -> None:
    machine = DrmMachine(tmp_path, name)
    assert "not captured live" in machine.recorded["about"]
    found = machine.cards.found()
    assert sorted(found) == machine.recorded["card"]["bus"]
    gpus = machine.gpus
    if name != "intel-b580-xe":  # xe reports its memory to vendor tools only
        assert [(gpu.vendor, gpu.closed, bus_of(gpu)) for gpu in gpus] == [
            (machine.vendor, "", bus) for bus in machine.recorded["card"]["bus"]
        ]
    dev = machine.roots.dev
    for card in found.values():
        kfd = [str(dev / "kfd")] if machine.vendor == "amd" else []
        assert list(machine.cards.nodes(card)) == [*kfd, str(dev / f"dri/renderD{card.minor}")]


def test_two_cards_have_one_compute_node_and_their_own_render_nodes(tmp_path: Path) -> None:
    machine = DrmMachine(tmp_path, "amd-mi210-x2")
    nodes = [machine.cards.nodes(card) for card in machine.cards.found().values()]
    assert len({node for of_card in nodes for node in of_card}) == 3


@pytest.mark.parametrize(
    ("missing", "text"), [("kfd", "kfd is missing"), ("dri/renderD128", "renderD128 is missing")]
)
def test_a_card_without_a_device_node_is_listed_closed_and_says_what_to_do(
    tmp_path: Path, missing: str, text: str
) -> None:
    machine = DrmMachine(tmp_path, "amd-mi210-x2")
    (machine.roots.dev / missing).unlink()
    first, second = machine.gpus
    assert text in first.closed
    assert bool(second.closed) == (missing == "kfd")  # the other card has its own render node
    finding = untested_finding(first)
    assert (finding.level, finding.fix) == (Level.WARNING, "load the card's driver")


def test_the_owner_reads_that_a_card_is_untested(tmp_path: Path) -> None:
    finding = untested_finding(DrmMachine(tmp_path, "intel-arc-a770-i915").gpus[0])
    assert finding.level is Level.NOTE
    assert "never run on INTEL cards" in finding.text
    assert "GPOOL_AGENT_LEND_UNTESTED" in finding.fix


def test_amd_readings_name_the_sensor_nearest_to_its_limit(tmp_path: Path) -> None:
    machine = DrmMachine(tmp_path, "amd-mi210-x2")
    vitals = machine.cards.vitals(machine.gpus[0], 0)
    assert (vitals.utilisation_percent, vitals.memory_used_bytes) == (0, 11018240)
    assert vitals.power_mw == 41_000
    assert (vitals.temperature_c, vitals.slowdown_c, vitals.shutdown_c) == (45, 95, 100)
    assert (vitals.ecc_uncorrected, vitals.remap_pending, vitals.remap_failed) == (0, False, False)


def test_intel_power_is_the_energy_of_the_time_between_two_readings(tmp_path: Path) -> None:
    machine = DrmMachine(tmp_path, "intel-arc-a770-i915")
    gpu = machine.gpus[0]
    assert machine.cards.vitals(gpu, 0).power_mw is None
    machine.write("hwmon/hwmon3/energy1_input", f"{5_000_000_000 + 300_000_000}\n")
    assert machine.cards.vitals(gpu, 2 * SECOND_US).power_mw == 150_000


@pytest.mark.parametrize("name", ["amd-mi210-x2", "intel-arc-a770-i915"])
def test_memory_is_counted_once_for_each_client_and_apart_for_card_and_host(
    tmp_path: Path, name: str
) -> None:
    machine = DrmMachine(tmp_path, name)
    machine.run(11, 7, 8, vram=2 * GIB, host=64 * MIB)
    machine.run(12, 7, vram=2 * GIB, host=64 * MIB)  # forked: the same client
    machine.run(13)  # has nothing open
    assert machine.cards.processes(machine.gpus[0]) == (
        GpuProcess(11, 4 * GIB, host_bytes=128 * MIB),
        GpuProcess(12, None),
    )


def test_xe_regions_are_told_apart(tmp_path: Path) -> None:
    text = DrmMachine(tmp_path, "intel-b580-xe").recorded["fdinfo"]
    lines = text.format(client=1, bus="", vram=1024, host=2048).splitlines()
    facts = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    assert memory_of(facts) == (1 * MIB, 2 * MIB, True)
    assert memory_of({}) == (0, 0, False)


def test_rocm_memory_that_fdinfo_omits_is_read_from_the_compute_driver(tmp_path: Path) -> None:
    machine = DrmMachine(tmp_path, "amd-mi210-x2")
    first, second = machine.gpus
    machine.run(11, 1, vram=1 * MIB)
    machine.kfd_memory(11, "51432", 3 * GIB)
    machine.kfd_memory(11, "33915", 0)
    assert machine.cards.processes(first) == (GpuProcess(11, 3 * GIB),)
    assert machine.cards.processes(second) == ()


def sampled(machine: DrmMachine) -> GpuMonitor:
    own = AgentProcesses(AGENT, machine.roots.proc)
    return GpuMonitor(FakeNvml(driver=""), own, machine.roots.proc, machine.cards)


@pytest.mark.parametrize(
    ("file", "text", "health", "why"),
    [
        ("ras/umc_err_count", "ue: 1\nce: 9\n", Health.QUARANTINED, "uncorrectable memory errors"),
        ("ras/gpu_vram_bad_pages", "0x1 : 0x1000 : P\n", Health.DEGRADED, "at its next reset"),
        ("ras/gpu_vram_bad_pages", "0x1 : 0x1000 : F\n", Health.QUARANTINED, "replaced any more"),
        ("hwmon/hwmon1/temp3_input", "101000\n", Health.QUARANTINED, "about to switch itself off"),
        ("hwmon/hwmon1/temp2_input", "100000\n", Health.DEGRADED, "slows down"),
        ("gpu_busy_percent", "99\n", Health.HEALTHY, ""),
    ],
)
def test_the_health_of_an_amd_card_follows_its_files(
    tmp_path: Path, file: str, text: str, health: Health, why: str
) -> None:
    machine = DrmMachine(tmp_path, "amd-mi210-x2")
    machine.write(file, text)
    first, second = sampled(machine).sample(machine.gpus, 0)
    assert first.condition.health is health
    assert why in first.condition.reason
    assert second.condition.health is Health.HEALTHY


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("intel-arc-a770-i915", "drm/card0/gt/gt0/throttle_reason_thermal"),
        ("intel-b580-xe", "tile0/gt0/freq0/throttle/reason_thermal"),
    ],
)
def test_an_intel_card_slowed_down_by_heat_is_degraded(
    tmp_path: Path, name: str, file: str
) -> None:
    machine = DrmMachine(tmp_path, name)
    if name == "intel-b580-xe":
        machine.write("mem_info_vram_total", f"{12 * GIB}\n")  # as a vendor tool would list it
    assert sampled(machine).sample(machine.gpus, 0)[0].condition.health is Health.HEALTHY
    machine.write(file, "1\n")
    (one,) = sampled(machine).sample(machine.gpus, 0)
    assert (one.condition.health, one.vitals.throttled) == (Health.DEGRADED, {"thermal"})


def test_a_card_that_is_gone_is_lost_and_its_neighbour_is_not(tmp_path: Path) -> None:
    machine = DrmMachine(tmp_path, "amd-mi210-x2")
    gpus, monitor = machine.gpus, sampled(machine)
    assert all(one.reading is not None for one in monitor.sample(gpus, 0))
    machine.lose()
    with pytest.raises(GpuLost):
        machine.cards.vitals(gpus[0], 0)
    first, second = monitor.sample(gpus, 2 * SECOND_US)
    assert (first.condition.health, second.condition.health) == (
        Health.QUARANTINED,
        Health.HEALTHY,
    )


def test_a_card_whose_driver_was_never_loaded_is_closed_and_not_lost(tmp_path: Path) -> None:
    machine = DrmMachine(tmp_path, "amd-mi210-x2")
    listed = machine.gpus  # as a vendor's tool would list them
    machine.lose()
    first, second = machine.cards.described(listed)
    assert "load its driver" in first.closed
    assert not second.closed
    samples = sampled(machine).sample((first, second), 0)
    assert [one.condition.health for one in samples] == [Health.HEALTHY] * 2
    assert [one.reading is None for one in samples] == [True, False]


def test_the_owners_programs_on_a_card_are_strangers_and_sandboxes_are_not(tmp_path: Path) -> None:
    machine = DrmMachine(tmp_path, "amd-mi210-x2")
    machine.run(AGENT)
    machine.run(11, 1, vram=GIB, parent=AGENT)
    machine.run(12, 2, vram=GIB)
    machine.kfd_memory(99, "51432", GIB)  # ended, not yet released
    (first, _) = sampled(machine).sample(machine.gpus, 0)
    assert [process.pid for process in first.ours] == [11]
    assert first.strangers == ("train",)


def test_groups_are_taken_from_closed_nodes_and_never_the_group_root(tmp_path: Path) -> None:
    assert node_groups(["/dev/null", str(tmp_path / "absent")]) == ()
    closed = tmp_path / "node"
    closed.touch()
    closed.chmod(0o660)
    gid = closed.stat().st_gid
    assert node_groups([str(closed)]) == ((gid,) if gid else ())
