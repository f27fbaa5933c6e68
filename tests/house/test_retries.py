"""Only tests that depend on the host's speed are retried, and every retry is reported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.retries import may_retry

ROOT = Path(__file__).parents[2]
MARKER = "import pytest\npytestmark = pytest.mark.host_speed\n"
STEADY = "def test_steady(): pass\n"
BROKEN = MARKER + "def test_broken(): assert False\n"
UNSTEADY = """
from pathlib import Path
def test_unsteady():
    second = Path(__file__).with_suffix(".second")
    is_second = second.exists()
    second.touch()
    assert is_second
"""
MARKED = MARKER + UNSTEADY


def retried(folder: Path, **files: str) -> tuple[int, str]:
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "tests.retries", "-p", "tests.host_speed"],
        cwd=folder,
        env={**os.environ, "PYTEST_ADDOPTS": "-p no:schemathesis", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    return done.returncode, done.stdout


def test_a_marked_test_that_passes_when_run_again_is_reported(tmp_path: Path) -> None:
    code, printed = retried(tmp_path, a=STEADY, b=MARKED)
    assert code == 0, printed
    assert "UNSTEADY" in printed.splitlines()[-2]
    assert "test_b.py::test_unsteady" in printed.splitlines()[-1]
    recorded = (tmp_path / "build" / "test-retries.txt").read_text()
    assert recorded == "passed when run again\ttest_b.py::test_unsteady\n"


@pytest.mark.parametrize(
    "files",
    [
        {"a": BROKEN},
        {"a": BROKEN, "b": MARKED},
        {"a": UNSTEADY},
        {"a": MARKED, "b": UNSTEADY},
        {"a": MARKED, "b": MARKED, "c": MARKED, "d": MARKED},
        {"a": "import no_such_module\n"},
    ],
    ids=[
        "fails twice",
        "fails twice beside one that does not",
        "not marked",
        "not marked beside a marked one",
        "too many files",
        "not collected",
    ],
)
def test_no_other_failure_is_excused(tmp_path: Path, files: dict[str, str]) -> None:
    code, printed = retried(tmp_path, z=STEADY, **files)
    assert code != 0, printed


def test_a_retry_needs_every_failed_test_to_be_marked() -> None:
    one, other = "tests/e2e/test_x.py::test_y", "tests/core/test_x.py::test_y"
    assert may_retry([one], {one})
    assert not may_retry([one, other], {one})
    assert not may_retry([], {one})
