"""Results of functions from a real node, as its owner and a stranger to it read them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy
import pytest

import gpool
from gpool import Client, RemoteTraceback
from tests.tools.processes import Pool

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@dataclass(frozen=True)
class Fit:
    weights: Any
    loss: float


class Diverged(Exception):
    def __init__(self, step: int, loss: float) -> None:
        super().__init__(f"step {step}: loss {loss}")
        self.step = step


class Handle:
    """No data: only its pickle can be sent."""


def fit(steps: int) -> object:
    if steps < 0:
        raise Diverged(steps, 1e9)
    return Handle() if steps == 0 else [Fit(numpy.arange(float(steps)), 0.5), {"steps": steps}]


@pytest.fixture
def owner(pool: Pool) -> Iterator[Client]:
    with Client(pool.address, pool.key) as client:
        yield client


@pytest.fixture
def stranger(pool: Pool, owner: Client) -> Iterator[Client]:
    account = {"name": "ada", "password": "a long password of ada's"}
    owner.api.send_json("POST", "/v1/users", account)
    token = owner.api.send_json("POST", "/v1/auth/password", account)["access_token"]
    with Client(pool.address, token) as client:
        yield client


def test_data_reaches_everybody_and_pickles_only_the_nodes_owner(
    owner: Client, stranger: Client
) -> None:
    for client in (owner, stranger):
        task = client.task(fit)
        for steps in (3, 20_000):  # inline, and as an artifact
            [found, rest] = task.remote(steps)
            assert type(found) is Fit
            assert numpy.array_equal(found.weights, numpy.arange(float(steps)))
            assert (found.loss, rest) == (0.5, {"steps": steps})
        with pytest.raises(Diverged, match="step -1: loss") as caught:
            task.remote(-1)
        assert caught.value.step == -1
        assert isinstance(caught.value.__cause__, RemoteTraceback)
        assert "in fit" in str(caught.value.__cause__)
        assert [one[1] for one in task.map([1, 2])] == [{"steps": 1}, {"steps": 2}]
    assert type(owner.task(fit).remote(0)) is Handle
    with pytest.raises(
        gpool.UntrustedResult, match=r"a value of type tests\.e2e\.test_results\.Handle"
    ):
        stranger.task(fit).remote(0)
    assert type(stranger.task(fit, results="pickle").remote(0)) is Handle
