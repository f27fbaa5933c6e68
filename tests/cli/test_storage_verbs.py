"""The verbs delete, artifacts, storage and account against a real server on loopback."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from gpool import Client
from tests.cli.test_account_verbs import Terminal
from tests.server.server_desk import Live, serving


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    with serving(tmp_path / "data") as live:
        yield live


@pytest.fixture
def ada(live: Live, tmp_path: Path) -> Terminal:
    terminal = Terminal(live, tmp_path / "ada")
    terminal("register", "ada")
    return terminal


def submitted(ada: Terminal) -> str:
    return str(ada("run", "-d", "--", "true").stdout.split()[-1])


def test_a_task_is_cancelled_then_deleted(ada: Terminal) -> None:
    task, other = submitted(ada), submitted(ada)
    refused = ada("delete", task, code=1)
    assert "cancel" in refused.output
    ada("cancel", task)
    assert ada("delete", task).output == f"{task} deleted\n"
    assert ada("status", task, code=4)
    ada("cancel", other)
    mixed = ada("delete", task, other, code=4)
    assert f"{other} deleted" in mixed.output
    assert ada.json("ps") == []
    assert ada("delete", "n-0000000000000", code=2)


def test_uploads_are_listed_and_deleted(ada: Terminal, live: Live, tmp_path: Path) -> None:
    key = ada.json("keys", "create", "ci")["key"]
    with Client(live.url, key) as client:
        sha256 = client.artifacts.put(b"some bytes")
        assert client.data.artifacts()["used_bytes"] == 10
    assert sha256 == hashlib.sha256(b"some bytes").hexdigest()
    listed = ada("artifacts", "ls")
    assert sha256 in listed.output
    assert "10 bytes" in listed.output
    ada("artifacts", "delete", sha256)
    assert ada.json("artifacts", "ls")["items"] == []


def test_storage_is_shown_by_use(ada: Terminal, live: Live) -> None:
    assert ada("storage").output.startswith("Nothing is stored.")
    key = ada.json("keys", "create", "ci")["key"]
    with Client(live.url, key) as client:
        client.artifacts.put(b"some bytes")
        headers = {**client_headers(key), "Content-Range": "bytes 0-0/500"}
        begun = httpx2.put(f"{live.url}/v1/artifacts/{'ab' * 32}", content=b"x", headers=headers)
        assert begun.status_code == 202
    submitted(ada)
    found = ada.json("storage")
    sizes = {item["used_as"]: (item["count"], item["size_bytes"]) for item in found["items"]}
    assert sizes["upload"] == (1, 10)
    assert sizes["unfinished"] == (1, 500)
    count, rows = sizes["rows"]
    assert (count, found["used_bytes"]) == (None, rows + 510)
    assert list(sizes) == sorted(sizes, key=lambda use: -sizes[use][1])
    shown = ada("storage").output
    assert "uploads that no task uses" in shown
    assert f"the quota is {found['limit_bytes']}" in shown
    ada("team", "create", "vision")
    assert ada.json("storage", "--team", "vision")["used_bytes"] == 0
    assert ada("storage", "--team", "unknown", code=4)


def client_headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_an_export_is_written_once(ada: Terminal, tmp_path: Path) -> None:
    task = submitted(ada)
    file = tmp_path / "mine.jsonl"
    ada("account", "export", str(file))
    kinds = [json.loads(line)["kind"] for line in file.read_text().splitlines()]
    assert kinds == ["account", "session", "task"]
    assert task in file.read_text()
    assert "exists" in ada("account", "export", str(file), code=2).output


def test_an_account_is_deleted_after_a_question_and_the_password(ada: Terminal) -> None:
    submitted(ada)
    ada("account", "delete", typed="n\n", code=1)
    assert ada.json("whoami")["name"] == "ada"
    ada("account", "delete", "--yes", GPOOL_PASSWORD="not the right password", code=3)
    done = ada("account", "delete", typed="y\n")
    assert "deleted" in done.output
    ada("login", "ada", code=3)
    taken = ada("register", "ada", code=1)
    assert "a deleted account had the name 'ada'" in taken.output  # others may still lend to it
    ada("register", "ada2")
    assert ada.json("ps") == []
