"""The verbs events, webhook and notify against a real server on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_account_verbs import Terminal
from tests.server.server_desk import Live, serving
from tests.tools.processes import PATIENCE_S, eventually


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    with serving(tmp_path / "data", webhook_networks="127.0.0.0/8") as live:
        yield live


@pytest.fixture
def ada(live: Live, tmp_path: Path) -> Terminal:
    terminal = Terminal(live, tmp_path / "ada")
    terminal("register", "ada")
    return terminal


def test_events_are_shown_from_the_first_use_on(ada: Terminal) -> None:
    assert "recorded from now on" in ada("events").output
    task = ada("run", "-d", "--", "true").output.split()[0]
    ada("cancel", task)
    eventually("it is numbered", lambda: bool(ada.json("events")), PATIENCE_S)
    [event] = ada.json("events")
    assert (event["type"], event["data"]["task"]) == ("task.cancelled", task)
    assert f"task.cancelled   task={task}" in ada("events").output
    assert ada.json("events", "--after", event["id"]) == []
    ada("events", "--pool", code=3)


def test_the_life_of_a_webhook(ada: Terminal) -> None:
    made = ada.json("webhook", "add", "http://127.0.0.1:9/", "--kinds", "task.*")
    assert made["secret"].startswith("whsec_")
    assert "task.failed" in made["kinds"]
    assert made["id"] in ada("webhook", "ls").output
    assert ada.json("webhook", "set", made["id"], "--off", "--kinds", "*")["kinds"] == ["*"]
    assert "off" in ada("webhook", "ls").output
    assert ada.json("webhook", "rotate", made["id"])["secret"] != made["secret"]
    failed = ada("webhook", "test", made["id"], code=1).output
    assert "does not respond" in failed
    assert "No deliveries yet." in ada("webhook", "log", made["id"]).output
    assert ada.json("webhook", "replay", made["id"]) == {"deliveries": 0}
    ada("webhook", "rm", made["id"])
    assert "No webhooks" in ada("webhook", "ls").output
    refused = ada("webhook", "add", "http://10.0.0.1/", code=2).output
    assert "not a public address" in refused


def test_a_pool_without_a_mail_server_says_so(ada: Terminal) -> None:
    assert "No addresses" in ada("notify", "ls").output
    assert "sends no mail" in ada("notify", "add", "ada@example.org", code=1).output
