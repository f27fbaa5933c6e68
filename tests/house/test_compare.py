"""The comparison of two source trees: order of the pairs, direction of ratios, verdicts and failures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.compare import Pair, Reading, summary

ROOT = Path(__file__).resolve().parents[2]
BACKLOG = """
import json, sys
from pathlib import Path

with Path("../order").open("a") as file:
    file.write(Path.cwd().name + " ")
rate = {rate}
fifths = [dict(tasks_per_s=rate, server_cpu_us_a_task=60, agent_cpu_us_a_task=40)] * 5
figures = dict(tasks=10, succeeded={succeeded}, submissions_per_s=rate, fifths=fifths)
Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps(figures))
sys.exit(1)  # as a benchmark that misses its own promise
"""


def make_tree(folder: Path, rate: int, succeeded: int = 10) -> Path:
    for part in (".venv/bin", "bench", "gpool"):
        (folder / part).mkdir(parents=True)
    (folder / ".venv/bin/python").symlink_to(sys.executable)
    (folder / "gpool/__init__.py").touch()
    (folder / "bench/backlog.py").write_text(BACKLOG.format(rate=rate, succeeded=succeeded))
    return folder


def run_compare(before: Path, after: Path, result: Path) -> subprocess.CompletedProcess[str]:
    trees = ["--before", str(before), "--after", str(after)]
    options = ["--pairs", "3", "--only", "backlog", "--json", str(result)]
    argv = [sys.executable, "-m", "bench.compare", *trees, *options]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)


def test_pairs_alternate_and_a_tree_at_least_as_fast_passes(tmp_path: Path) -> None:
    before, after = make_tree(tmp_path / "old", 1000), make_tree(tmp_path / "new", 960)
    done = run_compare(before, after, tmp_path / "result.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "order").read_text() == "old new new old old new "
    drained = json.loads((tmp_path / "result.json").read_text())["figures"]["backlog drained/s"]
    assert (drained["ratio"], len(drained["pairs"]), drained["holds"]) == (0.96, 3, True)
    assert "0.960–0.960" in done.stdout


def test_a_slower_tree_fails(tmp_path: Path) -> None:
    before, after = make_tree(tmp_path / "old", 1000), make_tree(tmp_path / "new", 940)
    done = run_compare(before, after, tmp_path / "result.json")
    assert done.returncode == 1
    assert "**no**" in done.stdout


def test_a_failed_measurement_is_reported_and_is_no_pass(tmp_path: Path) -> None:
    before, after = make_tree(tmp_path / "old", 1000), make_tree(tmp_path / "new", 2000, 9)
    done = run_compare(before, after, tmp_path / "result.json")
    assert done.returncode == 1
    assert "9 of 10 tasks succeeded" in done.stdout


def test_a_tree_that_would_run_another_trees_gpool_is_refused(tmp_path: Path) -> None:
    before, after = make_tree(tmp_path / "old", 1000), make_tree(tmp_path / "new", 1000)
    (after / "gpool/__init__.py").write_text(f"__file__ = {str(before / 'gpool/__init__.py')!r}")
    done = run_compare(before, after, tmp_path / "result.json")
    assert done.returncode == 2
    assert "another tree's gpool" in done.stderr


def test_a_ratio_above_one_is_better_whichever_way_the_figure_goes() -> None:
    pairs = [Pair(10.0, 5.0), Pair(10.0, 20.0), Pair(10.0, 8.0)]
    latency = summary(Reading("p50, ms", float, more_is_better=False), pairs)
    assert latency["ratio"] == pytest.approx(1.25)
    assert latency["range"] == [0.5, 2.0]
    rate = summary(Reading("tasks/s", float, decides=False), pairs)
    assert rate["ratio"] == pytest.approx(0.8)
    assert rate["holds"] is None
