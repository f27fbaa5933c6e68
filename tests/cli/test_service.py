"""systemd units of agent and server: valid, complete, and only for a machine that has joined."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpool.cli.lending.service import unit_text
from gpool.cli.main import cli


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that has joined one pool."""
    place = tmp_path / "home dir"
    monkeypatch.setenv("GPOOL_HOME", str(place))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    join(place, "pool.example_8642", "https://pool.example:8642")
    return place


def join(place: Path, name: str, url: str) -> None:
    file = place / "nodes" / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    document = {"url": url, "fingerprint": "a" * 64, "id": "n-0000000000001", "name": "studio"}
    file.write_text(json.dumps({**document, "server": "pool-x"}))


@pytest.mark.parametrize("system", [True, False])
@pytest.mark.parametrize("kind", ["agent", "server", "up"])
def test_systemd_accepts_the_units(
    home: Path, tmp_path: Path, kind: str, system: bool, require: Callable[[str], None]
) -> None:
    require("systemd-analyze")
    unit = tmp_path / f"gpool-{kind}.service"
    unit.write_text(unit_text(kind, ("--data", '/srv/a b%c$d"e;'), system=system))
    command = ["systemd-analyze", "verify", *([] if system else ["--user"]), str(unit)]
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert (done.returncode, unit.name in done.stderr) == (0, False), done.stderr
    unit.write_text(unit.read_text().replace("Restart=always", "Restart=perhaps"))
    control = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert unit.name in control.stderr


def test_install_writes_a_unit_that_joins_again_without_a_link(home: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(
        cli, ["service", "install", "agent", "--user", "--", "--price", "0.31/h"]
    )
    assert done.exit_code == 0, done.output
    unit = tmp_path / "config" / "systemd" / "user" / "gpool-agent.service"
    text = unit.read_text()
    assert " -m gpool join --price 0.31/h\n" in text
    assert f'Environment="GPOOL_HOME={home}"\n' in text
    assert "Restart=always\n" in text
    assert "WantedBy=default.target\n" in text
    assert "systemctl --user enable --now gpool-agent.service" in done.output.replace("\n", " ")
    again = CliRunner().invoke(cli, ["service", "install", "agent", "--user"])
    assert again.exit_code == 1
    assert "differs" in again.stderr
    assert CliRunner().invoke(cli, ["service", "remove", "agent", "--user"]).exit_code == 0
    assert not unit.exists()


def test_a_unit_with_a_wrong_option_or_without_a_pool_is_not_written(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = CliRunner().invoke(cli, ["service", "install", "agent", "--user", "--", "--prize", "1"])
    assert wrong.exit_code == 2
    join(home, "other_1", "http://127.0.0.1:1")
    several = CliRunner().invoke(cli, ["service", "install", "agent", "--user"])
    assert several.exit_code == 2
    assert "https://pool.example:8642" in several.stderr
    named = ["service", "install", "agent", "--print", "--", "https://pool.example:8642"]
    assert CliRunner().invoke(cli, named).exit_code == 0
    monkeypatch.setenv("GPOOL_HOME", str(tmp_path / "empty"))
    none = CliRunner().invoke(cli, ["service", "install", "agent", "--user"])
    assert none.exit_code == 2
    assert "has joined no pool" in none.stderr
    assert not (tmp_path / "config").exists()
