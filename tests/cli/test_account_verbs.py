"""The verbs of accounts against a real server on loopback: register, login, logout, keys, wallets, teams, admin."""

from __future__ import annotations

import json
import platform
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner, Result

from gpool.cli.main import cli
from gpool.cli.wallet import normalised_signature
from gpool.server.outbound import own_address
from gpool.wallet.signing import WalletKey
from tests.server.server_desk import Live, serving

PASSWORD = "a long enough password"


class Terminal:
    """One person's command line, with a home of their own."""

    def __init__(self, live: Live, home: Path) -> None:
        self.live, self.home = live, home

    def __call__(self, *words: str, code: int = 0, typed: str = "", **variables: str) -> Result:
        environment = {
            "GPOOL_HOME": str(self.home),
            "GPOOL_URL": self.live.url,
            "GPOOL_KEY": "",
            "GPOOL_PASSWORD": PASSWORD,
            **variables,
        }
        result = CliRunner().invoke(cli, words, input=typed, env=environment)
        assert result.exit_code == code, result.output
        return result

    def json(self, *words: str, **more: Any) -> Any:
        return json.loads(self(*words, "--json", **more).stdout)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    with serving(tmp_path / "data") as live:
        yield live


@pytest.fixture
def ada(live: Live, tmp_path: Path) -> Terminal:
    return Terminal(live, tmp_path / "ada")


@pytest.fixture
def bob(live: Live, tmp_path: Path) -> Terminal:
    return Terminal(live, tmp_path / "bob")


def test_register_sign_out_and_sign_in(ada: Terminal) -> None:
    assert ada.json("register", "ada")["name"] == "ada"
    assert ada.json("whoami")["name"] == "ada"
    files = list((ada.home / "sessions").glob("*.json"))
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600]
    ada("logout")
    assert not list((ada.home / "sessions").glob("*.json"))
    ada("whoami", code=3)
    ada("login", "ada")
    assert ada.json("whoami")["name"] == "ada"


def test_a_wrong_password_is_exit_code_3(ada: Terminal) -> None:
    ada("register", "ada")
    ada("login", "ada", code=3, GPOOL_PASSWORD="not the password")
    assert PASSWORD not in ada("whoami").output


def test_a_command_without_a_sign_in_exits_3_with_advice(ada: Terminal) -> None:
    told = ada("ps", code=3)
    assert "gpool login" in told.output


def test_tokens_are_renewed_by_themselves(ada: Terminal) -> None:
    ada("register", "ada")
    (file,) = (ada.home / "sessions").glob("*.json")
    tokens = json.loads(file.read_text())
    file.write_text(json.dumps({**tokens, "access_token": "worn.out.token"}))
    assert ada.json("whoami")["name"] == "ada"
    renewed = json.loads(file.read_text())
    assert renewed["refresh_token"] != tokens["refresh_token"]


def test_a_revoked_session_is_exit_code_3(ada: Terminal, live: Live, tmp_path: Path) -> None:
    ada("register", "ada")
    elsewhere = Terminal(live, tmp_path / "elsewhere")
    elsewhere("login", "ada")
    elsewhere("logout", "--everywhere")
    told = ada("whoami", code=3)
    assert "gpool login" in told.output


def test_keys_are_created_listed_and_revoked(ada: Terminal) -> None:
    ada("register", "ada")
    made = ada.json("keys", "create", "ci", "--scope", "tasks:read", "--expires", "30d")
    assert [key["name"] for key in ada.json("keys", "ls")] == ["ci"]
    team = ada.json("team", "create", "lab")["id"]
    ours = ada.json("keys", "create", "ours", "--team", "lab")
    assert ours["team"] == team
    ada("keys", "revoke", ours["id"])
    assert ada.json("ps", GPOOL_KEY=made["key"]) == []
    ada("whoami", code=3, GPOOL_KEY=made["key"])  # its scope does not reach that far
    ada("keys", "revoke", made["id"])
    ada("ps", code=3, GPOOL_KEY=made["key"])
    assert ada.json("keys", "ls") == []


def test_a_wallet_signs_in_from_a_key_file_with_a_warning(ada: Terminal, tmp_path: Path) -> None:
    file = tmp_path / "wallet.key"
    file.write_text((5).to_bytes(32, "big").hex())
    file.chmod(0o600)
    result = ada("login", "--wallet-key", str(file))
    assert "not encrypted" in result.stderr
    address = WalletKey((5).to_bytes(32, "big")).address
    assert ada.json("whoami")["wallets"] == [address]
    assert [one["address"] for one in ada.json("wallet", "ls")] == [address]


def test_a_wallet_is_linked_and_unlinked(ada: Terminal, tmp_path: Path) -> None:
    ada("register", "ada")
    file = tmp_path / "wallet.key"
    file.write_text((6).to_bytes(32, "big").hex())
    linked = ada.json("wallet", "link", "--wallet-key", str(file))
    assert ada.json("wallet", "payout", linked["address"])["payout"] is True
    ada("wallet", "unlink", linked["address"], "--wallet-key", str(file))
    assert ada.json("wallet", "ls") == []


@pytest.mark.parametrize(
    "pasted",
    ["0xABcd", "ABcd", " 0xabcd \n", "'0xabcd'", '"0XABCD"', "0xab\n  cd"],
)
def test_pasted_signatures_are_normalised(pasted: str) -> None:
    assert normalised_signature(pasted) == "0xabcd"


