"""The tools that start and watch real processes see what is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.processes import (
    PATIENCE_S,
    NeverHappened,
    Pool,
    alive,
    eventually,
    free_port,
    processes_saying,
)


def test_what_never_happens_is_named() -> None:
    with pytest.raises(NeverHappened, match=r"the moon falls: not within 0\.05 s"):
        eventually("the moon falls", lambda: False, within_s=0.05)


def test_a_marked_process_is_found_and_is_gone_once_killed() -> None:
    mark = f"gpool-mark-{free_port()}"
    process = subprocess.Popen([sys.executable, "-c", "input()", mark], stdin=subprocess.PIPE)
    try:
        eventually("it is seen", lambda: processes_saying(mark) == [process.pid], PATIENCE_S)
        process.kill()
        eventually("it is a corpse", lambda: not alive(process.pid), PATIENCE_S)
        assert processes_saying(mark) == []
    finally:
        process.kill()
        process.communicate()


def test_a_process_of_a_pool_sees_nothing_of_the_callers_configuration(tmp_path: Path) -> None:
    pool = Pool(tmp_path, {"GPOOL_SERVER_TTL_S": "2"})
    seen = {k: v for k, v in pool.environment("first").items() if k.startswith("GPOOL_")}
    assert seen == {"GPOOL_HOME": str(tmp_path / "first"), "GPOOL_SERVER_TTL_S": "2"}
