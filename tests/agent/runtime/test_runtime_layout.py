"""Where a sandbox finds packages, and where its limits are set, on hosts unlike this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpool.agent.runtime import cgroups
from gpool.agent.runtime.bubblewrap import layout


def test_a_task_finds_every_package_folder_of_the_agents_python(tmp_path: Path) -> None:
    own, system = tmp_path / "venv/lib/site-packages", tmp_path / "local/dist-packages"
    source, missing = tmp_path / "project", tmp_path / "gone/site-packages"
    for folder in (own, system, source):
        folder.mkdir(parents=True)
    paths = [str(source), str(own), str(system), str(missing), str(own)]
    made = layout.prepare(tmp_path / "inside", paths)
    assert {bind.source for bind in made.binds} >= {own, system}
    assert source not in {bind.source for bind in made.binds}
    listed = next((tmp_path / "inside").rglob("gpool.pth")).read_text().splitlines()
    seen = dict(made.seen)
    assert listed[:2] == [seen["packages0"], seen["packages1"]]


def host(root: Path, *groups: str) -> str:
    """Folders as a version 2 hierarchy has them; the text of its mountinfo line."""
    for name in ("", *groups):
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / "cgroup.procs").touch()
    return f"30 1 0:26 / {root} rw - cgroup2 cgroup2 rw"


def found(mounts: str, membership: str, *busy: Path) -> set[Path]:
    """Where groups are made when the kernel refuses controllers below the `busy` ones."""
    asked = cgroups.find(
        mounts, membership, lambda group, _: set() if group in busy else {"memory", "pids"}
    )
    return {path for _, path in asked.parents}


def test_groups_are_made_in_our_own_group_when_it_lets_us(tmp_path: Path) -> None:
    mounts = host(tmp_path, "service")
    assert found(mounts, "0::/service") == {tmp_path / "service"}


def test_groups_are_made_above_when_our_own_group_holds_other_processes(tmp_path: Path) -> None:
    mounts = host(tmp_path, "shared", "shared/ours")
    ours, above = tmp_path / "shared/ours", tmp_path / "shared"
    assert found(mounts, "0::/shared/ours", ours) == {above}
    assert found(mounts, "0::/shared/ours", ours, above) == {tmp_path}
    assert found(mounts, "0::/shared/ours", ours, above, tmp_path) == set()


def test_only_our_own_group_is_called_our_own(tmp_path: Path) -> None:
    mounts = host(tmp_path, "ours")
    asked: list[tuple[Path, bool]] = []

    def refuse(group: Path, is_own: bool) -> set[str]:
        asked.append((group, is_own))
        return set()

    cgroups.find(mounts, "0::/ours", refuse)
    assert asked == [(tmp_path / "ours", True), (tmp_path, False)]


@pytest.mark.parametrize("membership", ["0::/elsewhere", "0::/"])
def test_a_group_outside_the_mount_leads_to_the_mount(tmp_path: Path, membership: str) -> None:
    assert found(host(tmp_path), membership) == {tmp_path}
