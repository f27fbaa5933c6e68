"""Pickles from nodes of other accounts: none is loaded unless the caller asks for it. Each attack has a control.

Values that are data arrive from every node.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import gpool
from gpool import Client, RemoteTraceback
from gpool.cli.main import cli
from gpool.client.options import Options
from tests.client.inprocess import Node, RealPool
from tests.client.standin import Pool

LARGE = "x" * 100_000
"""Too large for a value sent inline: it becomes an artifact."""


class Planted:
    """Its pickle creates a folder when it is loaded."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.makedirs, (self.folder, 0o777, True)


class PlantedError(ValueError):
    """Likewise, in the place of an exception."""

    def __init__(self, folder: str) -> None:
        super().__init__("no such model")
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.makedirs, (self.folder, 0o777, True)


def planted(folder: str) -> Callable[[], object]:
    return lambda: Planted(folder)


def planted_error(folder: str) -> Callable[[], object]:
    def fail() -> object:
        raise PlantedError(folder)

    return fail


def values(client: Client, function: Callable[[], object], **options: Any) -> Iterator[object]:
    """What each way to a value gives: a value or an exception."""
    task = client.task(function, **options)
    each = client.task(lambda _: function(), **options)
    for way in (
        task.remote,
        lambda: task.submit().result(),
        lambda: client.get(task.submit().id, trust=True, **options).result(),
        lambda: _only(each.map([1])),
        lambda: _only(each.map([1], return_exceptions=True)),
    ):
        try:
            yield way()
        except (gpool.GpoolError, PlantedError) as error:
            yield error


def _only(given: Iterator[object]) -> object:
    [value] = given
    return value


WAYS = 5


@pytest.mark.parametrize("own_node", [False, None], ids=["another's node", "older server"])
def test_a_planted_value_does_not_run_code(
    client: Client, pool: Pool, tmp_path: Path, own_node: bool | None
) -> None:
    pool.own_node = own_node
    trap = tmp_path / "ran"
    given = list(values(client, planted(str(trap))))
    assert [type(one) for one in given] == [gpool.UntrustedResult] * WAYS
    assert not trap.exists()


def test_the_planted_value_runs_code_from_an_own_node(
    client: Client, pool: Pool, tmp_path: Path
) -> None:
    trap = tmp_path / "ran"
    assert list(values(client, planted(str(trap)))) == [None] * WAYS
    assert trap.exists()


def test_the_planted_value_runs_code_where_the_caller_asked_for_pickles(
    client: Client, pool: Pool, tmp_path: Path
) -> None:
    pool.own_node = False
    trap = tmp_path / "ran"
    assert list(values(client, planted(str(trap)), results="pickle")) == [None] * WAYS
    assert trap.exists()


def test_data_arrives_from_anothers_node_small_and_large(client: Client, pool: Pool) -> None:
    pool.own_node = False
    assert list(values(client, lambda: {"a": [1, 2.5]})) == [{"a": [1, 2.5]}] * WAYS
    assert list(values(client, lambda: LARGE)) == [LARGE] * WAYS
    assert client.task(results="pickle")(lambda: LARGE).remote() == LARGE


def test_data_arrives_from_a_task_of_another_program(client: Client, pool: Pool) -> None:
    run = client.task(lambda: 42).submit()
    assert client.get(run.id).result() == 42


def test_a_pickle_of_another_program_is_loaded_only_where_the_caller_says_so(
    client: Client, pool: Pool, tmp_path: Path
) -> None:
    trap = tmp_path / "ran"
    run = client.task(planted(str(trap))).submit()
    with pytest.raises(gpool.Forbidden, match=r"its pickled value is not loaded; .*trust=True"):
        client.get(run.id).result()
    assert not trap.exists()
    client.get(run.id, trust=True).result()
    assert trap.exists()


def test_a_planted_exception_runs_no_code(client: Client, pool: Pool, tmp_path: Path) -> None:
    pool.own_node = False
    trap = tmp_path / "ran"
    for error in values(client, planted_error(str(trap))):
        assert type(error) is PlantedError  # rebuilt from data
        assert (str(error), error.folder) == ("no such model", str(trap))
        assert isinstance(error.__cause__, RemoteTraceback)
        assert "in fail" in str(error.__cause__)
    assert not trap.exists()
    with pytest.raises(gpool.TaskFailed):
        client.task(planted_error(str(trap)), results="pickle").remote()
    assert trap.exists()  # the control


