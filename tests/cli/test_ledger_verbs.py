"""The verbs balance, budget and admin ledger against a real server on loopback."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.cli.test_account_verbs import Terminal
from tests.cli.test_policy_verbs import Operator
from tests.server.server_desk import Live, serving


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    with serving(tmp_path / "data") as live:
        yield live


@pytest.fixture
def admin(live: Live, tmp_path: Path) -> Operator:
    return Operator(live, tmp_path / "operator")


@pytest.fixture
def ada(live: Live, tmp_path: Path) -> Terminal:
    terminal = Terminal(live, tmp_path / "ada")
    terminal("register", "ada")
    return terminal


def test_a_grant_is_seen_in_the_balance_and_moves_once(admin: Operator, ada: Terminal) -> None:
    assert "No entries yet." in ada("balance").output
    words = ("admin", "ledger", "grant", "ada", "25.50", "--id", "welcome", "--note", "workshop")
    assert admin(*words) == "welcome moved\n"
    assert "nothing was moved again" in admin(*words)
    refused = admin("admin", "ledger", "grant", "ada", "1", "--id", "welcome", code=1)
    assert "belongs to another transfer" in refused
    shown = ada("balance").output
    assert "balance  25.50 credits" in shown
    assert "welcome" in shown
    found = ada.json("balance")
    assert found["balance_microcredits"] == 25_500_000
    assert [one["kind"] for one in found["entries"]] == ["grant"]
    assert "25.50" in admin("admin", "ledger", "show", "ada")
    assert "treasury   -25.50 credits" in admin("admin", "ledger", "show")


def test_users_can_neither_grant_nor_read_the_accounts_of_others(
    admin: Operator, ada: Terminal, live: Live, tmp_path: Path
) -> None:
    bob = Terminal(live, tmp_path / "bob")
    bob("register", "bob")
    me = ada.json("whoami")["id"]
    bob("admin", "ledger", "grant", me, "5", code=3)
    bob("admin", "ledger", "show", me, code=4)
    bob("budget", "--user", me, "--set", "1", code=4)
    assert admin.json("admin", "ledger", "show", "ada")["balance_microcredits"] == 0


def test_a_budget_is_set_shown_and_removed(ada: Terminal, admin: Operator) -> None:
    assert "no budget" in ada("budget").output
    assert "of 50.00" in ada("budget", "--set", "50").output
    assert ada.json("budget")["budget_microcredits"] == 50_000_000
    assert "of 9.00" in admin("budget", "--user", "ada", "--set", "9")
    assert "no budget" in ada("budget", "--none").output
    assert "like 2.50" in ada("budget", "--set", "-1", code=2).output
    ada("budget", "--set", "5", "--none", code=2)


def test_a_team_has_a_balance_and_a_budget_of_its_own(ada: Terminal, admin: Operator) -> None:
    team = ada.json("team", "create", "lab")["id"]
    admin("admin", "ledger", "grant", team, "3")
    assert ada.json("balance", "--team", "lab")["balance_microcredits"] == 3_000_000
    assert ada.json("balance")["balance_microcredits"] == 0
    assert "of 2.00" in ada("budget", "--team", "lab", "--set", "2").output


def test_verify_names_the_entry_that_was_changed(
    admin: Operator, ada: Terminal, tmp_path: Path
) -> None:
    admin("admin", "ledger", "grant", "ada", "1", "--id", "one")
    sound = admin("admin", "ledger", "verify")
    assert sound.startswith("Transfers verified: 1")
    assert "The books are sound." in sound
    with closing(sqlite3.connect(tmp_path / "data" / "gpool.db")) as raw, raw:
        raw.execute("UPDATE ledger_entries SET amount = amount + 1 WHERE account_id > 2")
    said = admin("admin", "ledger", "verify", code=1)
    assert "transfer one: its entries sum to 1" in said
    assert "of transfer one: the balance after it is 1000000, not 1000001" in said
    assert not admin_json_sound(admin)
    assert ada("balance")


def admin_json_sound(admin: Operator) -> bool:
    said = admin("admin", "ledger", "verify", "--json", code=1)
    return '"sound": true' in said


def test_a_refund_needs_a_charge(admin: Operator) -> None:
    said = admin("admin", "ledger", "refund", "nothing", "1", code=1)
    assert "no charge" in said
