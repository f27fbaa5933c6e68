"""A second look excuses what passes by itself, and nothing else; it never keeps silent about it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.second_look import may_be_unsteady

ROOT = Path(__file__).parents[2]
STEADY = "def test_steady(): pass\n"
BROKEN = "def test_broken(): assert False\n"
UNSTEADY = """
from pathlib import Path
def test_unsteady():
    been = Path(__file__).with_suffix(".been")
    known = been.exists()
    been.touch()
    assert known
"""


def looked(folder: Path, **files: str) -> tuple[int, str]:
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    found = subprocess.run(
        [sys.executable, "-m", "tests.second_look"],
        cwd=folder,
        env={**os.environ, "PYTEST_ADDOPTS": "-p no:schemathesis", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    return found.returncode, found.stdout


def test_what_passes_by_itself_is_excused_and_named(tmp_path: Path) -> None:
    code, said = looked(tmp_path, a=STEADY, b=UNSTEADY)
    assert code == 0, said
    assert "UNSTEADY" in said.splitlines()[-2]
    assert "test_b.py::test_unsteady" in said.splitlines()[-1]


@pytest.mark.parametrize(
    "files",
    [
        {"a": BROKEN},
        {"a": BROKEN, "b": UNSTEADY},
        {"a": UNSTEADY, "b": UNSTEADY, "c": UNSTEADY, "d": UNSTEADY},
        {"a": "import no_such_module\n"},
    ],
    ids=["fails twice", "fails twice beside one that does not", "too many", "not even read"],
)
def test_nothing_else_is_excused(tmp_path: Path, files: dict[str, str]) -> None:
    code, said = looked(tmp_path, z=STEADY, **files)
    assert code != 0, said


def test_what_only_computes_is_never_excused() -> None:
    assert may_be_unsteady(["tests/e2e/test_x.py::test_y"])
    assert not may_be_unsteady(["tests/e2e/test_x.py::test_y", "tests/core/test_x.py::test_y"])
    assert not may_be_unsteady(["tests/world/test_x.py::test_y"])
    assert not may_be_unsteady([])
