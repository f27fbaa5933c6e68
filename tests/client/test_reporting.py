"""`gpool.progress` and `gpool.tqdm` where no agent reads them, and the file that a command's calls leave."""

from __future__ import annotations

from pathlib import Path

import pytest

import gpool
from gpool.core.specs.progress import parsed


def test_outside_a_task_they_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPOOL_PROGRESS_FILE", raising=False)
    gpool.progress(0.4, "epoch 4")
    assert list(gpool.tqdm(range(3))) == [0, 1, 2]
    assert list(gpool.tqdm(iter("ab"))) == ["a", "b"]


def test_a_command_leaves_the_newest_progress_in_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "progress"
    monkeypatch.setenv("GPOOL_PROGRESS_FILE", str(file))
    gpool.progress(0.1)
    gpool.progress(0.4, "epoch 4\n0.9 forged")
    assert parsed(file.read_bytes()) == (400_000, "epoch 4 0.9 forged")
    assert list(tmp_path.iterdir()) == [file]


def test_tqdm_reports_the_first_step_and_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "progress"
    monkeypatch.setenv("GPOOL_PROGRESS_FILE", str(file))
    seen = []
    for _ in gpool.tqdm(range(1000), desc="steps"):
        seen.append(parsed(file.read_bytes()) if file.exists() else None)
    assert seen[0] is None
    assert seen[1] == (1000, "steps: 1/1000")
    assert len(set(seen)) < 20, "not one report for each step"
    assert parsed(file.read_bytes()) == (1_000_000, "steps: 1000/1000")


def test_tqdm_counts_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "progress"
    monkeypatch.setenv("GPOOL_PROGRESS_FILE", str(file))
    with gpool.tqdm[int](total=8) as bar:
        bar.update(2)
        bar.set_description("copy")
    assert parsed(file.read_bytes()) == (250_000, "copy: 2/8")


def test_a_file_that_cannot_be_written_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPOOL_PROGRESS_FILE", "/proc/nowhere/progress")
    gpool.progress(0.4)
