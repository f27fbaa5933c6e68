"""`gpool admin backup`, `restore` and `check` as they are typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gpool.cli.main import cli
from tests.server.server_desk import serving

SECRET = "correct horse battery staple"
Typed = Callable[..., Result]


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Typed:
    monkeypatch.setenv("GPOOL_BACKUP_PASSPHRASE", SECRET)
    monkeypatch.chdir(tmp_path)

    def run(*words: str, **options: Any) -> Result:
        return CliRunner().invoke(cli, ["admin", *words], **options)

    return run


def test_a_pool_is_backed_up_while_it_serves_restored_and_checked(
    typed: Typed, tmp_path: Path
) -> None:
    with serving(tmp_path / "data"):
        made = typed("backup", "--data", "data", "pool.backup", "--json")
        assert made.exit_code == 0, made.output
        assert json.loads(made.stdout)["has_master_key"] is True
    whole = typed("restore", "--verify", "pool.backup")
    assert whole.exit_code == 0, whole.output
    assert "is whole" in whole.stdout
    refused = typed("restore", "--data", "data", "pool.backup")
    assert refused.exit_code == 1
    assert "--force" in str(refused.exception) + refused.output
    done = typed("restore", "--data", "elsewhere", "pool.backup")
    assert done.exit_code == 0, done.output
    assert "Restored the pool of" in done.stdout
    clean = typed("check", "--data", "elsewhere", "--json")
    assert clean.exit_code == 0, clean.output
    head = json.loads(clean.stdout)["audit_head"]
    assert typed("check", "--data", "elsewhere", "--anchor", head).exit_code == 0
    number = head.partition(":")[0]
    damaged = typed("check", "--data", "elsewhere", "--anchor", f"{number}:{'00' * 32}")
    assert damaged.exit_code == 1
    assert "differs from its anchor" in damaged.stdout


def test_the_passphrase_comes_from_a_file_a_variable_or_a_prompt(
    typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret.txt").write_text(f"{SECRET}\nanother line\n")
    with serving(tmp_path / "data"):
        options = ("--data", "data", "--passphrase-file", "secret.txt")
        assert typed("backup", *options, "first").exit_code == 0
        monkeypatch.delenv("GPOOL_BACKUP_PASSPHRASE")
        asked = typed("backup", "--data", "data", "second", input=f"{SECRET}\n{SECRET}\n")
        assert asked.exit_code == 0, asked.output
        short = typed("backup", "--data", "data", "third", input="short\nshort\n")
        assert short.exit_code != 0
    for file in ("first", "second"):
        assert typed("restore", "--verify", file, input=f"{SECRET}\n").exit_code == 0
    assert not (tmp_path / "third").exists()


def test_a_directory_without_a_pool_is_named(typed: Typed, tmp_path: Path) -> None:
    for verb in ("check", "backup"):
        words = [verb, "--data", "empty", *(["pool.backup"] if verb == "backup" else [])]
        refused = typed(*words)
        assert refused.exit_code != 0
        assert "--data" in str(refused.exception) + refused.output
    assert not (tmp_path / "pool.backup").exists()


def test_the_read_only_mode_is_switched_and_shown(typed: Typed, tmp_path: Path) -> None:
    with serving(tmp_path / "data") as live:
        options = {
            "env": {"GPOOL_URL": live.url, "GPOOL_KEY": live.key, "GPOOL_HOME": str(tmp_path)}
        }
        assert "can be changed" in typed("read-only", **options).stdout
        on = typed("read-only", "on", "--reason", "moving", **options)
        assert (on.exit_code, on.stdout) == (0, "The pool is read-only: moving\n")
        shown = typed("read-only", "--json", **options)
        assert json.loads(shown.stdout) == {"reason": "moving"}
        assert "can be changed" in typed("read-only", "off", **options).stdout
