"""One release back: an agent of the release before works with this server, and this agent with a server of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools.components import RELEASE_BEFORE
from tests.tools.processes import Pool


@pytest.fixture
def before(require: Callable[[str], None], tmp_path: Path) -> Path:
    """Source of the release before."""
    require("git")
    require("release before")
    commit = RELEASE_BEFORE.read_text().strip()
    packed = subprocess.run(
        ["git", "archive", commit, "src"],
        cwd=RELEASE_BEFORE.parents[2],
        capture_output=True,
        check=True,
    )
    folder = tmp_path / "before"
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)
    source = folder / "src"
    shown = subprocess.run(
        [sys.executable, "-c", "import gpool; print(gpool.__file__)"],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.startswith(str(source)), "control: this path comes before this release"
    return source


@pytest.mark.parametrize("old", ["agent", "server"])
def test_a_task_runs_between_this_release_and_the_one_before(
    old: str, before: Path, tmp_path: Path
) -> None:
    older = {"PYTHONPATH": str(before)}
    pool = Pool(tmp_path, older if old == "server" else {})
    try:
        pool.start_server()
        pool.settings = older if old == "agent" else {}
        pool.join("node")
        pool.settings = {}
        task = pool.submit("sh", "-c", "echo between releases; exit 3")
        done = pool.ask("GET", f"/v1/tasks/{task}?wait=120").json()
        assert (done["status"], done["exit_code"]) == ("failed", 3)
        assert "between releases" in pool.gpool("logs", task).stdout
        running = pool.submit("sleep", "600")
        pool.until_status(running, "running")
        pool.ask("DELETE", f"/v1/tasks/{running}")
        pool.until_status(running, "cancelled")
    except BaseException as error:
        error.add_note(pool.story())
        raise
    finally:
        pool.stop()
