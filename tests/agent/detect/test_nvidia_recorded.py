"""NVIDIA's cards as NVML told of them, some captured live (`bench/gpu/health.sh`): each is described as what it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpool.agent.machine.gpu_monitor import GpuMonitor
from gpool.agent.machine.gpus import Detector
from gpool.agent.machine.nvml import Card, GpuProcess, MigInstance, MigProfile, Vitals
from gpool.agent.machine.vendors import ParsedGpus
from gpool.core.model import Health
from gpool.testing.fake_nvml import FakeNvml

RECORDED = sorted((Path(__file__).parent / "recorded" / "nvidia").glob("*.json"))


def replayed(told: dict[str, Any]) -> FakeNvml:
    cards = [msgspec.convert(one["card"], Card) for one in told["cards"]]
    nvml = FakeNvml(*cards, driver=told["driver"])
    for card, one in zip(cards, told["cards"], strict=True):
        fake = nvml.cards[card.uuid]
        fake.vitals = msgspec.convert(one["vitals"], Vitals)
        fake.processes = msgspec.convert(one["processes"], tuple[GpuProcess, ...])
        fake.profiles = msgspec.convert(one["mig_profiles"], tuple[MigProfile, ...])
        made = msgspec.convert(one["mig_instances"], tuple[MigInstance, ...])
        fake.instances = {instance.id: instance for instance in made}
    return nvml


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_card_is_described_as_what_it_is(path: Path) -> None:
    told = json.loads(path.read_text())
    assert "aptured live" in told["about"]
    survey = Detector(None, replayed(told), ParsedGpus).survey()
    assert survey.complaints == ()
    assert len(survey.gpus) == len(told["cards"])
    for gpu in survey.gpus:
        assert gpu.details is not None
        assert gpu.details.driver == told["driver"]
        assert (gpu.vendor, gpu.closed) == ("nvidia", "")
    if "expect" in told:
        found = [
            [gpu.model, gpu.memory_bytes, gpu.details.capability, list(gpu.details.mig_instances)]
            for gpu in survey.gpus
            if gpu.details is not None
        ]
        assert found == told["expect"]


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_card_is_healthy_and_read_whatever_it_does_not_say(path: Path) -> None:
    nvml = replayed(json.loads(path.read_text()))
    gpus = Detector(None, nvml, ParsedGpus).survey().gpus
    for sighting in GpuMonitor(nvml).sample(gpus, 0):
        assert sighting.condition.health is Health.HEALTHY
        assert sighting.reading is not None


def test_linked_cards_know_one_another() -> None:
    told = json.loads(next(p for p in RECORDED if p.stem == "a100-mig").read_text())
    first, second = Detector(None, replayed(told), ParsedGpus).survey().gpus
    assert first.details is not None
    assert second.details is not None
    assert (first.details.links, second.details.links) == (((1, 12),), ((0, 12),))
