"""Operators' verbs against a real server on loopback: policy, cordon, drain, reservations, explain."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner

from gpool.cli.admin.policy import NOT_LEARNT
from gpool.cli.main import cli
from gpool.core.model import EndReason
from gpool.core.scheduler.place.portfolio import LEAST_ARRIVALS
from gpool.server.store.operations.tasks.submissions import MOST_ALIKE
from gpool.transfer.node_proofs import NodeKey
from gpool.wire.frames import Finished, Started, Stop, StopReason
from tests.server.server_desk import Live, serving
from tests.tools.nodes import joined
from tests.tools.processes import PATIENCE_S
from tests.tools.scripted_agent import ScriptedAgent

NODE = {"name": "bench", "cpu_milli": 2000, "memory_bytes": 8 << 30, "gpus": []}
NEVER_S = 36_000.0  # scripted nodes do not beat; none is to be missed
TIMES = ("--from", "2001-01-01T00:00:00Z", "--to", "2999-01-01T00:00:00Z")


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    with serving(tmp_path / "data", ttl_s=NEVER_S) as live:
        yield live


class Operator:
    def __init__(self, live: Live, home: Path) -> None:
        self._env = {"GPOOL_HOME": str(home), "GPOOL_URL": live.url, "GPOOL_KEY": live.key}

    def __call__(self, *words: str, code: int = 0) -> str:
        result = CliRunner().invoke(cli, words, env=self._env)
        assert result.exit_code == code, result.output
        return result.output

    def json(self, *words: str) -> Any:
        return json.loads(self(*words, "--json"))


@pytest.fixture
def gpool(live: Live, tmp_path: Path) -> Operator:
    return Operator(live, tmp_path / "home")


def test_a_policy_is_shown_simulated_changed_and_restored(gpool: Operator) -> None:
    configured = gpool.json("admin", "policy")["order"]
    tried = gpool("admin", "policy", "--order", "round_robin", "--dry-run")
    assert tried == "Nothing waits: it would change nothing now.\n"
    assert gpool.json("admin", "policy")["order"] == configured
    told = gpool.json("admin", "policy", "--order", "round_robin", "--ageing", "10m")
    assert (told["order"], told["ageing_s"], told["changed"]) == (
        "round_robin",
        600,
        ["order", "ageing_s"],
    )
    assert "round_robin" in gpool("admin", "policy")
    assert gpool.json("admin", "policy", "--order", "configured")["order"] == configured
    gpool("admin", "policy", "--order", "luck", code=2)


def test_a_node_is_cordoned_drained_and_reserved_by_its_name(gpool: Operator, live: Live) -> None:
    made = httpx2.post(f"{live.url}/v1/nodes", json=NODE, headers=live.headers, timeout=PATIENCE_S)
    assert made.status_code == 201, made.text
    assert gpool.json("node", "show", "bench")["cordoned"] is None
    said = gpool("admin", "cordon", "bench", "--why", "new fans")
    assert "takes no new tasks; 0 still running" in said
    assert "cordoned" in gpool("node", "ls").partition("\n")[2]
    assert "new fans" in gpool("node", "show", "bench")
    assert gpool.json("admin", "drain", "bench")["preempted"] == 0
    gpool("admin", "uncordon", "bench")
    gpool("admin", "uncordon", "bench", code=4)
    me = gpool.json("whoami")["id"]
    id_ = gpool("admin", "reservations", "create", "bench", "--user", me, *TIMES).split()[0]
    [listed] = gpool.json("admin", "reservations", "ls")
    assert (listed["id"], listed["holds"]) == (id_, True)
    gpool("admin", "reservations", "delete", id_)
    assert gpool.json("admin", "reservations", "ls") == []


def test_a_weight_for_a_name_shared_by_team_and_user_is_refused(gpool: Operator) -> None:
    me = gpool.json("whoami")
    team = gpool.json("team", "create", me["name"])["id"]
    told = gpool("admin", "policy", "--weight", f"{me['name']}=3", code=2)
    assert f"{team} or {me['id']}" in told
    assert gpool.json("admin", "policy", "--weight", f"{team}=2")["weights"] == {team: 2}


def test_teams_and_users_are_named_and_times_without_a_zone_are_local(
    gpool: Operator, live: Live
) -> None:
    made = httpx2.post(f"{live.url}/v1/nodes", json=NODE, headers=live.headers, timeout=PATIENCE_S)
    assert made.status_code == 201, made.text
    team = gpool.json("team", "create", "lab")["id"]
    me = gpool.json("whoami")
    told = gpool.json("admin", "policy", "--weight", "lab=2", "--weight", f"{me['name']}=3")
    assert told["weights"] == {team: 2, me["id"]: 3}
    assert "gpool admin users ls" in gpool("admin", "policy", "--weight", "nobody=2", code=4)
    times = ("--from", "2001-01-01T00:00", "--to", "2999-01-01T00:00")
    people = ("--team", "lab", "--user", me["name"])
    gpool("admin", "reservations", "create", "bench", *people, *times)
    [listed] = gpool.json("admin", "reservations", "ls")
    assert (listed["teams"], listed["users"]) == ([team], [me["id"]])


def test_the_tasks_of_a_team_are_run_and_listed_by_its_name(gpool: Operator) -> None:
    gpool("team", "create", "lab")
    id_ = gpool("run", "--team", "lab", "-d", "--", "true").strip()
    assert [one["id"] for one in gpool.json("ps", "--team", "lab")] == [id_]
    assert gpool.json("ps") == []
    gpool("run", "--team", "nosuch", "-d", "--", "true", code=4)
    gpool("wait", id_, "--timeout", "0", code=2)  # said wrongly; gpool is not at fault


# ---- with tasks that run and wait


@pytest.fixture
def agents(live: Live) -> Iterator[Callable[..., ScriptedAgent]]:
    """Nodes on real sockets; they do nothing unless told."""

    def ask(path: str, document: dict[str, Any]) -> dict[str, Any]:
        answer = httpx2.post(
            f"{live.url}{path}", json=document, headers=live.headers, timeout=PATIENCE_S
        )
        found: dict[str, Any] = answer.json()
        return found

    made: list[ScriptedAgent] = []

    def joining(name: str, cpus: int = 1, site: str = "") -> ScriptedAgent:
        key = NodeKey(hashlib.sha256(name.encode()).digest())
        made.append(ScriptedAgent(live.url, joined(ask, key, name=name), cpus, site))
        made[-1].connect()
        return made[-1]

    yield joining
    for agent in made:
        agent.close()


def submitted(gpool: Operator, *options: str) -> str:
    return gpool("run", "--detach", *options, "--", "true").strip().splitlines()[-1]


def test_a_dry_run_lists_changed_starts_and_changes_nothing(
    gpool: Operator, live: Live, agents: Callable[..., ScriptedAgent]
) -> None:
    agent = agents("box")
    gpool("admin", "policy", "--order", "fcfs")
    first = submitted(gpool)
    lease = agent.granted(1)[-1]
    agent.report(Started(lease.task, lease.epoch))
    httpx2.get(
        f"{live.url}/v1/tasks/{first}?wait=3", headers=live.headers, timeout=PATIENCE_S
    )  # it takes its time
    taken = 60_000_000  # as its node says; it is not believed more than the server saw
    agent.report(Finished(lease.task, lease.epoch, EndReason.EXITED, 0, duration_us=taken))
    submitted(gpool)
    agent.granted(2)
    older, newer = submitted(gpool), submitted(gpool, "--priority", "90")
    told = gpool("admin", "policy", "--order", "priority", "--dry-run")
    assert told.startswith("Would start 1 task sooner, 1 later; 0 of 2 as now.")
    assert older in told
    assert newer in told
    assert gpool.json("admin", "policy")["order"] == "fcfs"
    assert gpool.json("explain", newer)["ahead"] == 1
    gpool("admin", "policy", "--order", "priority")
    assert gpool.json("explain", newer)["ahead"] == 0


def test_an_operator_certifies_labels_of_a_node(gpool: Operator, live: Live) -> None:
    made = httpx2.post(f"{live.url}/v1/nodes", json=NODE, headers=live.headers, timeout=PATIENCE_S)
    assert made.status_code == 201, made.text
    said = gpool("admin", "certify", "bench", "hipaa", "tier=vm")
    assert said == "bench: certified:hipaa certified:tier=vm\n"
    assert gpool.json("node", "show", "bench")["labels"] == ["certified:hipaa", "certified:tier=vm"]
    assert "no certified labels" in gpool("admin", "certify", "bench", "--none")
    gpool("admin", "certify", "bench", code=2)


def test_draining_a_node_preempts_a_whole_gang_and_the_cordon_blocks_it(
    gpool: Operator, agents: Callable[..., ScriptedAgent]
) -> None:
    agents_by_name = {name: agents(name, site="lab") for name in ("one", "two")}
    task = submitted(gpool, "--nodes", "2", "--preemptible")
    for agent in agents_by_name.values():
        lease = agent.granted(1)[-1]
        agent.report(Started(lease.task, lease.epoch))
    told = gpool("admin", "drain", "two", "--why", "new disks")
    assert "two takes no new tasks; 1 still running" in told
    for agent in agents_by_name.values():
        assert agent.awaited(Stop).reason is StopReason.PREEMPTED
        lease = agent.granted(1)[-1]
        agent.report(Finished(lease.task, lease.epoch, EndReason.PREEMPTED))
    explained = gpool.json("explain", task)
    assert explained["code"] == "cordoned"
    assert "was stopped 1 time for other tasks or by its node's owner" in explained["sentence"]
    assert "two could run it, but an operator lets nothing new start there" in explained["sentence"]
    assert [one["change"] for one in explained["suggestions"]] == ["--nodes 1"]
    gpool("admin", "uncordon", "two")
    for agent in agents_by_name.values():
        assert agent.granted(2)[-1].epoch == 2


def test_reserved_nodes_take_no_gangs_of_other_users(
    gpool: Operator, live: Live, agents: Callable[..., ScriptedAgent]
) -> None:
    agents("one", site="lab")
    agents("two", site="lab")
    made = httpx2.post(
        f"{live.url}/v1/users",
        json={"name": "ana", "password": "a long enough password"},
        timeout=PATIENCE_S,
    )
    assert made.status_code == 201, made.text
    team = gpool.json("team", "create", "class")["id"]
    id_ = gpool("admin", "reservations", "create", "two", "--team", team, *TIMES).split()[0]
    gpool("admin", "reservations", "ls")
    session = httpx2.post(
        f"{live.url}/v1/auth/password",
        json={"name": "ana", "password": "a long enough password"},
        timeout=PATIENCE_S,
    ).json()
    headers = {"authorization": f"Bearer {session['access_token']}"}
    answer = httpx2.post(
        f"{live.url}/v1/tasks",
        json={"command": ["true"], "nodes": 2},
        headers=headers,
        timeout=PATIENCE_S,
    )
    assert answer.status_code == 202, answer.text
    task = answer.json()["ids"][0]
    found = httpx2.get(
        f"{live.url}/v1/tasks/{task}/explain", headers=headers, timeout=PATIENCE_S
    ).json()
    assert found["code"] == "reserved"
    assert found["sentence"] == "two could run it, but is reserved for others just now."
    gpool("admin", "reservations", "delete", id_)
    assert httpx2.get(
        f"{live.url}/v1/tasks/{task}/explain", headers=headers, timeout=PATIENCE_S
    ).json()["code"] in (
        "next",
        "leased",
    )


def test_explain_prints_the_sentence_first(gpool: Operator) -> None:
    task = gpool("run", "--detach", "--", "true").strip().splitlines()[-1]
    assert gpool("explain", task).startswith("No node has joined the pool yet")
    assert gpool.json("explain", task)["code"] == "no_node"


def test_the_policy_shows_what_learning_still_needs(gpool: Operator) -> None:
    assert re.findall(r"\d+", NOT_LEARNT) == [str(2 * LEAST_ARRIVALS), str(MOST_ALIKE)]
    assert NOT_LEARNT in gpool("admin", "policy", "--learn")


def test_a_quota_is_shown_as_text_and_can_be_reset(gpool: Operator) -> None:
    me = gpool.json("whoami")["name"]
    said = gpool("admin", "users", "set", me, "--gpus", "2.5", "--queued", "9", "--storage", "1GB")
    assert "at most 2.5 GPU(s), at most 9 waiting task(s), at most 1.0 GB stored" in said
    said = gpool("admin", "users", "set", me, "--gpus", "configured", "--storage", "configured")
    assert "quota        at most 9 waiting task(s)\n" in said
    assert gpool.json("admin", "users", "show", me)["quota"]["running_gpus"] is None
    said = gpool("admin", "users", "set", me, "--queued", "configured")
    assert "server default" in said
    for words in (
        ("--gpus", "all"),
        ("--gpus", "-1"),
        ("--gpus", "inf"),
        ("--gpus", "nan"),
        ("--queued", "1.5"),
        ("--storage", "10"),
    ):
        said = gpool("admin", "users", "set", me, *words, code=2)
        assert said.startswith(f"gpool: {words[0]} '{words[1]}' is ")
        assert said.endswith("or configured\n")


def test_a_reservation_ends_after_it_begins_and_is_listed_by_names(
    gpool: Operator, live: Live
) -> None:
    made = httpx2.post(f"{live.url}/v1/nodes", json=NODE, headers=live.headers, timeout=PATIENCE_S)
    assert made.status_code == 201, made.text
    team = gpool.json("team", "create", "lab")["id"]
    create = ("admin", "reservations", "create", "bench")
    for first, last in (("09:00", "18:00"), ("18:00", "09:00")):  # one of them across midnight
        one = gpool.json(*create, "--team", "lab", "--from", first, "--to", last)
        begins, ends = (
            datetime.fromisoformat(one[name]).astimezone() for name in ("first", "last")
        )
        assert (f"{begins:%H:%M}", f"{ends:%H:%M}") == (first, last)
        assert timedelta(0) < ends - begins < timedelta(hours=20)
    one = gpool.json(*create, "--team", "lab", "--to", "3h", "--why", "class")
    assert one["holds"]
    listed = gpool("admin", "reservations", "ls")
    assert " bench " in listed
    assert " lab " in listed
    assert team not in listed
    said = gpool(*create, "--team", "lab", "--from", "2030-01-02T00:00", "--to", "2030-01-01T00:00", code=2)  # fmt: skip
    assert "--to 2030-01-01T00:00 is not after --from 2030-01-02T00:00" in said
    assert "--team" in gpool(*create, "--to", "3h", code=2)
    gpool("admin", "policy", "--weight", "lab=2")
    shown = gpool("admin", "policy")
    assert "lab=2" in shown
    assert "fair_share fcfs priority round_robin shortest" in shown
