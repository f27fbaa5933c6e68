"""A joined machine without an account: its own files answer `node ls`, `pause` and `resume`."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import httpx2
import pytest
from click.testing import CliRunner

from gpool import Client
from gpool.agent.machine.monitor import LoadMeter, facts_now
from gpool.agent.machine.policy import OwnerPolicy, reason_to_close
from gpool.cli.lending.doctor import pool_findings
from gpool.cli.lending.join import agent_folder, saved_identity
from gpool.cli.lending.machine import lent_node
from gpool.cli.main import cli
from gpool.client.config import load
from gpool.core.errors import Invalid

NOW = datetime(2026, 11, 16, 12, tzinfo=UTC)


class NobodyKnown(httpx2.BaseTransport):
    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        problem = {"code": "not_signed_in", "detail": "nobody is signed in"}
        return httpx2.Response(401, json=problem)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPOOL_HOME", str(tmp_path))
    for name in ("GPOOL_URL", "GPOOL_KEY", "GPOOL_FINGERPRINT", "GPOOL_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    join(tmp_path, "10.0.0.7_8642", "https://10.0.0.7:8642")
    return tmp_path


def join(home: Path, name: str, url: str) -> Path:
    file = home / "nodes" / f"{name}.json"
    file.parent.mkdir(exist_ok=True)
    document = {"url": url, "fingerprint": "a" * 64, "id": "n-0000000000001", "name": "studio"}
    file.write_text(json.dumps({**document, "server": "pool-x"}))
    return file


def test_a_joined_machine_talks_to_its_pool_and_pins_its_certificate(home: Path) -> None:
    found = load()
    assert (found.url, found.fingerprint) == ("https://10.0.0.7:8642", "a" * 64)
    assert load("http://127.0.0.1:9").url == "http://127.0.0.1:9"
    join(home, "other_1", "http://127.0.0.1:1")
    assert load().url == "http://127.0.0.1:8642"  # two pools: neither


def test_the_person_at_the_machine_pauses_and_resumes_it_without_an_account(home: Path) -> None:
    with Client("http://pool.test", transport=NobodyKnown()) as client:

        def gpool(*args: str) -> tuple[int, str, str]:
            done = CliRunner().invoke(cli, list(args), obj=client)
            return done.exit_code, done.stdout, done.stderr

        def closed() -> str:
            data = lent_node(None).data
            facts = facts_now(NOW, LoadMeter(1), lambda: None, data=data)
            return reason_to_close(OwnerPolicy(), facts)

        assert closed() == ""
        code, out, _ = gpool("node", "pause")
        assert (code, "paused here" in out) == (0, True)
        assert "paused on the machine itself" in closed()
        code, out, note = gpool("node", "ls")
        assert (code, "paused here" in out, "gpool login" in note) == (0, True, True)
        assert gpool("node", "pause", "other")[0] == 4
        assert gpool("node", "resume", "studio")[0] == 0
        assert closed() == ""
        assert gpool("node", "drain")[0] == 3  # needs the owner


def test_a_machine_that_joined_no_pool_is_asked_to_sign_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPOOL_HOME", str(tmp_path))
    with Client("http://pool.test", transport=NobodyKnown()) as client:
        for args in (["node", "ls"], ["node", "pause"]):
            done = CliRunner().invoke(cli, args, obj=client)
            assert done.exit_code == 3
            assert "gpool login" in done.stderr


def test_joining_again_needs_no_link(home: Path) -> None:
    file, identity = saved_identity(home, None)
    assert (identity.id, identity.address.url) == ("n-0000000000001", "https://10.0.0.7:8642")
    join(home, "other_1", "http://127.0.0.1:1")
    with pytest.raises(Invalid, match="name one"):
        saved_identity(home, None)
    assert saved_identity(home, "https://10.0.0.7:8642/")[0] == file
    with pytest.raises(Invalid, match="joined no pool"):
        saved_identity(home / "empty", None)


def test_the_agents_data_lie_in_the_data_folder_unless_an_older_folder_exists(home: Path) -> None:
    file, _ = saved_identity(home, None)
    assert agent_folder(file) == home / "data" / "nodes" / "10.0.0.7_8642"
    file.with_suffix("").mkdir()
    assert agent_folder(file) == home / "nodes" / "10.0.0.7_8642"


class Answering(NobodyKnown):
    """A ready server that knows nobody."""

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/readyz":
            return httpx2.Response(200, json={"status": "ok"})
        return super().handle_request(request)


def test_doctor_finds_no_problem_in_a_joined_machine_without_an_account(home: Path) -> None:
    with Client("http://pool.test", transport=Answering()) as client:
        assert {one.name: one.ok for one in pool_findings(client, NOW)}["account"]
        for file in (home / "nodes").iterdir():
            file.unlink()
        found = {one.name: one.ok for one in pool_findings(client, NOW)}
        assert (found["server"], found["key"]) == (True, False)  # no node: an account is needed
