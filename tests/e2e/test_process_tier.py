"""The owner's own tasks without isolation, on a node whose owner allows it, with real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tools.processes import LONG_LEASE, Pool


@pytest.fixture
def pool(tmp_path: Path, require: Callable[[str], None]) -> Iterator[Pool]:
    require("bubblewrap")
    pool = Pool(tmp_path, {**LONG_LEASE, "GPOOL_AGENT_ALLOW_PROCESS": "1"})
    try:
        pool.start()
        yield pool
    finally:
        pool.stop()


def test_a_task_sees_the_owner_s_files_only_when_it_asks_for_tier_none(
    pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / "mine").write_text("mine\n")
    look = ("sh", "-c", f"cat {tmp_path / 'mine'} && echo out > o")
    assert pool.gpool("run", "--", *look).returncode == 1
    bare = pool.gpool("run", "--tier", "none", "--output", "o", "-o", str(tmp_path), "--", *look)
    assert (bare.returncode, bare.stdout) == (0, "mine\n"), bare.stderr
    assert (tmp_path / "o").read_text() == "out\n"
    program = (
        "import gpool, os\n"
        f"there = lambda: os.path.exists({str(tmp_path / 'mine')!r})\n"
        "print(gpool.task(there).remote(), gpool.task(tier='none')(there).remote())\n"
    )
    assert list(pool.program(program)) == ["False True"]
