"""What a machine says it has."""

from __future__ import annotations

import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpool.agent.machine import host
from gpool.agent.machine.findings import (
    Finding,
    Level,
    cgroup_kind,
    cgroups_finding,
    clock_finding,
    doctor,
    userns_fix,
)
from gpool.agent.machine.gpus import detect, normalised
from gpool.agent.machine.host import host_capacity
from gpool.agent.runtime.cgroups import CgroupHierarchy
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
    facts = host_capacity(tmp_path / "not" / "yet", tmp_path)
    assert (facts.memory_bytes, facts.cpu_milli) == (1_000_000, 500)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    free = host_capacity(tmp_path, tmp_path)
    assert free.memory_bytes > 1_000_000
    assert free.cpu_milli >= 1000


def test_the_doctor_says_what_to_do_about_each_thing_that_is_wrong(tmp_path: Path) -> None:
    findings = doctor(tmp_path)
    names = {f.name for f in findings}
    assert names >= {"python", "bubblewrap", "user namespaces", "disk", "gpu"}
    assert names >= {"control groups", "network", "uv", "docker", "microvm"}
    for finding in findings:
        assert finding.text
        assert finding.level is Level.OK or finding.fix


def test_the_doctor_changes_no_control_group(tmp_path: Path) -> None:
    before = Path("/proc/self/cgroup").read_text()
    doctor(tmp_path)
    assert Path("/proc/self/cgroup").read_text() == before


def test_other_rooms_have_a_word(tmp_path: Path) -> None:
    heard: list[Path] = []

    def probe(data: Path) -> list[Finding]:
        heard.append(data)
        return [Finding("lanes", Level.WARNING, "no", "do")]

    assert [f.name for f in doctor(tmp_path, [probe])] == ["lanes"]
    assert heard == [tmp_path]


@pytest.mark.parametrize(
    ("switch", "loaded", "limit", "says"),
    [
        ("1", "", "100", "profile gpool-bwrap /usr/bin/bwrap"),
        ("1", "bwrap-userns-restrict (enforce)\nother (enforce)", "100", "'bwrap-userns-restrict'"),
        ("0", "", "0", "user.max_user_namespaces"),
        ("", "", "15000", "unprivileged_userns_clone"),
    ],
)
def test_the_fix_for_user_namespaces_is_the_one_that_helps(
    switch: str, loaded: str, limit: str, says: str
) -> None:
    assert says in userns_fix("/usr/bin/bwrap", switch, loaded, limit)


V1 = "30 23 0:26 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory"
V2 = "31 23 0:27 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw"


@pytest.mark.parametrize(
    ("mounts", "kind"), [(V1, "v1"), (V2, "v2"), (f"{V1}\n{V2}", "hybrid"), ("", "none")]
)
def test_every_kind_of_control_groups_is_told_apart(mounts: str, kind: str) -> None:
    assert cgroup_kind(mounts) == kind
    finding = cgroups_finding(kind, CgroupHierarchy(0, ()))
    assert (finding.level, bool(finding.fix)) == (Level.WARNING, True)


def test_what_cannot_be_limited_is_named() -> None:
    part = cgroups_finding("v1", CgroupHierarchy(1, (("memory", Path("/m")), ("pids", Path("/p")))))
    assert "cpu cannot be limited" in part.text
    whole = tuple((name, Path("/g")) for name in ("cpu", "memory", "pids"))
    assert cgroups_finding("v2", CgroupHierarchy(2, whole)).level is Level.OK


@pytest.mark.parametrize(
    ("seconds", "level"), [(0, Level.OK), (5, Level.OK), (-6, Level.WARNING), (61, Level.PROBLEM)]
)
def test_a_clock_that_is_wrong_is_found(seconds: int, level: Level) -> None:
    there = datetime(2026, 11, 15, tzinfo=UTC)
    found = clock_finding(there + timedelta(seconds=seconds), there)
    assert found.level is level
    assert clock_finding(there, None).level is Level.NOTE


def test_a_socket_that_is_no_engine_is_said_and_harms_nothing(tmp_path: Path) -> None:
    assert host.docker((str(tmp_path / "none.sock"),)) == host.ContainerEngine()
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(tmp_path / "dead.sock"))
    dead.close()
    found = host.docker((str(tmp_path / "dead.sock"),))
    assert found.refused
    assert not found.version
