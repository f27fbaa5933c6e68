"""A test run that leaves something on the host fails, and a closed runtime leaves no control group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from gpool.agent.runtime.slots import SlotGroups, SlotPool, own_uids
from tests import leftovers

LEAVES = """
import subprocess
def test_it(tmp_path):
    nothing = subprocess.DEVNULL
    words = ["sh", "-c", "sleep 60; :", f"{tmp_path}/x"]
    subprocess.Popen(words, stdout=nothing, stderr=nothing)
"""
ROOT = Path(__file__).parents[2]


def run(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    (folder / "test_it.py").write_text(text)
    words = [
        "-q",
        "-p",
        "tests.leftovers",
        "-p",
        "no:cacheprovider",
        "-s",
        "--rootdir",
        str(folder),
    ]
    words += ["--basetemp", str(folder / "base"), str(folder)]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_run_that_leaves_a_process_fails_and_names_it(tmp_path: Path) -> None:
    clean = run(tmp_path / "clean", "def test_it(tmp_path): pass")
    assert clean.returncode == 0, clean.stdout
    ran = run(tmp_path / "left", LEAVES)
    found = leftovers.processes(leftovers.RunPaths(tmp_path / "left" / "base"))
    for line in found:
        os.kill(int(line.split()[0]), signal.SIGKILL)
    assert len(found) == 1
    assert (ran.returncode, "1 passed" in ran.stdout) == (1, True)
    assert f"process {found[0].split()[0]} sh -c" in ran.stdout


def test_the_control_groups_of_a_runtime_are_attributed_to_its_run(tmp_path: Path) -> None:
    groups, pool = slots(tmp_path / "agent")
    if not groups.hierarchy.version:
        return  # the host permits none
    slot, _ = pool.take(with_values=False)
    assert slot.group is not None
    paths = leftovers.RunPaths(tmp_path)
    made = leftovers.groups(paths)
    assert {group.name for group in made} == {f"{groups.prefix}0"}
    assert leftovers.groups(leftovers.RunPaths(tmp_path / "another")) == []
    leftovers.clear(paths)
    assert leftovers.groups(paths) == []


def test_a_closed_runtime_leaves_no_control_group_of_a_slot_in_use(tmp_path: Path) -> None:
    _, pool = slots(tmp_path / "agent")
    pool.take(with_values=False)
    pool.release(pool.take(with_values=False)[0])
    pool.close()
    assert leftovers.groups(leftovers.RunPaths(tmp_path)) == []


def slots(data: Path) -> tuple[SlotGroups, SlotPool]:
    directory = data.resolve() / "sandboxes"
    directory.mkdir(parents=True)
    groups = SlotGroups("gpool-", directory, throttles_disk=False)
    return groups, SlotPool(directory, data / "values", uid_of=own_uids(None), groups=groups)
