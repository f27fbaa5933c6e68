"""A build's network: the index, the place of its files, and nobody else. Runs in network namespaces of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

STAGE = Path(__file__).with_name("lane_stage.py")


def test_a_build_reaches_the_index_and_where_its_files_lie_and_nobody_else(
    require: Callable[[str], None],
) -> None:
    for component in ("bubblewrap", "uv", "root", "network namespaces", "nftables"):
        require(component)
    ran = subprocess.run(
        [sys.executable, STAGE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert set(told["control"].values()) == {True}, "the control: all of them answer"
    assert told["built"] == {
        "index": True,
        "files": True,
        "stranger": False,
        "gateway": False,
        "node": False,
    }
