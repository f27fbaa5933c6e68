"""Pickles from nodes of a team: loaded only if the caller trusts that team by name. The server is the real application."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gpool
from gpool import Client
from gpool.client.values import TrustedTeams
from tests.client.inprocess import Node, RealPool
from tests.client.test_untrusted_results import WAYS, planted, values

REFUSED = [gpool.UntrustedResult] * WAYS


@pytest.fixture
def open_client(real: RealPool) -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def made(key: str, **more: Any) -> Client:
        clients.append(Client("http://pool.test", key, transport=real.transport, **more))
        return clients[-1]

    yield made
    for one in clients:
        one.close()


@pytest.fixture
def owner(real: RealPool, open_client: Callable[..., Client]) -> Client:
    return open_client(real.key)


@pytest.fixture
def token_of(owner: Client) -> Callable[[str], str]:
    """Create an account and sign it in."""

    def made(name: str) -> str:
        account = {"name": name, "password": f"a long password of {name}'s"}
        owner.api.send_json("POST", "/v1/users", account)
        return str(owner.api.send_json("POST", "/v1/auth/password", account)["access_token"])

    return made


def create_team(client: Client, name: str, *others: Client) -> str:
    id_ = str(client.api.send_json("POST", "/v1/teams", {"name": name})["id"])
    for other in others:
        path = f"/v1/teams/{id_}/invites"
        token = client.api.send_json("POST", path, {"role": "member"})["token"]
        other.api.send_json("POST", "/v1/teams/join", {"token": token})
    return id_


def kinds(client: Client, trap: Path) -> list[type]:
    return [type(one) for one in values(client, planted(str(trap)))]


def test_a_pickle_of_a_team_mates_node_is_loaded_only_by_a_caller_who_trusts_the_team(
    owner: Client,
    node: Node,
    token_of: Callable[[str], str],
    open_client: Callable[..., Client],
    tmp_path: Path,
) -> None:
    ada, trap = token_of("ada"), tmp_path / "ran"
    unaware = open_client(ada)
    create_team(owner, "lab", unaware)
    create_team(unaware, "own")
    assert kinds(unaware, trap) == REFUSED  # membership alone is no trust
    assert kinds(open_client(ada, trust=["team:own"]), trap) == REFUSED  # the owner is not in it
    assert not trap.exists()
    trusting = open_client(ada, trust=["team:own", "team:lab"])
    assert list(values(trusting, planted(str(trap)))) == [None] * WAYS  # the control
    assert trap.exists()


def test_a_task_of_another_program_is_not_trusted_with_the_team(
    owner: Client,
    node: Node,
    token_of: Callable[[str], str],
    open_client: Callable[..., Client],
    tmp_path: Path,
) -> None:
    ada, trap = token_of("ada"), tmp_path / "ran"
    trusting = open_client(ada, trust=["team:lab"])
    create_team(owner, "lab", trusting)
    run = trusting.task(planted(str(trap))).submit()
    with pytest.raises(gpool.Forbidden):
        trusting.get(run.id).result()
    assert not trap.exists()
    trusting.get(run.id, trust=True).result()
    assert trap.exists()


def test_an_owner_who_left_the_team_is_no_longer_trusted(
    owner: Client,
    node: Node,
    token_of: Callable[[str], str],
    open_client: Callable[..., Client],
    tmp_path: Path,
) -> None:
    ada, trap = token_of("ada"), tmp_path / "ran"
    first = open_client(ada)
    team = create_team(first, "lab", owner)
    me = owner.api.get_json("/v1/me")["id"]
    owner.api.send("DELETE", f"/v1/teams/{team}/members/{me}")
    assert kinds(open_client(ada, trust=["team:lab"]), trap) == REFUSED
    assert not trap.exists()


def test_the_name_of_a_deleted_team_cannot_be_used_by_a_stranger_to_be_trusted(
    owner: Client,
    node: Node,
    token_of: Callable[[str], str],
    open_client: Callable[..., Client],
    tmp_path: Path,
) -> None:
    ada, trap = token_of("ada"), tmp_path / "ran"
    trusting = open_client(ada, trust=["team:lab"])
    team = create_team(trusting, "lab", owner)
    trusting.api.send("DELETE", f"/v1/teams/{team}")
    with pytest.raises(gpool.Conflict):
        create_team(owner, "lab")
    other = create_team(owner, "other", trusting)
    with pytest.raises(gpool.Conflict):
        owner.api.send_json("PATCH", f"/v1/teams/{other}", {"name": "lab"})
    with pytest.raises(gpool.NotFound, match="you are not in a team 'lab'"):
        trusting.task(planted(str(trap))).remote()
    assert not trap.exists()


def test_members_and_owners_are_read_again_after_a_while() -> None:
    members, now, asked = [{"user": "u-1"}], [0.0], []

    def get_json(path: str) -> Any:
        asked.append(path)
        return {"items": list(members)} if path.startswith("/v1/teams/") else {"owner": "u-1"}

    teams = TrustedTeams(("team:lab",), get_json, lambda name: f"tm-{name}", lambda: now[0])
    assert asked == []  # nothing is asked before a pickle arrives
    assert all(teams.include_owner_of("n-1") for _ in range(5))
    assert asked == ["/v1/teams/tm-lab/members", "/v1/nodes/n-1"]
    members.clear()
    now[0] = TrustedTeams.KEPT_S + 1
    assert not teams.include_owner_of("n-1")
    assert not teams.include_owner_of(None)