def test_a_team_is_created_and_shared(ada: Terminal, bob: Terminal) -> None:
    ada("register", "ada")
    bob("register", "bob")
    ada("team", "create", "lab")
    token = ada.json("team", "invite", "lab", "--role", "viewer")["token"]
    assert bob.json("team", "join", token)["role"] == "viewer"
    assert [one["name"] for one in bob.json("team", "members", "lab")] == ["ada", "bob"]
    assert ada.json("team", "add", "lab", "bob", "--role", "member")["role"] == "member"
    bob("team", "leave", "lab")
    bob("team", "members", "lab", code=4)
    ada("team", "delete", "lab", "--yes")
    assert ada.json("team", "ls") == []


def test_a_named_person_joins_a_team_by_accepting(ada: Terminal, bob: Terminal) -> None:
    ada("register", "ada")
    bob("register", "bob")
    team = ada.json("team", "create", "lab")["id"]
    told = ada("team", "add", "lab", "bob")
    assert f"gpool team join {team}" in told.stdout
    assert told.stdout.replace("bob", "zoe") == ada("team", "add", "lab", "zoe").stdout
    assert [one["user"] for one in ada.json("team", "invitations", "lab")] == ["zoe", "bob"]
    ada("team", "remove", "lab", "zoe")
    assert [one["team_name"] for one in bob.json("team", "invitations")] == ["lab"]
    assert bob.json("team", "join", team)["role"] == "member"
    ada("team", "add", "lab", "zoe")
    assert [one["name"] for one in ada.json("team", "members", "lab")] == ["ada", "bob"]
    bob("team", "decline", team, code=4)


@pytest.mark.parametrize(
    "settings",
    [{"public_url": "https://10.88.0.1:8642"}, {"host": "0.0.0.0", "tls": True}, {}],
)
def test_invites_and_links_name_an_address_that_others_reach(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Frictions 7 and 8: they named loopback, or a host name that nobody resolves."""
    with serving(tmp_path / "data", **settings) as live:
        port = live.url.rpartition(":")[2]
        own = own_address(4) or platform.node()
        reached = settings.get("public_url") or (f"https://{own}:{port}" if settings else live.url)
        operator = Terminal(live, tmp_path / "home")
        known = {"GPOOL_KEY": live.key, "GPOOL_FINGERPRINT": live.fingerprint or ""}
        invite = operator("admin", "invite", **known)
        pinned = f"GPOOL_FINGERPRINT={live.fingerprint} " if live.fingerprint else ""
        assert invite.stdout.startswith(f"{pinned}gpool --url {reached} register NAME --invite ")
        assert ("For this machine only" in invite.stderr) is not bool(settings)
        link = operator.json("node", "invite", **known)["link"]
        assert link.startswith(f"gpool://{reached.partition('://')[2]}/join/")
        asked = httpx2.post(
            f"{live.url}/v1/auth/wallet/nonce",
            json={},
            verify=False,
        ).json()
        assert asked["uri"] == reached  # friction 14: of sign-in messages too


def test_operators_administer_users(ada: Terminal, live: Live) -> None:
    ada("register", "ada")
    key = {"GPOOL_KEY": live.key}
    assert [one["name"] for one in ada.json("admin", "users", "ls", **key)] == ["operator", "ada"]
    changed = ada.json(
        "admin", "users", "set", "ada", "--permission", "consumer", "--gpus", "2", **key
    )
    assert changed["permissions"] == ["consumer"]
    assert changed["quota"]["running_gpus"] == 2
    ada("admin", "users", "disable", "ada", **key)
    ada("whoami", code=3)
    ada("admin", "users", "enable", "ada", **key)
    assert "gpool" in ada("admin", "invite", **key).stdout
    ada("admin", "users", "ls", code=3)


def test_operators_guarantee_gpus_to_teams(ada: Terminal, live: Live) -> None:
    ada("register", "ada")
    ada("team", "create", "lab")
    key = {"GPOOL_KEY": live.key}
    assert [one["name"] for one in ada.json("admin", "teams", "ls", **key)] == ["lab"]
    changed = ada.json("admin", "teams", "set", "lab", "--guaranteed", "8", "--gpus", "32", **key)
    assert changed["quota"]["guaranteed_gpus"] == 8
    again = ada.json("admin", "teams", "set", "lab", "--queued", "5", **key)
    assert (again["quota"]["guaranteed_gpus"], again["quota"]["queued_tasks"]) == (8, 5)
    assert ada.json("admin", "teams", "show", "lab", **key)["quota"]["running_gpus"] == 32
    ada("admin", "teams", "set", "lab", code=2, **key)
    ada("admin", "teams", "set", "lab", "--gpus", "1", code=3)


def test_a_pinned_pool_is_signed_in_to_and_its_certificate_kept(tmp_path: Path) -> None:
    """No authority vouches for it: from the first word on it is known by its fingerprint alone."""
    with serving(tmp_path / "data", tls=True) as live:
        assert live.fingerprint is not None
        ada = Terminal(live, tmp_path / "ada")
        assert "GPOOL_FINGERPRINT" in ada("register", "ada", code=5).stderr
        pinned = {"GPOOL_FINGERPRINT": live.fingerprint}
        assert ada.json("register", "ada", **pinned)["name"] == "ada"
        assert ada.json("whoami")["name"] == "ada"  # known from now on
        told = ada("admin", "invite", GPOOL_KEY=live.key).stdout
        assert told.startswith(f"GPOOL_FINGERPRINT={live.fingerprint} gpool --url {live.url}")


def test_a_password_is_never_sent_to_another_certificate_than_the_pinned_one(
    tmp_path: Path,
) -> None:
    with serving(tmp_path / "data", tls=True) as live:
        told = Terminal(live, tmp_path / "ada")("login", "ada", code=3, GPOOL_FINGERPRINT="0" * 64)
    assert "certificate" in told.stderr
