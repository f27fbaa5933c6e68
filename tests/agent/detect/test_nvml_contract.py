"""What every `Nvml` promises: the fake always, the real one where there is a card."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from gpool.agent.machine.nvml import GpuLost, Nvml, NvmlError
from gpool.agent.machine.real_nvml import RealNvml
from gpool.testing.fake_nvml import FakeNvml, h200


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.gpu)])
def nvml(request: pytest.FixtureRequest, require: Callable[[str], None]) -> Iterator[Nvml]:
    if request.param == "real":
        require("gpu")
    made: Nvml = RealNvml() if request.param == "real" else FakeNvml(h200(0), h200(1))
    made.open()
    yield made
    made.close()


def test_every_card_that_answers_is_described_under_its_own_uuid(nvml: Nvml) -> None:
    assert nvml.driver()
    assert nvml.uuids()
    for index, uuid in enumerate(nvml.uuids()):
        card = nvml.card(uuid)
        assert card.uuid == uuid
        assert card.index == index
        assert card.name
        assert card.memory_bytes > 0
        assert ":" in card.bus
    assert nvml.lost() == 0


def test_vitals_are_in_the_units_they_say(nvml: Nvml) -> None:
    for uuid in nvml.uuids():
        told = nvml.vitals(uuid)
        assert told.utilisation_percent is None or 0 <= told.utilisation_percent <= 100
        assert told.memory_used_bytes is None or told.memory_used_bytes >= 0
        assert told.temperature_c is None or 0 < told.temperature_c < 150
        assert told.power_mw is None or 1_000 < told.power_mw < 3_000_000
        assert told.throttled <= {"thermal", "power", "brake"}


def test_who_uses_a_card_is_told_once_for_each_process(nvml: Nvml) -> None:
    for uuid in nvml.uuids():
        pids = [process.pid for process in nvml.processes(uuid)]
        assert len(pids) == len(set(pids))


def test_a_card_nobody_has_is_lost(nvml: Nvml) -> None:
    for ask in (nvml.card, nvml.vitals, nvml.processes):
        with pytest.raises(GpuLost):
            ask("GPU-ffffffff-ffff-ffff-ffff-ffffffffffff")


def test_errors_are_told_once_and_never_waited_for(nvml: Nvml) -> None:
    nvml.xids()
    assert nvml.xids() == ()


def test_opening_and_closing_twice_changes_nothing(nvml: Nvml) -> None:
    nvml.open()
    assert nvml.uuids()
    nvml.close()
    nvml.close()
    with pytest.raises(NvmlError):
        nvml.uuids()
    nvml.open()
    assert nvml.uuids()


def test_profiles_are_listed_without_switching_mig_on(nvml: Nvml) -> None:
    for uuid in nvml.uuids():
        card = nvml.card(uuid)
        profiles = nvml.mig_profiles(uuid)
        assert card.mig is not None or profiles == ()
        assert all(one.memory_bytes > 0 and one.most > 0 and "g." in one.name for one in profiles)
        if not card.mig:
            assert nvml.mig_instances(uuid) == ()


def test_the_compute_mode_has_a_word(nvml: Nvml) -> None:
    for uuid in nvml.uuids():
        assert nvml.compute_mode(uuid) in ("default", "exclusive_process", "prohibited")


def test_the_fake_makes_and_unmakes_instances_as_far_as_they_fit() -> None:
    nvml = FakeNvml(h200())
    nvml.open()
    uuid = nvml.uuids()[0]
    with pytest.raises(NvmlError):
        nvml.make_mig(uuid, 9)
    nvml.set_mig(uuid, True)
    one, two = nvml.make_mig(uuid, 9), nvml.make_mig(uuid, 9)
    assert one.uuid != two.uuid
    with pytest.raises(NvmlError):
        nvml.make_mig(uuid, 9)
    with pytest.raises(NvmlError):
        nvml.set_mig(uuid, False)
    nvml.unmake_mig(uuid, one.id)
    nvml.unmake_mig(uuid, two.id)
    nvml.set_mig(uuid, False)
    assert nvml.mig_instances(uuid) == ()


def test_a_card_that_fell_off_the_bus_is_counted_and_lost() -> None:
    nvml = FakeNvml(h200(0), h200(1))
    nvml.open()
    gone, stays = nvml.uuids()
    nvml.cards[gone].lost = True
    assert nvml.uuids() == (stays,)
    assert nvml.lost() == 1
    with pytest.raises(GpuLost):
        nvml.vitals(gone)
