"""Plans of three World seeds against the digests recorded in bench/recorded; `python -m bench.plan_digests check` compares all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_plans_decide_the_same_as_recorded() -> None:
    check = ["check", "--only", "world", "--seeds", "3", "--loose"]
    done = subprocess.run(
        [sys.executable, "-m", "bench.plan_digests", *check],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3 runs are the same" in done.stdout
