"""`gpool secret` against a real server on loopback; values come from standard input or a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_account_verbs import Terminal
from tests.server.server_desk import Live, serving
from tests.tools.processes import PATIENCE_S

SECRET = "tok-5e55ed-0f-a-secret"


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    with serving(tmp_path / "data") as live:
        yield live


@pytest.fixture
def ada(live: Live, tmp_path: Path) -> Terminal:
    ada = Terminal(live, tmp_path / "ada")
    ada("register", "ada")
    return ada


def test_a_secret_is_set_listed_used_and_deleted(ada: Terminal) -> None:
    assert "gpool secret set NAME" in ada("secret", "ls").output
    told = ada("secret", "set", "HF_TOKEN", typed=f"{SECRET}\n").output
    assert "gpool run --secret HF_TOKEN" in told
    [kept] = ada.json("secret", "ls")
    assert (kept["name"], kept["team"]) == ("HF_TOKEN", None)
    listed = ada("secret", "ls").output
    assert "HF_TOKEN" in listed
    run = ("run", "-d", "--secret", "HF_TOKEN", "--", "true")
    assert ada(*run).stdout.startswith("t-")
    assert SECRET not in told + listed
    ada("secret", "rm", "HF_TOKEN")
    assert ada.json("secret", "ls") == []
    assert "gpool secret ls" in ada("secret", "rm", "HF_TOKEN", code=4).output
    refused = ada(*run, code=1)
    assert "gpool secret set HF_TOKEN" in refused.output
    ada(*run, HF_TOKEN="from the environment")  # the control: as before


def test_a_team_has_secrets_of_its_own(ada: Terminal, live: Live, tmp_path: Path) -> None:
    bob = Terminal(live, tmp_path / "bob")
    bob("register", "bob")
    team = ada.json("team", "create", "lab")["id"]
    ada("team", "add", "lab", "bob")
    bob("team", "join", team)
    bob("secret", "set", "TOKEN", "--team", "lab", code=3, typed=SECRET)
    ada("secret", "set", "TOKEN", "--team", "lab", typed=SECRET)
    assert [one["team"] for one in bob.json("secret", "ls", "--team", "lab")] == [team]
    assert bob.json("secret", "ls") == []
    run = ("run", "-d", "--secret", "TOKEN")
    bob(*run, "--team", "lab", "--", "true")
    bob(*run, "--", "true", code=1)
    ada("secret", "rm", "TOKEN", "--team", "lab")


def test_a_value_on_the_command_line_is_refused_and_nothing_is_sent(ada: Terminal) -> None:
    refused = ada("secret", "set", f"HF_TOKEN={SECRET}", code=2, typed="x")
    assert "standard input" in refused.output
    assert SECRET not in refused.output
    ada("secret", "set", "HF_TOKEN", SECRET, code=2, typed="x")
    assert "empty" in ada("secret", "set", "HF_TOKEN", code=2, typed="").output
    assert ada.json("secret", "ls") == []


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_a_terminal_is_asked_without_echo(ada: Terminal, live: Live) -> None:
    master, slave = pty.openpty()
    environment = {**os.environ, "GPOOL_HOME": str(ada.home), "GPOOL_URL": live.url}
    command = [sys.executable, "-m", "gpool", "secret", "set", "HF_TOKEN"]
    with subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
        start_new_session=True,
    ) as process:
        os.close(slave)
        shown = b""
        while b"Value of HF_TOKEN" not in shown:
            shown += os.read(master, 1000)
        os.write(master, f"{SECRET}\n".encode())
        try:
            while piece := os.read(master, 1000):
                shown += piece
        except OSError:  # Linux: the terminal has no other end any more
            pass
        assert process.wait(PATIENCE_S) == 0, shown
    os.close(master)
    assert b"HF_TOKEN stored" in shown
    assert SECRET.encode() not in shown
    assert [one["name"] for one in ada.json("secret", "ls")] == ["HF_TOKEN"]