def test_an_exception_pickled_by_an_older_node_is_its_text(
    client: Client, pool: Pool, tmp_path: Path
) -> None:
    pool.own_node = False
    trap = tmp_path / "ran"
    pool.forged = pickle.dumps(PlantedError(str(trap)))
    with pytest.raises(gpool.TaskFailed, match="PlantedError: no such model"):
        client.task(planted_error(str(trap))).remote()
    assert not trap.exists()


def test_the_refusal_names_the_type_the_node_and_what_to_do(
    client: Client, pool: Pool, tmp_path: Path
) -> None:
    pool.own_node, pool.node_name = False, "rig\x1b[2J"
    run = client.task(planted(str(tmp_path / "ran"))).submit()
    with pytest.raises(gpool.UntrustedResult) as caught:
        run.result()
    said = caught.value.detail
    assert run.id in said
    assert "a value of type tests.client.test_untrusted_results.Planted" in said
    assert "node rig\ufffd[2J (n-" in said
    assert "another account" in said
    assert "run code on this machine" in said
    assert "Return numbers, text" in said
    assert 'results="pickle"' in said
    assert run.wait().value  # the bytes are there for whoever wants them
    assert client.get(run.id, results="pickle").result() is None


def test_a_value_pickled_by_an_older_node_is_refused(client: Client, pool: Pool) -> None:
    pool.own_node, pool.forged = False, pickle.dumps(42)
    with pytest.raises(gpool.UntrustedResult, match="returned a pickled value from node"):
        client.task(lambda: 42).remote()
    pool.own_node = True
    assert client.task(lambda: 42).remote() == 42


@pytest.mark.parametrize("own_node", [True, False])
def test_the_command_line_shows_a_result_and_loads_no_pickle(
    client: Client, pool: Pool, tmp_path: Path, own_node: bool
) -> None:
    pool.own_node = own_node
    trap = tmp_path / "ran"
    run = client.task(planted(str(trap))).submit()
    said = CliRunner().invoke(cli, ["result", run.id, "--json"], obj=client)
    shown = json.loads(said.stdout)
    assert (said.exit_code, shown["own_node"], bool(shown["value"])) == (0, own_node, True)
    assert not trap.exists()
    client.get(run.id, results="pickle").result()
    assert trap.exists()  # the control


def test_a_command_refuses_pickled_results_because_it_has_none(client: Client, pool: Pool) -> None:
    with pytest.raises(gpool.Invalid, match="a command has no pickled result"):
        client.run(["true"], results="pickle")
    with pytest.raises(gpool.Invalid, match="a command has no pickled result"):
        client.submit_command(["true"], options=Options(results="pickle"))
    assert not pool.bodies


def test_another_word_for_results_is_refused_where_it_is_written(client: Client) -> None:
    with pytest.raises(gpool.Invalid, match="results is 'pickles'; give results='pickle'"):
        client.task(results="pickles")


# ---- the server's word, by the real application


@pytest.fixture
def owner(real: RealPool) -> Iterator[Client]:
    with Client("http://pool.test", real.key, transport=real.transport) as client:
        yield client


@pytest.fixture
def stranger(real: RealPool, owner: Client) -> Iterator[Client]:
    """Another account of the pool, without a node."""
    account = {"name": "ada", "password": "a long password of ada's"}
    owner.api.send_json("POST", "/v1/users", account)
    token = owner.api.send_json("POST", "/v1/auth/password", account)["access_token"]
    with Client("http://pool.test", token, transport=real.transport) as client:
        yield client


def test_only_the_nodes_owner_unpickles_what_it_returned(
    owner: Client, stranger: Client, node: Node, tmp_path: Path
) -> None:
    trap = tmp_path / "ran"
    refused = list(values(stranger, planted(str(trap))))
    assert [type(one) for one in refused] == [gpool.UntrustedResult] * WAYS
    assert not trap.exists()
    assert list(values(owner, planted(str(trap)))) == [None] * WAYS
    assert trap.exists()
    assert list(values(stranger, lambda: 42)) == [42] * WAYS
    assert list(values(stranger, lambda: 42, results="pickle")) == [42] * WAYS


def test_whose_the_node_is_depends_on_who_reads_not_on_who_submitted(
    owner: Client, stranger: Client, node: Node
) -> None:
    run = stranger.task(lambda: 42).submit()
    assert (run.wait().own_node, run.wait().node_name) == (False, "node")
    seen_by_owner = owner.get(run.id).wait()  # an operator, who may read it
    assert (seen_by_owner.own_node, seen_by_owner.node) == (True, run.wait().node)
