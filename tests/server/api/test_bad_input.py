"""Whatever is sent: a problem document that says what and what to do, never a 5xx, nothing lost."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from gpool.wire.frames import Malformed, decode_from_agent
from tests.server.server_desk import FUNCTION_SHA256, Desk, calls_document

pytestmark = pytest.mark.anyio

FUNCTION = {"sha256": FUNCTION_SHA256, "python": "3.11"}
TRUE = {"command": ["true"]}
INPUT = {"path": "a", "sha256": "0" * 64, "size_bytes": 1}

SUBMISSIONS: list[tuple[str, Any, int, str]] = [
    ("nothing to run", {}, 400, "exactly one of"),
    ("two things to run", {**TRUE, "function": FUNCTION, "calls": ["eA=="]}, 400, "exactly one"),
    ("an unknown field", {**TRUE, "gpus": 1}, 400, "gpus"),
    ("a wrong type", {"command": "true"}, 400, "command"),
    ("an empty command", {"command": []}, 400, "command"),
    ("an empty program", {"command": [""]}, 400, "first word"),
    ("a NUL in the command", {"command": ["a\0b"]}, 400, "NUL"),
    ("a NUL in the name", {**TRUE, "name": "a\0"}, 400, "NUL"),
    ("a NUL in a variable", {**TRUE, "env": {"A": "\0"}}, 400, "NUL"),
    ("a variable without a name", {**TRUE, "env": {"": "x"}}, 400, "env"),
    ("an endless command", {"command": ["x" * 200_000]}, 400, "at most 131072"),
    ("a name too long", {**TRUE, "name": "x" * 201}, 400, "name"),
    ("no CPU", {**TRUE, "cpus": 0}, 400, "cpus"),
    ("too many CPUs", {**TRUE, "cpus": 1e9}, 400, "cpus"),
    ("no memory", {**TRUE, "memory": "0GB"}, 400, "memory"),
    ("memory in bananas", {**TRUE, "memory": "4 bananas"}, 400, "memory"),
    ("memory of a universe", {**TRUE, "memory": "9" * 30 + "GB"}, 400, "memory"),
    ("more memory than there is", {**TRUE, "memory": "9000TB"}, 422, "memory"),
    ("no node", {**TRUE, "nodes": 0}, 400, "nodes"),
    ("more nodes than a gang can have", {**TRUE, "nodes": 1025}, 400, "nodes"),
    ("half a node", {**TRUE, "nodes": 1.5}, 400, "nodes"),
    ("an engine nobody knows", {**TRUE, "nodes": 2, "engine": "mpi"}, 400, "engine"),
    ("an engine for one node", {**TRUE, "engine": "ray"}, 400, "2 nodes or more"),
    ("a loss of one node", {**TRUE, "on_loss": "end"}, 400, "'on_loss'"),
    ("a gang of functions", {**calls_document(1), "nodes": 2}, 400, "runs a command on every node"),
    ("a gang without walls", {**TRUE, "nodes": 2, "tier": "none"}, 400, "leave 'tier' out"),
    ("a gang of microVMs", {**TRUE, "nodes": 2, "tier": "vm"}, 400, "leave 'tier' out"),
    (
        "torchrun twice",
        {"command": ["/usr/bin/torchrun", "x.py"], "nodes": 2, "engine": "torchrun"},
        400,
        "like python train.py",
    ),
    ("wanted before all time", {**TRUE, "by": "0001-01-01T00:00:00+14:00"}, 400, "by"),
    ("wanted after all time", {**TRUE, "by": "9999-12-31T23:59:59-14:00"}, 400, "by"),
    ("a label of two words", {**TRUE, "labels": ["fast disk"]}, 400, "zone=a"),
    ("labels as one word", {**TRUE, "labels": "ssd"}, 400, "labels"),
    ("a price below zero", {**TRUE, "max_price": "-0.1/h"}, 400, "below zero"),
    ("a price a day", {**TRUE, "max_price": "2/d"}, 400, "0.40/h"),
    ("a price finer than money", {**TRUE, "max_price": 1e-9}, 400, "millionth"),
    ("a GPU nobody can parse", {**TRUE, "gpu": "H100:::2"}, 400, "H100:::2"),
    ("minus one GPU", {**TRUE, "gpu": -1}, 400, "-1"),
    ("a huge number of GPUs", {**TRUE, "gpu": 10**30}, 400, ""),
    ("vram in words", {**TRUE, "vram": "much"}, 400, "much"),
    ("a tier that is none", {**TRUE, "tier": "steel"}, 400, "tier"),
    ("a path upwards", {**TRUE, "outputs": ["../x"]}, 400, ".."),
    ("an absolute path", {**TRUE, "outputs": ["/etc/passwd"]}, 400, "absolute"),
    ("an input upwards", {**TRUE, "inputs": [{**INPUT, "path": "a/../../b"}]}, 400, ".."),
    ("an input twice", {**TRUE, "inputs": [INPUT, {**INPUT, "path": "A"}]}, 400, "same file"),
    ("an input in a file", {**TRUE, "inputs": [INPUT, {**INPUT, "path": "a/b"}]}, 400, "folder"),
    ("an input of minus one byte", {**TRUE, "inputs": [{**INPUT, "size_bytes": -1}]}, 400, "size"),
    ("an input too large", {**TRUE, "inputs": [{**INPUT, "size_bytes": 10**30}]}, 422, "1 PB"),
    ("an input never uploaded", {**TRUE, "inputs": [INPUT]}, 422, "upload"),
    ("a hash that is none", {**TRUE, "inputs": [{**INPUT, "sha256": "x"}]}, 400, "sha256"),
    ("a function never uploaded", calls_document(1), 422, "upload"),
    ("a function without calls", {"function": FUNCTION}, 400, "calls"),
    ("a function with no calls", {"function": FUNCTION, "calls": []}, 400, "calls"),
    ("an empty call", {"function": FUNCTION, "calls": [""]}, 400, "calls[0]"),
    ("a call that is no base64", {"function": FUNCTION, "calls": ["???"]}, 400, "base64"),
    ("a call in both ways", {"function": FUNCTION, "calls": [{"payload": "eA==", "payload_sha256": "0" * 64}]}, 400, "exactly one"),
    ("a call too large", {"function": FUNCTION, "calls": ["A" * 100_000]}, 413, "artifact"),
    ("too many calls", {"function": FUNCTION, "calls": ["eA=="] * 10_001}, 400, "calls"),
    ("too many copies", {**TRUE, "copies": 10_001}, 400, "copies"),
    ("copies of a function", {"function": FUNCTION, "calls": ["eA=="], "copies": 2}, 400, "copies"),
    ("calls of a command", {**TRUE, "calls": ["eA=="]}, 400, "calls"),
    ("a Python that is none", {"function": {**FUNCTION, "python": "2.7"}, "calls": ["eA=="]}, 400, "python"),
    ("a batch that is none", {**TRUE, "batch": "b-nonsense"}, 400, "batch"),
    ("a batch of nobody", {**TRUE, "batch": "b-" + "0" * 13}, 404, "batch"),
    ("no time at all", {**TRUE, "timeout_s": 0}, 400, "timeout_s"),
    ("a priority too high", {**TRUE, "priority": 101}, 400, "priority"),
    ("minus one retry", {**TRUE, "retries": -1}, 400, "retries"),
]  # fmt: skip


def is_problem(answer: Any) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = answer.json()
    assert {"type", "title", "status", "detail", "code"} <= document.keys()
    assert document["status"] == answer.status_code
    assert document["detail"]
    assert "Input should" not in document["detail"]  # our words, not those of a library
    return document


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


async def test_a_submission_that_cannot_be_meant_is_refused_with_the_reason(desk: Desk) -> None:
    wrong = []
    for what, document, status, says in SUBMISSIONS:
        answer = await desk.post("/v1/tasks", document)
        told = is_problem(answer)
        if answer.status_code != status or says not in json.dumps(told):
            wrong.append((what, answer.status_code, told["detail"]))
    assert wrong == []
    assert desk.server.picture.state.queued_count == 0
    assert (await desk.get("/v1/tasks")).json()["items"] == []


RAW: list[tuple[str, bytes]] = [
    ("half a document", b'{"command": ["tr'),
    ("no document", b"\x00\x01\x02"),
    ("not UTF-8", b'{"command": ["\xff\xfe"]}'),
    ("a pickle", pickle.dumps({"command": ["true"]})),
    ("a list", b"[]"),
    ("a string", b'"true"'),
    ("null", b"null"),
    ("a number that is none", b'{"command": ["x"], "cpus": NaN}'),
    ("an infinite number", b'{"command": ["x"], "timeout_s": Infinity}'),
    ("an infinite GPU", b'{"command": ["x"], "gpu": Infinity}'),
    ("a number of thousands of digits", b'{"command": ["x"], "priority": ' + b"9" * 5000 + b"}"),
    ("a deep nest", b'{"command": ' + b"[" * 100_000),
    ("half a surrogate", b'{"command": ["\\ud800"]}'),
    ("nothing", b""),
]


@pytest.mark.parametrize(("what", "body"), RAW, ids=[what for what, _ in RAW])
async def test_a_body_that_is_no_document_is_refused(desk: Desk, what: str, body: bytes) -> None:
    for path in ("/v1/tasks", "/v1/nodes", "/submit_task"):
        answer = await desk.http.post(path, content=body)
        assert answer.status_code == 400, (what, answer.text)
        is_problem(answer)


async def test_a_long_body_is_not_read_to_its_end(desk: Desk) -> None:
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(200):
            read += 1 << 20
            yield b" " * (1 << 20)

    for path, limit in (("/v1/nodes", 1 << 20), ("/v1/tasks", 32 << 20)):
        read = 0
        answer = await desk.http.post(path, content=endless())
        assert is_problem(answer)["code"] == "too_large"
        assert read <= limit + (2 << 20)
    ten = b'{"name": "' + b"x" * 10_000_000 + b'"}'
    answer = await desk.http.post("/v1/nodes", content=ten)
    assert (answer.status_code, is_problem(answer)["code"]) == (413, "too_large")


async def test_a_10_mb_submission_of_one_command_is_refused(desk: Desk) -> None:
    answer = await desk.post("/v1/tasks", {"command": ["x" * 10_000_000]})
    assert answer.status_code == 400
    assert len(answer.content) < 5000


PATHS: list[tuple[str, str, int]] = [
    ("GET", "/v1/tasks/nonsense", 400),
    ("GET", "/v1/tasks/t-zzzzzzzzzzzzz", 400),
    ("GET", "/v1/tasks/t-" + "i" * 13, 400),
    ("GET", "/v1/tasks/b-" + "0" * 13, 400),
    ("GET", "/v1/tasks/t-" + "0" * 13, 404),
    ("GET", "/v1/tasks/%00", 400),
    ("GET", "/v1/tasks/..%2f..", 404),
    ("DELETE", "/v1/tasks/t-7zzzzzzzzzzzz", 404),
    ("GET", "/v1/tasks?limit=0", 400),
    ("GET", "/v1/tasks?limit=" + "9" * 40, 400),
    ("GET", "/v1/tasks?cursor=x", 400),
    ("GET", "/v1/tasks?status=sleeping", 400),
    ("GET", "/v1/tasks/t-" + "0" * 13 + "?wait=-1", 400),
    ("GET", "/v1/tasks/t-" + "0" * 13 + "?wait=nan", 400),
    ("GET", "/v1/tasks/t-" + "0" * 13 + "?wait=inf", 400),
    ("GET", "/v1/tasks/t-" + "0" * 13 + "/logs?after=-1", 400),
    ("GET", "/v1/tasks/t-" + "0" * 13 + "/logs?after=" + "9" * 30, 400),
    ("GET", "/v1/batches/b-" + "0" * 13 + "/results?after=9223372036854775808", 400),
    ("GET", "/v1/batches/t-" + "0" * 13, 400),
    ("GET", "/v1/nodes/n-" + "0" * 13, 404),
    ("GET", "/v1/resources/g-" + "0" * 13, 404),
    ("GET", "/v1/resources/x", 400),
    ("GET", "/v1/artifacts/x", 400),
    ("GET", "/v1/artifacts/" + "A" * 64, 400),
    ("GET", "/v1/artifacts/" + "a" * 64, 404),
    ("GET", "/v1/artifacts/..%2f..%2fetc%2fpasswd", 404),
    ("GET", "/task_status", 400),
    ("GET", "/no/such/route", 404),
    ("PUT", "/v1/tasks", 405),
    ("PATCH", "/healthz", 405),
]


@pytest.mark.parametrize(("method", "path", "status"), PATHS)
async def test_an_address_that_leads_nowhere_says_so(
    desk: Desk, method: str, path: str, status: int
) -> None:
    answer = await desk.http.request(method, path)
    assert answer.status_code == status, answer.text
    is_problem(answer)


HEADERS: list[tuple[str, str, dict[str, str], int]] = [
    ("POST", "/v1/tasks", {"idempotency-key": "x" * 201}, 400),
    ("POST", "/v1/tasks", {"idempotency-key": ""}, 400),
    ("PUT", "/v1/artifacts/" + "a" * 64, {"content-range": "bytes 5-4/10"}, 400),
    ("PUT", "/v1/artifacts/" + "a" * 64, {"content-range": "pages 1-2/3"}, 400),
    ("PUT", "/v1/artifacts/" + "a" * 64, {"content-range": "bytes 0-9/99999999999999999"}, 413),
    ("PUT", "/v1/artifacts/" + "a" * 64, {"content-length": "999999999999999"}, 413),
    ("PUT", "/v1/artifacts/" + "a" * 64, {"gpool-lease": "x:1"}, 400),
    ("PUT", "/v1/artifacts/" + "a" * 64, {"gpool-lease": "t-0000000000000:-1"}, 400),
    ("GET", "/v1/me", {"authorization": "Basic eA=="}, 401),
    ("GET", "/v1/me", {"authorization": "Bearer"}, 401),
]


@pytest.mark.parametrize(("method", "path", "headers", "status"), HEADERS)
async def test_a_header_that_cannot_be_meant_is_refused(
    desk: Desk, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    body = json.dumps(TRUE).encode()
    answer = await desk.http.request(method, path, headers=headers, content=body)
    assert answer.status_code == status, answer.text
    is_problem(answer)


async def test_a_full_queue_says_try_later(desk: Desk) -> None:
    small = desk.server.settings.model_copy(update={"max_queued": 3})
    desk.app.state.server = replace(desk.server, settings=small)
    await desk.command(copies=3)
    answer = await desk.post("/v1/tasks", TRUE)
    assert (answer.status_code, is_problem(answer)["code"]) == (429, "too_many")


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x93\xa4Beat\x01", b"\x92\xa3Foo\x01", pickle.dumps([1]), b"\xff" * 99]
)
def test_bytes_that_are_no_frame_are_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        decode_from_agent(data)


def test_the_base64_of_the_tables_is_what_it_seems() -> None:
    assert base64.b64decode("eA==") == b"x"
