"""Names and ids of nodes, against a real server with two owners whose machines have the same name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner

from gpool.cli.command import shown_as
from gpool.cli.main import cli
from tests.server.server_desk import Live, serving
from tests.tools.nodes import a_key, join_request
from tests.tools.processes import PATIENCE_S

NODE = {"name": "vm", "cpu_milli": 2000, "memory_bytes": 8 << 30, "gpus": []}
ADA = {"name": "ada", "password": "a long way to Tipperary"}


@dataclass(frozen=True)
class Person:
    url: str
    key: str
    home: Path

    def __call__(self, *words: str, code: int = 0) -> str:
        env = {"GPOOL_HOME": str(self.home), "GPOOL_URL": self.url, "GPOOL_KEY": self.key}
        result = CliRunner().invoke(cli, words, env=env)
        assert result.exit_code == code, result.output
        return result.output

    def ask(self, path: str, document: object, code: int = 201) -> Any:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        answer = httpx2.post(self.url + path, json=document, headers=headers, timeout=PATIENCE_S)
        assert answer.status_code == code, answer.text
        return answer.json()

    def cordoned(self, node: str) -> bool:
        return json.loads(self("node", "show", node, "--json"))["cordoned"] is not None

    def availability(self, node: str) -> str:
        return str(json.loads(self("node", "show", node, "--json"))["availability"])


@dataclass(frozen=True)
class Two:
    operator: Person
    ada: Person
    first: str
    second: str


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    with serving(tmp_path / "data") as live:
        yield live


@pytest.fixture
def two(live: Live, tmp_path: Path) -> Two:
    nobody = Person(live.url, "", tmp_path / "nobody")
    nobody.ask("/v1/users", ADA)
    token = nobody.ask("/v1/auth/password", ADA, 200)["access_token"]
    operator = Person(live.url, live.key, tmp_path / "operator")
    ada = Person(live.url, token, tmp_path / "ada")
    challenge = nobody.ask("/v1/nodes/challenges", {}, 200)
    first = operator.ask("/v1/nodes", join_request(a_key(), challenge, **NODE))["id"]
    return Two(operator, ada, first, ada.ask("/v1/nodes", NODE)["id"])


def test_an_ambiguous_node_name_is_refused_with_the_ids(
    two: Two,
) -> None:
    said = two.operator("admin", "cordon", "vm", code=2)
    assert "2 nodes have the name 'vm'" in said
    assert two.first in said
    assert two.second in said
    assert not two.operator.cordoned(two.first)
    assert not two.operator.cordoned(two.second)
    two.operator("admin", "reservations", "create", "vm", "--user", "ada", "--to", "23:59", code=2)
    two.operator("admin", "cordon", two.second)
    assert not two.operator.cordoned(two.first)
    assert two.operator.cordoned(two.second)


def test_an_owners_own_nodes_are_preferred(two: Two) -> None:
    two.ada("node", "pause", "vm")
    assert two.ada.availability(two.first) == "available"
    assert two.ada.availability(two.second) == "paused"
    two.ada("node", "resume")  # the only one they have
    assert two.ada.availability(two.second) == "available"
    two.ada("node", "show", "vm")
    two.ada("node", "remove", "vm", "--yes")
    two.ada.ask("/v1/nodes", {**NODE, "name": "cellar"})
    assert f'"{two.first}"' in two.ada("node", "show", "vm", "--json")  # the only one of that name
    cellar = two.ada("node", "show", "cellar").split()[1]
    said = two.ada("node", "pause", "attic", code=4)
    assert f"{cellar} (cellar)" in said
    assert two.first not in said


def test_operators_see_the_tasks_of_all_users_with_user_names(two: Two) -> None:
    task = two.ada("run", "-d", "--label", "nvme", "--", "true").strip()
    assert "No tasks yet" in two.operator("ps")
    for verb in ("ps", "queue"):
        [line] = two.operator(verb, "--everybody").splitlines()[1:]
        assert line.split()[:4] == [task, "true", "ada", "queued"]
        assert "task.list_all needs operator" in two.ada(verb, "--everybody", code=3)
    assert "No node has the label nvme" in two.ada("queue")


def test_an_owner_removes_a_node_after_a_confirmation(two: Two) -> None:
    two.ada("node", "remove", "vm", code=1)  # nobody said yes
    two.ada("node", "remove", two.first, "--yes", code=4)  # somebody else's
    assert two.ada("node", "remove", "vm", "--yes") == "vm removed\n"
    assert [one["id"] for one in json.loads(two.ada("node", "ls", "--json"))] == [two.first]
    assert two.ada.ask("/v1/nodes", NODE)["id"] != two.second  # its name is free again
    assert "gpool whoami" in two.ada("admin", "policy", code=3)


def test_status_shows_the_requested_resources(two: Two) -> None:
    words = "--cpus 1.5 --memory 4GB --disk 20GB --label nvme --label zone=a --max-price 0.4 --timeout 2h --retries 3"
    task = two.ada("run", "-d", *words.split(), "--", "true").strip()
    shown = dict(line.split(maxsplit=1) for line in two.ada("status", task).splitlines())
    asked = {name: shown[name] for name in ("cpus", "memory", "disk", "labels", "max_price")}
    assert asked == {
        "cpus": "1.5",
        "memory": "4GB",
        "disk": "20GB",
        "labels": "nvme zone=a",
        "max_price": "0.40/h",
    }
    assert (shown["timeout"], shown["retries"], shown["tier"]) == ("7200 s", "3", "container")
    assert "engine" not in shown
    gang = "--nodes 2 --engine ray --on-loss end"
    task = two.ada("run", "-d", *gang.split(), "--", "true").strip()
    shown = dict(line.split(maxsplit=1) for line in two.ada("status", task).splitlines())
    assert (shown["nodes"], shown["engine"], shown["on_loss"]) == ("2", "ray", "end")


def test_a_restricted_key_sees_ids_instead_of_names(two: Two) -> None:
    def with_key(who: Person, *scopes: str) -> Person:
        made = who.ask("/v1/keys", {"name": "small", "scopes": scopes})
        return Person(who.url, made["key"], who.home)

    owner = with_key(two.ada, "nodes:read", "nodes:write")
    assert "use an id instead" in owner("node", "pause", "vm", code=2)
    owner("node", "pause", two.second)
    two.operator("node", "remove", two.first, "--yes")
    owner("node", "resume", "vm")
    two.operator("admin", "reservations", "create", "vm", "--user", "ada", "--to", "1h")
    two.operator("admin", "policy", "--weight", "ada=2")
    two.operator("admin", "users", "set", "ada", "--permission", "operator")
    watcher = with_key(two.ada, "admin")
    assert "ada=2" in watcher("admin", "policy")
    assert two.second in watcher("admin", "reservations", "ls")
    watcher("queue", "--everybody")


@pytest.mark.parametrize("name", ["n-1", "n-0000000000002", "u-0000000000001", "tm-0000000000001"])
def test_a_name_that_looks_like_an_id_is_never_shown(name: str) -> None:
    assert shown_as("n-0000000000001", name) == "n-0000000000001"
    assert shown_as("tm-0000000000009", name.replace("n-", "tm-")) == "tm-0000000000009"


@pytest.mark.parametrize("name", ["lab", "gpu-box", "my-lab", "r-and-d", "e-"])
def test_other_names_are_shown(name: str) -> None:
    assert shown_as("n-0000000000001", name) == name


def test_status_says_that_a_task_with_gpus_gets_its_share_of_the_node(two: Two) -> None:
    task = two.ada("run", "-d", "--gpu", "8", "--", "true").strip()
    shown = dict(line.split(maxsplit=1) for line in two.ada("status", task).splitlines())
    assert shown["cpus"] == shown["memory"] == "its GPUs' share of the node"
    task = two.ada("run", "-d", "--gpu", "8", "--cpus", "3", "--", "true").strip()
    shown = dict(line.split(maxsplit=1) for line in two.ada("status", task).splitlines())
    assert (shown["cpus"], shown["memory"]) == ("3.0", "its GPUs' share of the node")
