"""A database that cannot be reached any more is noticed within seconds, not when TCP gives up after a quarter of an hour."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.tools.processes import PATIENCE_S
from tests.tools.replica_set import isolated

NOTICED_S = 20.0


def test_writes_and_reads_fail_within_seconds_and_work_again_after(
    require: Callable[[str], None],
) -> None:
    require("postgres")
    require("nftables")
    require("network namespaces")
    words = [*isolated(), sys.executable, "-W", "ignore", "-m", "tests.store.cut_off"]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        words, cwd=root, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {"write", "next write", "read"}
    assert max(found.values()) < NOTICED_S, found
