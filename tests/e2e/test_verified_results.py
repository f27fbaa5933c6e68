"""Verified results on real nodes of two owners: a command and a function, by the command line and by Python."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

import cloudpickle
import pytest

from gpool import Client
from tests.tools.processes import LONG_LEASE, Daemon, Pool

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def lend(pool: Pool, owner: Client, name: str) -> None:
    """Join a node of an account of its own."""
    account = {"name": name, "password": f"a long password of {name}'s"}
    owner.api.send_json("POST", "/v1/users", account)
    token = owner.api.send_json("POST", "/v1/auth/password", account)["access_token"]
    with Client(pool.address, token) as lender:
        link = lender.api.send_json("POST", "/v1/nodes/invites", {})["link"]
    log = pool.directory / f"{name}.log"
    agent = Daemon(["join", link, "--name", name], pool.environment(name), log)
    pool.agents[name] = agent
    agent.start()
    pool.until_online(name)


@pytest.fixture(scope="module")
def lenders(
    tmp_path_factory: pytest.TempPathFactory, require: Callable[[str], None]
) -> Iterator[Pool]:
    require("bubblewrap")
    pool = Pool(tmp_path_factory.mktemp("pool"), LONG_LEASE)
    try:
        pool.start(agents=())
        with Client(pool.address, pool.key) as owner:
            for name in ("bob", "cyd"):
                lend(pool, owner, name)
        yield pool
    finally:
        pool.stop()


def test_a_command_runs_on_two_owners_nodes_and_prints_once(lenders: Pool) -> None:
    done = lenders.gpool("run", "--verify", "2", "--", "python3", "-c", "print(6*7)")
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr
    [task] = lenders.json("ps", "--limit", "1")
    found = lenders.status(task["id"])
    assert found["verification"]["agreed"] == 2
    assert found["verify"] == 2


def third(number: float) -> list[float]:
    """Differ from run to run in the last digits, as GPUs do."""
    return [number / 3 + 1e-12 * (time.time_ns() % 97), number]


def test_a_function_is_verified_with_a_tolerance(lenders: Pool) -> None:
    with Client(lenders.address, lenders.key) as client:
        task = client.task(third, verify=2, compare=1e-6)
        found = task.remote(1.0)
        assert found == [pytest.approx(1 / 3), 1.0]
        assert [one[1] for one in task.map([2.0, 3.0])] == [2.0, 3.0]
