"""A card is set back as it was, also by the agent that comes after one that was killed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpool.agent.machine.nvml import NotPermitted
from gpool.agent.sharing.modes import Records, record, recover, restore
from gpool.testing.fake_nvml import FakeNvml, h200


def a_card(**changes: object) -> tuple[FakeNvml, str]:
    nvml = FakeNvml(replace(h200(), **changes))  # type: ignore[arg-type]
    nvml.open()
    return nvml, nvml.uuids()[0]


def spoil(nvml: FakeNvml, uuid: str) -> None:
    nvml.set_compute_mode(uuid, "exclusive_process")
    nvml.set_power_limit(uuid, 300_000)
    nvml.set_application_clocks(uuid, (3201, 345))
    nvml.set_mig(uuid, True)
    nvml.make_mig(uuid, 19, 6)


def test_everything_a_task_could_have_changed_is_set_back() -> None:
    nvml, uuid = a_card()
    before = record(nvml, uuid)
    spoil(nvml, uuid)
    assert record(nvml, uuid) != before
    changed = restore(nvml, uuid, before)
    assert changed == ("instances", "mig", "compute mode", "clocks", "power limit")
    assert record(nvml, uuid) == before
    assert restore(nvml, uuid, before) == ()


def test_the_owners_own_instances_are_left_alone() -> None:
    nvml, uuid = a_card(mig=True)
    owners = nvml.make_mig(uuid, 9, 0)
    before = record(nvml, uuid)
    nvml.make_mig(uuid, 19, 6)
    restore(nvml, uuid, before)
    assert nvml.mig_instances(uuid) == (owners,)


def test_what_is_as_it_was_needs_no_rights() -> None:
    nvml, uuid = a_card()
    before = record(nvml, uuid)
    nvml.root = False
    assert restore(nvml, uuid, before) == ()
    with pytest.raises(NotPermitted):
        restore(nvml, uuid, replace(before, compute_mode="prohibited"))


def test_what_a_killed_agent_left_is_set_back_by_the_next(tmp_path: Path) -> None:
    nvml, uuid = a_card()
    before = record(nvml, uuid)
    Records(tmp_path / "cards").keep(uuid, before)
    spoil(nvml, uuid)
    recover(nvml, Records(tmp_path / "cards"))
    assert record(nvml, uuid) == before
    assert list(Records(tmp_path / "cards").left()) == []


def test_a_card_that_refuses_is_tried_again_and_a_torn_record_is_put_away(tmp_path: Path) -> None:
    nvml, uuid = a_card()
    records = Records(tmp_path)
    records.keep(uuid, record(nvml, uuid))
    (tmp_path / "GPU-torn.json").write_text('{"mig": tr')
    spoil(nvml, uuid)
    nvml.root = False
    recover(nvml, records)
    assert [name for name, _ in records.left()] == [uuid]
