"""A seed is a run: the same in every process, to the byte of its trace."""

from __future__ import annotations

import os
import subprocess
import sys

from gpool.testing.world import run

SEEDS = (3, 7, 20, 42)
PROGRAM = f"""
from gpool.testing.world import run
for seed in {SEEDS}:
    print(run(seed).digest)
"""


def digests(hash_seed: str) -> list[str]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_a_seed_gives_the_same_run_in_every_process() -> None:
    here = [run(seed).digest for seed in SEEDS]
    assert digests("1") == here
    assert digests("77") == here


def test_another_seed_gives_another_run() -> None:
    assert len({run(seed).digest for seed in SEEDS}) == len(SEEDS)


def test_telling_the_story_does_not_change_it() -> None:
    told, silent = run(7, keep_trace=True), run(7)
    assert told.digest == silent.digest
    assert len(told.lines) == told.steps
