"""Verified results on real nodes of two owners, four for comparators: commands and functions, by CLI and Python."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator

import cloudpickle
import pytest

from gpool import Client
from gpool.core.errors import TaskFailed
from tests.tools.processes import LONG_LEASE, PATIENCE_S, Daemon, Pool, eventually

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


def factor(number: int) -> int:
    """Find the smallest factor, the slow way."""
    return next(d for d in range(2, number + 1) if number % d == 0)


def is_factor(result: int, number: int) -> bool:
    return 1 < result <= number and number % result == 0


def seven_is_refused(result: int, number: int) -> bool:
    return is_factor(result, number) and result != 7


def test_a_result_is_checked_on_another_owners_node(lenders: Pool) -> None:
    with Client(lenders.address, lenders.key) as client:
        task = client.task(factor, verify="check", check=is_factor)
        assert task.remote(91) == 7
        assert list(task.map([15, 77])) == [3, 7]
        [newest] = lenders.json("ps", "--limit", "1")
        found = lenders.status(newest["id"])
        assert found["verify"] == "check"
        assert found["verification"]["agreed"] == 2


def test_a_refused_result_waits_for_a_further_owner(lenders: Pool) -> None:
    """One of two owners runs it, the other refuses the result: nobody is left to confirm that."""
    with Client(lenders.address, lenders.key) as client:
        run = client.task(factor, verify="check", check=seven_is_refused).submit(91)
        eventually(
            "a worker's and a checker's answer",
            lambda: lenders.status(run.id)["verification"]["answered"] == 2,
            PATIENCE_S,
        )
        assert client.task(factor, verify="check", check=seven_is_refused).remote(15) == 3
        assert lenders.status(run.id)["status"] == "queued"
        run.cancel()


def test_a_check_of_a_command_is_refused_with_a_hint(lenders: Pool) -> None:
    done = lenders.gpool("run", "--verify", "check", "--", "true")
    assert done.returncode == 2
    assert '@gpool.task(verify="check", check=is_right)' in done.stderr


def noisy(number: float) -> dict[str, float]:
    """Differ in every run."""
    return {"loss": number + random.uniform(0, 1e-3)}


def are_near(one: dict[str, float], other: dict[str, float]) -> bool:
    return abs(one["loss"] - other["loss"]) < 0.01


def misspelt(one: dict[str, float], other: dict[str, float]) -> bool:
    return one["los"] == other["los"]


def test_a_comparator_runs_on_nodes_of_further_owners(lenders: Pool) -> None:
    with Client(lenders.address, lenders.key) as client:
        for name in ("dan", "fay"):
            lend(lenders, client, name)
        task = client.task(noisy, verify=2, compare=are_near)
        assert task.remote(2.0)["loss"] == pytest.approx(2.0, abs=1e-3)
        [newest] = lenders.json("ps", "--limit", "1")
        found = lenders.status(newest["id"])
        assert found["verification"]["outcome"] == "accepted"
        assert found["verification"]["agreed"] == 4  # two answers, two comparers
        with pytest.raises(TaskFailed, match=r"could not be compared.*KeyError"):
            client.task(noisy, verify=2, compare=misspelt).remote(2.0)
        [newest] = lenders.json("ps", "--limit", "1")
        assert lenders.status(newest["id"])["verification"]["outcome"] == "not_compared"
