"""A build's network: none. Its packages are downloaded first, and no script runs meanwhile. In namespaces of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

STAGE = Path(__file__).with_name("lane_stage.py")


def test_a_source_package_is_built_from_a_remote_index_and_its_scripts_reach_nobody(
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
    for way in ("direct", "proxied"):
        assert set(told[way]) == set(told["control"])
        assert set(told[way].values()) == {False}, way
