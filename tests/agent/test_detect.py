"""What a machine says it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpool.agent.detect import detect, doctor, host_facts
from gpool.agent.detect.gpus import normalised
from gpool.core.errors import Invalid
from gpool.core.model import GIB


def test_simulated_gpus_are_marked_and_numbered() -> None:
    found = detect("H100:2, RTX4090")
    assert [(g.index, g.model, g.memory_bytes // GIB) for g in found] == [
        (0, "H100", 80),
        (1, "H100", 80),
        (2, "RTX4090", 24),
    ]
    assert all(gpu.simulated for gpu in found)
    assert len({gpu.uuid for gpu in found}) == 3
    assert detect("H100:2,RTX4090") == found


@pytest.mark.parametrize("text", ["H1000", "H100:0", "H100:x", "H100:-1", ",", "H100:1000"])
def test_what_cannot_be_simulated_is_refused_by_name(text: str) -> None:
    with pytest.raises(Invalid):
        detect(text)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("Tesla T4", "T4"),
        ("NVIDIA L40S", "L40S"),
    ],
)
def test_a_card_has_the_name_consumers_write(name: str, model: str) -> None:
    assert normalised(name) == model


def test_the_host_lends_no_more_than_its_group_allows(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    facts = host_facts(tmp_path / "not" / "yet", tmp_path)
    assert (facts.memory_bytes, facts.cpu_milli) == (1_000_000, 500)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    free = host_facts(tmp_path, tmp_path)
    assert free.memory_bytes > 1_000_000
    assert free.cpu_milli >= 1000


def test_the_doctor_says_what_to_do_about_each_thing_that_is_wrong(tmp_path: Path) -> None:
    findings = doctor(tmp_path)
    assert {f.name for f in findings} >= {"python", "bubblewrap", "user namespaces", "disk", "gpu"}
    for finding in findings:
        assert finding.text
        assert finding.ok or finding.fix
