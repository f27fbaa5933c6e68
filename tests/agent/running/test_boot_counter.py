"""Each start of an agent sorts after the ones before."""

from __future__ import annotations

from pathlib import Path

from gpool.agent.channel import BOOTS_FILE, next_boot


def test_a_later_start_always_sorts_behind_an_earlier(tmp_path: Path) -> None:
    boots = [next_boot(tmp_path) for _ in range(12)]
    assert boots == sorted(set(boots))


def test_a_broken_count_begins_anew(tmp_path: Path) -> None:
    (tmp_path / BOOTS_FILE).write_text("what?")
    assert next_boot(tmp_path) == f"{1:012d}"
