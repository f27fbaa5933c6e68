"""Results of a hostile node: none runs code, each is a clear error within 256 MB. The controls run the code."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpool
from gpool import Client
from gpool.wire.values import DATA, MAX_VALUE_BYTES
from tests.client import hostile_values as hostile
from tests.client.standin import Pool

MOST_BYTES = 256_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile") / "ran"


@pytest.fixture(scope="module")
def lines(folder: Path) -> list[dict[str, Any]]:
    """One line for each payload, as the SDK answered it in a process of its own."""
    words = [sys.executable, "-m", "tests.client.hostile_values", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_no_hostile_result_runs_code(lines: list[dict[str, Any]], folder: Path) -> None:
    assert len([line for line in lines if line["kind"] == "value"]) >= 200
    assert [line for line in lines if line["events"] or line["ran"]] == []
    assert not folder.exists()


def test_every_hostile_result_is_a_clear_error(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        if line["kind"] == "largest" or "noise" in line["name"]:
            continue  # values, or by chance one
        assert line["error"] in ("TaskFailed", "UntrustedResult", "PlantedError"), line
        assert line["detail"].isprintable(), line
        assert line["detail"], line
    refused = [line for line in lines if line["error"] == "UntrustedResult"]
    assert len(refused) >= len(hostile.PROTOCOLS)
    assert all('results="pickle"' in line["detail"] for line in refused)


def test_results_take_less_than_256_megabytes(lines: list[dict[str, Any]]) -> None:
    """Peak of the whole process, with the bytes received; also for the largest values that are accepted."""
    assert [line for line in lines if line["kind"] == "largest" and line["error"]] == []
    assert [line for line in lines if line["peak_bytes"] > MOST_BYTES] == []


@pytest.mark.parametrize("protocol", hostile.PROTOCOLS)
@pytest.mark.parametrize("gadget", list(hostile.gadgets("")))
def test_the_pickles_run_code_where_the_caller_asks_for_pickles(
    gadget: str, protocol: int, tmp_path: Path
) -> None:
    trap = tmp_path / "ran"
    trap.mkdir()
    pickled = pickle.dumps(hostile.gadgets(str(trap / "inside"))[gadget], protocol)
    hostile.read(pickled, "returned", own_node=False, requested=False)
    assert not list(trap.iterdir())
    hostile.read(pickled, "returned", own_node=False, requested=True)
    assert list(trap.iterdir())


def test_an_unpickler_would_run_the_planted_methods() -> None:
    hostile.RAN.clear()
    loaded = pickle.loads(pickle.dumps(hostile.PlantedError("word")))
    pickle.loads(pickle.dumps(hostile.Planted("word")))
    assert type(loaded) is hostile.PlantedError
    assert set(hostile.RAN) >= {"__init__", "__post_init__", "__setattr__", "__setstate__"}


def test_a_planted_dataclass_and_exception_arrive_without_running_their_methods() -> None:
    value = hostile.encoding.encode([hostile.Planted("word")], pickle.dumps)
    assert value[:1] != DATA  # it has a `__setstate__` of its own
    sent = hostile.named(
        "R", hostile.__name__, "Planted", ("word",), b"t\x01\0\0\0" + hostile.text("w")
    )
    hostile.RAN.clear()
    found = hostile.read(sent, "returned", own_node=False, requested=False)
    assert type(found) is hostile.Planted
    assert found.word == "w"
    error = hostile.read(
        hostile.encoding.encode_exception(hostile.PlantedError("x")),
        "raised",
        own_node=False,
        requested=False,
    )
    assert (type(error), str(error)) == (hostile.PlantedError, "x")
    assert hostile.RAN == ["__init__"]  # of the exception made here


def test_a_value_past_the_limit_is_not_read_to_its_end(client: Client, pool: Pool) -> None:
    pool.own_node, pool.forged = False, DATA + b"y" + bytes(MAX_VALUE_BYTES)
    with pytest.raises(gpool.TaskFailed, match="more than 64 MiB; return less per call"):
        client.task(lambda: 1).remote()


def test_one_hostile_result_spoils_one_place_of_a_map(client: Client, pool: Pool) -> None:
    pool.own_node, pool.forged = False, DATA + b"\xff"
    found = list(client.task(lambda x: x).map([1, 2], return_exceptions=True))
    assert [type(one) for one in found] == [gpool.TaskFailed] * 2
    assert "cannot be decoded: it holds the unknown tag 255" in str(found[0])
    pool.forged = b""
    assert list(client.task(lambda x: x).map([1, 2])) == [1, 2]
